"""What callers do with a compiled network: odd inputs, autocast, copies, results that they write to."""

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from runtime.nets import Net, is_close, kernels, thin
from torch import nn

import sipp
from sipp.errors import DataError, ModelError
from sipp.runtime import cpu_network, model_weights


def test_an_example_that_holds_one_tensor_twice(never_dense, tmp_path):
    """torch.export takes one tensor in two places for one input."""
    net, x, y = (
        thin(Net(lambda a, b, x, y: a(x) - b(y), nn.Linear(8, 6), nn.Linear(8, 6)), 0.4),
        torch.randn(5, 8),
        torch.randn(5, 8),
    )
    fast = sipp.sparse(net, (x, x))
    assert is_close(fast(x, y), net(x, y)) and is_close(fast(x, x), net(x, x))
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    made = sipp.export(net, tmp_path / "net.onnx", (x, x))
    session = onnxruntime.InferenceSession(made.path, providers=["CPUExecutionProvider"])
    named = {slot.name: given.numpy() for slot, given in zip(session.get_inputs(), (x, y), strict=True)}
    assert is_close(torch.from_numpy(session.run(None, named)[0]), net(x, y))


def test_results_share_no_memory(never_dense):
    def several(layer, x):
        y = x.sin()
        return y, y.clone(), y.view(-1), layer(y)

    net, x = thin(Net(several, nn.Linear(8, 6)), 0.4), torch.randn(5, 8)
    fast = sipp.sparse(net, x)
    wanted = [value.clone() for value in net(x)]
    for i in range(len(wanted)):
        found = fast(x)
        found[i].zero_()
        assert all(is_close(one, other) for j, (one, other) in enumerate(zip(found, wanted)) if j != i)


