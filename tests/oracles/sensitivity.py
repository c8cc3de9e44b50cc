"""Brute-force sensitivities in float64: T1-T3 read aloud, one row, one point, one patch, one quadrant at a time.

Shapes: F rows, K fan-in, P patches of one point, T time steps or positions, C channels, E embedding width.
`Points` is one (P, K) array per data point; the number of patches may differ between points.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

Array = npt.NDArray[np.float64]
Points = list[Array]

SIGNS = (+1, -1)
RELATIVE, ABSOLUTE = 1e-5, 1e-7  # scores come back in float32


def f64(tensor: torch.Tensor) -> Array:
    """A float64 numpy copy."""
    return tensor.detach().cpu().to(torch.float64).numpy().copy()


def disagreements(got: Mapping[str, torch.Tensor], expected: Mapping[str, Array]) -> list[str]:
    """What differs between scores under test and expected ones, in words; empty when they agree."""
    if set(got) != set(expected):
        return [f"names {sorted(got)} instead of {sorted(expected)}"]
    found = []
    for name, reference in expected.items():
        scores = got[name]
        if tuple(scores.shape) != reference.shape or scores.dtype != torch.float32:
            found.append(f"{name}: {scores.dtype} {tuple(scores.shape)} instead of float32 {reference.shape}")
        elif not np.allclose(f64(scores), reference, rtol=RELATIVE, atol=ABSOLUTE):
            worst = np.unravel_index(np.nanargmax(np.abs(f64(scores) - reference)), reference.shape)
            found.append(f"{name}{list(map(int, worst))}: {scores[worst].item()} instead of {reference[worst]}")
    return found


# --- T1-T3 -----------------------------------------------------------------------------------------------------------


def shares(w_K: Array, a_K: Array) -> Array:
    """(4, K): for each quadrant (s, t) the share w_k^s a_k^t / sum_k w_k^s a_k^t, with 0/0 = 0 (T1, T2)."""
    rows = []
    for s, t in itertools.product(SIGNS, SIGNS):
        products = np.maximum(s * w_K, 0.0) * np.maximum(t * a_K, 0.0)
        total = products.sum()
        rows.append(products / total if total > 0 else np.zeros_like(products))
    return np.stack(rows)


def row_sensitivity(w_K: Array, points: Points, reduce: str) -> Array:
    """(K,): one row's empirical sensitivities (T3): max or mean over patches, max over quadrants, max over points."""
    best = np.zeros_like(w_K)
    for patches_PK in points:
        if len(patches_PK) == 0:
            continue
        shares_P4K = np.stack([shares(w_K, a_K) for a_K in patches_PK])
        over_patches = {"max": shares_P4K.max(axis=0), "mean": shares_P4K.mean(axis=0)}[reduce]
        best = np.maximum(best, over_patches.max(axis=0))
    return best


def sensitivity(weight_FK: Array, points: Points, reduce: str) -> Array:
    """(F, K): the sensitivities of a weight whose rows all meet the same patches."""
    return np.stack([row_sensitivity(w_K, points, reduce) for w_K in weight_FK])


def union(*uses: Points) -> Points:
    """The patches of one weight used at several places: for each point, the patches of all uses."""
    return [np.concatenate(of_one_point) for of_one_point in zip(*uses, strict=True)]


# --- Linear ----------------------------------------------------------------------------------------------------------


def linear_points(x: torch.Tensor) -> Points:
    """One (P, K) array per point of x (N, ..., K): every leading dimension but the first counts patches."""
    return [f64(point).reshape(-1, x.shape[-1]) for point in x]


def linear_sensitivity(weight: torch.Tensor, x: torch.Tensor, reduce: str) -> Array:
    """(F, K): the sensitivities of a Linear weight over x (N, ..., K)."""
    return sensitivity(f64(weight), linear_points(x), reduce)


# --- Convolutions ----------------------------------------------------------------------------------------------------


