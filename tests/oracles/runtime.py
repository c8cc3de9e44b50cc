"""What the loops of the runtime must give: one output at a time, float64, no thought of speed."""

import math

import numpy as np


def convolution(x, weight, bias, stride, padding, dilation, groups):
    n, _, height, width = x.shape
    n_rows, per_group, kh, kw = weight.shape
    sizes = zip((height, width), (kh, kw), stride, padding, dilation)
    high, wide = ((size + 2 * pad - reach * (k - 1) - 1) // step + 1 for size, k, step, pad, reach in sizes)
    out = np.zeros((n, n_rows, high, wide))
    for point, row, i, j in np.ndindex(out.shape):
        total = float(bias[row])
        first = row // (n_rows // groups) * per_group
        for c, a, b in np.ndindex(per_group, kh, kw):
            y, z = i * stride[0] - padding[0] + a * dilation[0], j * stride[1] - padding[1] + b * dilation[1]
            if 0 <= y < height and 0 <= z < width:
                total += float(weight[row, c, a, b]) * float(x[point, first + c, y, z])
        out[point, row, i, j] = total
    return out


def linear(x, weight, bias):
    out = np.zeros((*x.shape[:-1], len(weight)))
    for *at, row in np.ndindex(out.shape):
        out[(*at, row)] = float(bias[row]) + sum(float(w) * float(v) for w, v in zip(weight[row], x[tuple(at)]))
    return out


def pooling(x, kernel, stride, padding, is_max):
    n, channels, height, width = x.shape
    high, wide = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
    out = np.zeros((n, channels, high, wide))
    for point, c, i, j in np.ndindex(out.shape):
        rows = [y for y in range(i * stride - padding, i * stride - padding + kernel) if 0 <= y < height]
        columns = [z for z in range(j * stride - padding, j * stride - padding + kernel) if 0 <= z < width]
        seen = [float(x[point, c, y, z]) for y in rows for z in columns]
        out[point, c, i, j] = max(seen) if is_max else sum(seen) / kernel**2
    return out


def layer_norm(x, gain, shift, epsilon):
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        line = x[at].astype(float)
        mean = sum(line) / len(line)
        variance = sum((value - mean) ** 2 for value in line) / len(line)
        out[at] = [(v - mean) / math.sqrt(variance + epsilon) * g + s for v, g, s in zip(line, gain, shift)]
    return out


def lstm(x, w_input, w_state, bias):
    """Outputs T x H of one point that goes through T steps from a state of zeros; rows i, f, g, o."""
    hidden = w_state.shape[1]
    h, c, out = np.zeros(hidden), np.zeros(hidden), []
    for x_t in x.astype(float):
        gates = w_input.astype(float) @ x_t + w_state.astype(float) @ h + bias
        i, f, g, o = gates.reshape(4, hidden)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        out.append(h)
    return np.array(out)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


ACTIVATIONS = {
    "none": lambda v: v,
    "relu": lambda v: max(v, 0.0),
    "relu6": lambda v: min(max(v, 0.0), 6.0),
    "sigmoid": lambda v: 1 / (1 + math.exp(-v)),
    "tanh": math.tanh,
    "silu": lambda v: v / (1 + math.exp(-v)),
    "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
    "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
}


def attention(q, k, v, scale, mask):
    """The mean of the values of each head, weighted by exp(scale q . k + mask); N x H x T x D, mask T x keys."""
    out = np.zeros(q.shape)
    for point, head, i in np.ndindex(q.shape[:3]):
        scores = [scale * float(np.dot(q[point, head, i].astype(float), key)) for key in k[point, head].astype(float)]
        scores = [score + float(more) for score, more in zip(scores, mask[i])]
        powers = [math.exp(score - max(scores)) for score in scores]
        out[point, head, i] = sum(p * value for p, value in zip(powers, v[point, head].astype(float))) / sum(powers)
    return out