def test_where_the_example_is_not_finite_torch_runs_it(never_dense):
    """A plan that gives up in every call would cost its own time, the model's, and that of packing weights."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    net = thin(Net(lambda layer, x, mask: layer(x, src_mask=mask), encoder), 0.4)
    x, mask = torch.randn(3, 5, 8), torch.full((5, 5), -math.inf).triu(1)
    fast = sipp.sparse(net, (x, mask))
    assert fast.latest.is_dense and "not finite" in str(fast)
    assert is_close(fast(x, mask), net(x, mask))
    broken = thin(nn.Linear(8, 6), 0.4)
    broken.weight.data[0, 0] = math.nan
    assert sipp.sparse(broken, x).latest.is_dense


def test_calls_in_a_row_that_are_not_finite_pack_no_weights(never_dense, monkeypatch):
    packed, steps = [], []
    monkeypatch.setattr(cpu_network, "pack_parameters", lambda *given: (packed.append(1), whole(*given))[1])
    net, x = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3), torch.randn(5, 8)
    fast = sipp.sparse(net, x)
    n_bytes = fast.n_bytes
    ran = fast.latest.steps
    ran[0] = noting(ran[0], steps)
    bad = torch.full_like(x, math.nan)
    packed.clear()
    for _ in range(4):
        assert torch.equal(fast(bad).isnan(), net(bad).isnan())
    assert len(packed) == 1 and not steps  # and an input that is not finite starts no plan
    assert is_close(fast(x), net(x)) and steps
    fast(bad)
    assert len(packed) == 2 and fast.n_bytes == n_bytes


whole = cpu_network.pack_parameters


def test_where_memory_ends_no_weight_is_lost(never_dense, monkeypatch):
    """A call that needs the dense weights, and gets one of them only: the next one has them all."""
    net, x = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3), torch.randn(5, 8)
    fast = sipp.sparse(net, x)

    def one_only(*shape, dtype):
        if shape == (4, 16):
            raise MemoryError
        return torch.zeros(shape, dtype=dtype)

    with monkeypatch.context() as patched:
        patched.setattr(model_weights.memory, "zeros", one_only)
        with pytest.raises(MemoryError):
            fast(x[:3])
    assert is_close(fast(x), net(x)) and is_close(fast(x[:3]), net(x[:3]))


def test_an_interrupt_while_weights_are_packed_loses_none(never_dense, monkeypatch):
    net, x = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3), torch.randn(5, 8)
    fast, usual, calls = sipp.sparse(net, x), torch.empty, []

    def interrupted(*args, **kwargs):
        if args == (0,):
            calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return usual(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(model_weights.torch, "empty", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fast(x[:3])
    for n in (5, 3, 2):
        assert is_close(fast(x[:n]), net(x[:n]))
    x[0] = torch.nan  # torch runs it, with its own weights
    assert torch.equal(fast(x).isnan(), net(x).isnan()) and is_close(fast(x)[1:], net(x)[1:])


def noting(step, runs):
    """The step, which notes that it was run."""
    return replace(step, run=lambda values: (runs.append(1), step.run(values))[1])


def test_a_sum_that_float16_does_not_hold_is_finite(never_dense, monkeypatch):
    net, x = (
        thin(Net(lambda layer, x: layer(x.float()), nn.Linear(64, 6)), 0.4),
        torch.full((32, 64), 200.0, dtype=torch.float16),
    )
    fast = sipp.sparse(net, x)
    assert not fast.latest.is_dense
    monkeypatch.setattr(cpu_network.CpuNetwork, "_run_in", None)  # is not asked for
    assert is_close(fast(x), net(x))


@pytest.mark.parametrize("is_made_inside", [False, True])
def test_autocast_is_what_it_is_in_each_call(never_dense, is_made_inside):
    net, x = thin(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), 0.3), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_made_inside):
        fast = sipp.sparse(net, x)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            found, wanted = fast(x), net(x)
        assert found.dtype == wanted.dtype == torch.bfloat16
        assert torch.allclose(found.float(), wanted.float(), atol=0.02)
        assert fast(x).dtype == torch.float32 and is_close(fast(x), net(x))


def test_a_part_of_a_network_that_refuses_autocast(never_dense):
    def exact(a, b, x):
        y = a(x)
        with torch.autocast("cpu", enabled=False):
            return y.float() @ b.weight

    net, x = thin(Net(exact, nn.Linear(8, 6), nn.Linear(6, 6)), 0.4), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found, wanted = sipp.sparse(net, x)(x), net(x)
    assert found.dtype == wanted.dtype == torch.float32 and torch.allclose(found, wanted, atol=0.02)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_compiled_is_shared_and_not_copied(never_dense, copied):
    """A shallow copy would empty the weights that the other one reads."""
    fast = sipp.sparse(thin(nn.Linear(8, 6), 0.4), torch.randn(5, 8))
    with pytest.raises(ModelError, match=r"call sipp\.sparse"):
        copied(fast)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (torch.randn(5, 7), "float32 5 x 7.*give inputs of the shape"),
        (torch.ones(5, 8, dtype=torch.int64), "its parameters are float32"),
        (torch.empty(5, 8, device="meta"), "on meta; give it on the CPU"),
        (torch.ones(5, 8).to_sparse(), "sparse tensor; give a dense one"),
        (None, "NoneType"),
    ],
)
def test_an_input_that_the_model_does_not_take_is_named(never_dense, bad, words):
    net, x = thin(nn.Linear(8, 6), 0.4), torch.randn(5, 8)
    fast = sipp.sparse(net, x)
    n_bytes = fast.n_bytes
    with pytest.raises(DataError, match=words):
        fast(bad)
    assert fast.n_bytes == n_bytes and is_close(fast(x), net(x))
    assert any(kernel.startswith("sparse") for kernel in kernels(fast))


def test_torch_runs_a_network_without_a_walk_over_its_weights(always_dense, monkeypatch):
    """Going through all weights in each call took a tenth of a small network's time."""
    net, x = thin(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), 0.3), torch.randn(2, 3, 9, 9)
    fast, walks = sipp.sparse(net, x), []
    assert fast.latest.is_dense
    fast(x)
    monkeypatch.setattr(cpu_network, "set_strides", lambda *given: walks.append(given))
    monkeypatch.setattr(cpu_network, "unpack_parameters", lambda *given: walks.append(given))
    assert is_close(fast(x), net(x)) and not walks