def source_index(i: int, size: int, mode: str) -> int | None:
    """Where padded position i is read from, or None where zero padding puts a zero."""
    if 0 <= i < size:
        return i
    if mode == "zeros":
        return None
    if mode == "replicate":
        return min(max(i, 0), size - 1)
    if mode == "circular":
        return i % size
    assert mode == "reflect"
    return -i if i < 0 else 2 * (size - 1) - i


def conv_padding(conv: nn.Module) -> list[tuple[int, int]]:
    """(before, after) for each spatial axis; 'same' puts the odd one after."""
    if conv.padding == "valid":
        return [(0, 0) for _ in conv.kernel_size]
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in conv.padding]


def conv_windows(conv: nn.Module, x_CS: Array) -> Array:
    """(P, C, *kernel): the windows of one point, in the order of the output positions."""
    sizes = x_CS.shape[1:]
    padding = conv_padding(conv)
    n_out = [
        (size + before + after - d * (k - 1) - 1) // s + 1
        for size, (before, after), d, k, s in zip(sizes, padding, conv.dilation, conv.kernel_size, conv.stride)
    ]
    windows = []
    for position in itertools.product(*map(range, n_out)):
        window = np.zeros((x_CS.shape[0], *conv.kernel_size))
        for tap in itertools.product(*map(range, conv.kernel_size)):
            source = [
                source_index(p * s - before + t * d, size, conv.padding_mode)
                for p, s, (before, _), t, d, size in zip(position, conv.stride, padding, tap, conv.dilation, sizes)
            ]
            if None not in source:
                window[(slice(None), *tap)] = x_CS[(slice(None), *source)]
        windows.append(window)
    return np.stack(windows)


def conv_points(conv: nn.Module, x: torch.Tensor) -> list[Points]:
    """For each group, one (P, K) array per point: the channels of that group only."""
    groups = []
    for channels in np.split(np.arange(conv.in_channels), conv.groups):
        windows = [conv_windows(conv, f64(point)[channels]) for point in x]
        groups.append([w.reshape(len(w), -1) for w in windows])
    return groups


def conv_sensitivity(conv: nn.Module, groups: list[Points], reduce: str) -> Array:
    """Scores of the weight's own shape: filter i meets the patches of its own group."""
    weight = f64(conv.weight)
    n_per_group = len(weight) // conv.groups
    rows = [row_sensitivity(w.reshape(-1), groups[i // n_per_group], reduce) for i, w in enumerate(weight)]
    return np.stack(rows).reshape(weight.shape)


def conv_output(conv: nn.Module, groups: list[Points], point: int) -> Array:
    """(F, P): the convolution as dot products of filters and patches, for checking the patches themselves."""
    weight = f64(conv.weight)
    n_per_group = len(weight) // conv.groups
    bias = np.zeros(len(weight)) if conv.bias is None else f64(conv.bias)
    return np.stack([groups[i // n_per_group][point] @ w.reshape(-1) + bias[i] for i, w in enumerate(weight)])


# --- Recurrent layers and cells --------------------------------------------------------------------------------------


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z))."""
    return 1.0 / (1.0 + np.exp(-z))


def recurrent_step(mode: str, from_x: Array, from_h: Array, h: Array, c: Array) -> tuple[Array, Array]:
    """(new hidden before any projection, new cell state) from W_ih x + b_ih and W_hh h + b_hh."""
    if mode == "RNN_TANH":
        return np.tanh(from_x + from_h), c
    if mode == "RNN_RELU":
        return np.maximum(from_x + from_h, 0.0), c
    if mode == "GRU":
        r_x, z_x, n_x = np.split(from_x, 3)
        r_h, z_h, n_h = np.split(from_h, 3)
        z = sigmoid(z_x + z_h)
        return (1 - z) * np.tanh(n_x + sigmoid(r_x + r_h) * n_h) + z * h, c
    assert mode == "LSTM"
    i, f, g, o = np.split(from_x + from_h, 4)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def run_direction(
    module: nn.Module, mode: str, suffix: str, inputs: Sequence[Array], h: Array, c: Array
) -> tuple[dict[str, list[Array]], list[Array]]:
    """({weight name: its patches}, hidden states) of one layer and direction over one sequence, in the order given."""
    weights = {name: f64(p) for name, p in module.named_parameters() if name.endswith(suffix)}
    bias_ih, bias_hh = (weights.get(f"{name}{suffix}", 0.0) for name in ("bias_ih", "bias_hh"))
    patches: dict[str, list[Array]] = {name: [] for name in weights if name.startswith("weight")}
    states = []
    for x in inputs:
        patches[f"weight_ih{suffix}"].append(x)
        patches[f"weight_hh{suffix}"].append(h)
        from_x = weights[f"weight_ih{suffix}"] @ x + bias_ih
        from_h = weights[f"weight_hh{suffix}"] @ h + bias_hh
        h, c = recurrent_step(mode, from_x, from_h, h, c)
        if f"weight_hr{suffix}" in weights:
            patches[f"weight_hr{suffix}"].append(h)
            h = weights[f"weight_hr{suffix}"] @ h
        states.append(h)
    return patches, states


def recurrent_points(
    module: nn.Module, sequences: Sequence[Array], h0: Array | None = None, c0: Array | None = None
) -> tuple[dict[str, Points], list[Array]]:
    """({weight name: one (T, K) array per point}, outputs (T, D * H) per point).

    sequences: one (T, K) array per point, padding already cut off. h0, c0: (layers * directions, N, H) or None.
    """
    n_hidden = module.proj_size or module.hidden_size
    n_directions = 2 if module.bidirectional else 1
    points: dict[str, Points] = {name: [] for name, _ in module.named_parameters() if name.startswith("weight")}
    outputs = []
    for n, sequence in enumerate(sequences):
        inputs = list(sequence)
        for layer in range(module.num_layers):
            both = []
            for direction in range(n_directions):
                slot = layer * n_directions + direction
                h = np.zeros(n_hidden) if h0 is None else h0[slot, n]
                c = np.zeros(module.hidden_size) if c0 is None else c0[slot, n]
                order = -1 if direction else 1
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                patches, states = run_direction(module, module.mode, suffix, inputs[::order], h, c)
                for name, of_steps in patches.items():
                    points[name].append(np.stack(of_steps))
                both.append(states[::order])
            inputs = [np.concatenate(at_t) for at_t in zip(*both, strict=True)]
        outputs.append(np.stack(inputs))
    return points, outputs


def cell_points(module: nn.Module, mode: str, sequences: Sequence[Array]) -> tuple[dict[str, Points], list[Array]]:
    """As recurrent_points, for a Cell that starts from nothing and is called once per step."""
    points: dict[str, Points] = {"weight_ih": [], "weight_hh": []}
    outputs = []
    for sequence in sequences:
        zeros = np.zeros(module.hidden_size)
        patches, states = run_direction(module, mode, "", list(sequence), zeros, zeros)
        for name, of_points in points.items():
            of_points.append(np.stack(patches[name]))
        outputs.append(np.stack(states))
    return points, outputs


def named_sensitivity(module: nn.Module, points: dict[str, Points], reduce: str, prefix: str = "") -> dict[str, Array]:
    """{prefix + name: (F, K)} for every weight of a module whose patches are known."""
    weights = dict(module.named_parameters())
    return {prefix + name: sensitivity(f64(weights[name]), of_name, reduce) for name, of_name in points.items()}


# --- MultiheadAttention ----------------------------------------------------------------------------------------------


def softmax(z: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def additive(mask: torch.Tensor | None) -> Array | float:
    """A mask as numbers to add to the logits: True (or -inf) means not allowed."""
    if mask is None:
        return 0.0
    if mask.dtype == torch.bool:
        return np.where(mask.numpy(), -np.inf, 0.0)
    return f64(mask)


def attention_weights(module: nn.MultiheadAttention) -> list[Array]:
    """The query, key and value projections, whether they are stored packed or apart."""
    if module.in_proj_weight is not None:
        return np.split(f64(module.in_proj_weight), 3)
    return [f64(w) for w in (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)]


def attention_heads(module: nn.MultiheadAttention, inputs: tuple[Array, Array, Array], mask_HTS: Array) -> Array:
    """(T, E): the concatenated heads of one point, before out_proj. mask_HTS is added to the logits."""
    biases = [0.0, 0.0, 0.0] if module.in_proj_bias is None else np.split(f64(module.in_proj_bias), 3)
    q, k, v = (x @ w.T + b for x, w, b in zip(inputs, attention_weights(module), biases))
    n_added = 0
    if module.bias_k is not None:
        k, v = np.vstack([k, f64(module.bias_k)[0]]), np.vstack([v, f64(module.bias_v)[0]])
        n_added += 1
    if module.add_zero_attn:
        k, v = np.vstack([k, np.zeros(k.shape[1])]), np.vstack([v, np.zeros(v.shape[1])])
        n_added += 1
    mask_HTS = np.pad(mask_HTS, ((0, 0), (0, 0), (0, n_added)))
    heads = []
    for h, columns in enumerate(np.split(np.arange(module.embed_dim), module.num_heads)):
        logits = q[:, columns] @ k[:, columns].T / np.sqrt(len(columns)) + mask_HTS[h]
        heads.append(softmax(logits) @ v[:, columns])
    return np.concatenate(heads, axis=1)


def attention_points(
    module: nn.MultiheadAttention,
    query: Points,
    key: Points,
    value: Points,
    *,
    attn_mask: torch.Tensor | None = None,
    key_padding_mask: torch.Tensor | None = None,
) -> tuple[dict[str, Points], Points]:
    """({"q", "k", "v", "out": patches}, outputs (T, E) per point); a key or value that is hidden is no patch.

    attn_mask is (T, S) or (N * heads, T, S), key_padding_mask (N, S), as the module takes them.
    """
    n_heads = module.num_heads
    heads, outputs = [], []
    for n, inputs in enumerate(zip(query, key, value, strict=True)):
        mask = np.zeros((n_heads, len(inputs[0]), len(inputs[1])))
        given = additive(attn_mask)
        mask = mask + (given[n * n_heads : (n + 1) * n_heads] if np.ndim(given) == 3 else given)
        if key_padding_mask is not None:
            mask = mask + additive(key_padding_mask)[n][None, None, :]
        heads.append(attention_heads(module, inputs, mask))
        bias = 0.0 if module.out_proj.bias is None else f64(module.out_proj.bias)
        outputs.append(heads[-1] @ f64(module.out_proj.weight).T + bias)
    if key_padding_mask is not None:
        shown = [additive(row) == 0 for row in key_padding_mask]
        key, value = ([x[is_shown] for x, is_shown in zip(points, shown)] for points in (key, value))
    return {"q": query, "k": key, "v": value, "out": heads}, outputs


def attention_sensitivity(
    module: nn.MultiheadAttention, points: dict[str, Points], reduce: str, prefix: str = ""
) -> dict[str, Array]:
    """{parameter name: scores}; the packed weight holds the rows of query, key and value one below the other."""
    apart = [sensitivity(w, points[name], reduce) for name, w in zip("qkv", attention_weights(module))]
    scores = {f"{prefix}out_proj.weight": sensitivity(f64(module.out_proj.weight), points["out"], reduce)}
    if module.in_proj_weight is not None:
        return scores | {f"{prefix}in_proj_weight": np.concatenate(apart)}
    return scores | {f"{prefix}{name}_proj_weight": s for name, s in zip("qkv", apart)}
