"""Held masks: no pruned weight comes back, whatever trains, copies, averages, wraps, loads or saves the network."""

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

from sipp.errors import ModelError, OptionError
from sipp.pruning.masking import Hold, hold, masks_of, release

Masks = dict[str, Tensor]
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda p: Adam(p, lr=1e-2, weight_decay=1e-2),
    "adamw": lambda p: AdamW(p, lr=1e-2, weight_decay=0.1),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mha(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0].mean(1))


class Tied(nn.Module):
    """One matrix in two Linears, and one Linear called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(torch.tanh(self.first(x.mean(1)))))))


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 6, 3)
    )


NETS: dict[str, Callable[[], nn.Module]] = {"conv": convnet, "mha": Attention, "lstm": Recurrent, "tied": Tied}
X = torch.randn(16, 5, 8, generator=torch.Generator().manual_seed(1))
Y = torch.arange(16) % 3


def make(name: str = "conv") -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


def masks_for(model: nn.Module, keep: float = 0.3, seed: int = 0) -> Masks:
    gen = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=gen) < keep for n, p in model.named_parameters() if p.ndim > 1}


def backward(model: nn.Module) -> None:
    nn.functional.cross_entropy(model(X), Y).backward()


def train(model: nn.Module, optimizer: Optimizer, n_steps: int = 3) -> None:
    for _ in range(n_steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()


def bare(model: nn.Module) -> dict[str, Tensor]:
    named = model.named_parameters()
    return {n.replace("module.", "").replace("_orig_mod.", ""): p for n, p in named}


def n_revived(model: nn.Module, masks: Masks) -> int:
    """Non-zero weights outside the masks; looks at the parameters, runs no hook."""
    params = bare(model)
    return sum(int((params[n].detach()[~m] != 0).sum()) for n, m in masks.items())


def fill_dense(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)


def revived_in_steps(holder: Callable[..., object], make_optimizer: Callable, net: str, n_steps: int = 4) -> int:
    """The most weights seen revived right after a step, training on with state built up before the masks came."""
    model = make(net)
    masks, optimizer, seen = masks_for(model), make_optimizer(model.parameters()), 0
    train(model, optimizer, 2)
    holder(model, masks, optimizer=optimizer)
    for _ in range(n_steps):
        train(model, optimizer, 1)
        seen = max(seen, n_revived(model, masks))
    return seen


def only_once(model: nn.Module, masks: Masks, *, optimizer: Optimizer) -> None:
    """Broken on purpose: zeroes the weights and leaves."""
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)


def without_optimizer(model: nn.Module, masks: Masks, *, optimizer: Optimizer) -> None:
    """Broken on purpose: does not look at the optimizer, so that its old momentum comes through."""
    hold(model, masks)


# --- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "net"), [("sgd", "conv"), ("adam", "mha"), ("adamw", "lstm"), ("sgd", "tied")])
def test_no_weight_is_alive_after_a_step_with_old_momentum(kind: str, net: str) -> None:
    assert revived_in_steps(hold, OPTIMIZERS[kind], net) == 0
    assert revived_in_steps(only_once, OPTIMIZERS[kind], net) > 0
    assert revived_in_steps(without_optimizer, OPTIMIZERS[kind], net) > 0


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_an_optimizer_made_after_hold_needs_no_hook_and_trains_like_torch_prune(kind: str) -> None:
    ours, theirs = make(), make()
    masks = masks_for(ours)
    hold(ours, masks)
    for name, mask in masks.items():
        path, local = name.rsplit(".", 1)
        prune.custom_from_mask(theirs.get_submodule(path), local, mask)
    first, second = OPTIMIZERS[kind](ours.parameters()), OPTIMIZERS[kind](theirs.parameters())
    for _ in range(5):
        train(ours, first, 1)
        train(theirs, second, 1)
        assert n_revived(ours, masks) == 0
    for name, mask in masks.items():
        assert torch.count_nonzero(ours.get_parameter(name)) > 0
        torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name + "_orig") * mask)


@pytest.mark.parametrize("net", NETS)
def test_gradients_are_zero_outside_the_masks_and_right_inside(net: str) -> None:
    model, plain = make(net), make(net)
    masks = masks_for(model)
    hold(model, masks)
    plain.load_state_dict(model.state_dict())
    for _ in range(2):  # accumulated
        backward(model)
        backward(plain)
    for name, mask in masks.items():
        grad, free = model.get_parameter(name).grad, plain.get_parameter(name).grad
        assert torch.equal(grad, torch.where(mask, free, 0)) and not torch.equal(grad, free)
    want = torch.stack(
        [torch.where(masks.get(n, torch.tensor(True)), p.grad, 0).norm() for n, p in bare(plain).items()]
    )
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e-3), want.norm())


def test_infinite_and_missing_numbers_in_a_pruned_place_do_not_spread() -> None:
    layer, mask = nn.Linear(2, 1, bias=False), torch.tensor([[True, False]])
    hold(layer, {"weight": mask})
    layer(torch.tensor([[1.0, float("inf")]])).sum().backward()  # 0 * inf in forward, inf in the gradient
    assert torch.equal(layer.weight.grad, torch.tensor([[1.0, 0.0]]))
    with torch.no_grad():
        layer.weight[0, 1] = float("nan")
    assert torch.isfinite(layer(torch.ones(1, 2))).all()


def amp_scale_after(holder: Callable[..., object], n_steps: int = 3) -> tuple[float, int]:
    """The loss scale after some steps (halved at each overflow) and the weights revived; pruned inputs overflow."""
    torch.manual_seed(0)
    model, masks = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)), {"0.weight": torch.ones(6, 8) > 0}
    optimizer, scaler = SGD(model.parameters(), lr=0.05, momentum=0.9), torch.amp.GradScaler("cpu", init_scale=1024.0)
    masks["0.weight"][:, 0] = False
    holder(model, masks, optimizer=optimizer)
    x = X.mean(1)
    x[:, 0] = 1e37
    for _ in range(n_steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x).float(), Y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), n_revived(model, masks)


def test_amp_an_overflow_at_a_pruned_weight_neither_skips_a_step_nor_revives_it() -> None:
    assert amp_scale_after(hold) == (1024.0, 0)
    assert amp_scale_after(only_once)[0] < 1024.0


# --- writes, saves, loads -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_state_dict_has_the_same_keys_and_never_a_revived_weight(net: str) -> None:
    model = make(net)
    keys, masks = list(model.state_dict()), masks_for(model)
    hold(model, masks)
    fill_dense(model)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    assert list(saved) == keys
    for name, mask in masks.items():
        assert torch.equal(saved[name], 0.5 * mask)
    other = make(net)
    other.load_state_dict(saved, strict=True)
    assert n_revived(other, masks) == 0


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("net", NETS)
def test_a_denser_checkpoint_is_masked_at_the_next_forward(net: str, assign: bool) -> None:
    model, dense = make(net), make(net).state_dict()
    masks = masks_for(model)
    hold(model, masks)
    want = model(X)
    model.load_state_dict(dense, assign=assign)
    assert n_revived(model, masks) > 0
    torch.testing.assert_close(model(X), want)
    assert n_revived(model, masks) == 0
    if not (assign and net == "tied"):  # assign itself breaks ties, held or not
        train(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert n_revived(model, masks) == 0


def test_the_owner_alone_and_the_root_alone_mask_before_a_forward() -> None:
    conv, attention = make("conv"), make("mha")
    for model in (conv, attention):
        hold(model, masks_for(model))
        fill_dense(model)
    conv[1](X[:, None])  # the root is not called
    assert torch.equal(conv[1].weight != 0, masks_of(conv)["1.weight"])
    attention(X)  # out_proj is not called
    assert n_revived(attention, masks_for(attention)) == 0


def test_tensors_lent_to_a_held_module_are_left_alone() -> None:
    model = make("tied")
    hold(model, masks_for(model))
    lent = {n: torch.full_like(p, 0.1) for n, p in model.named_parameters()}
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (X,)).square().sum())(lent)
    assert all((p == 0.1).all() for p in lent.values()) and (grads["first.weight"] != 0).all()
    replica = model.head._replicate_for_data_parallel()  # as DataParallel makes them on several devices
    replica.weight, replica.bias = torch.ones(3, 8), torch.zeros(3)
    assert torch.equal(replica(torch.ones(1, 8)), torch.full((1, 3), 8.0))


def test_tied_parameters_share_one_mask_under_any_of_their_names() -> None:
    model = make("tied")
    mask = masks_for(model)["first.weight"]
    done = hold(model, {"second.weight": mask})
    assert done == Hold(names=("first.weight",), n_weights=64, n_kept=int(mask.sum()))
    train(model, SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert model.first.weight is model.second.weight
    assert n_revived(model, {"first.weight": mask}) == 0 and list(masks_of(model)) == ["first.weight"]
    release(model)
    assert model.first.weight is model.second.weight


# --- copies, averages, wrappers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["hold-then-wrap", "wrap-then-hold"])
@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel, lambda m: torch.compile(m, backend="eager")])
def test_wrappers_keep_canonical_names(wrap: Callable[[nn.Module], nn.Module], order: str) -> None:
    model = make("mha")
    masks = masks_for(model)
    if order == "hold-then-wrap":
        hold(model, masks)
        wrapped = wrap(model)
    else:
        wrapped = wrap(model)
        hold(wrapped, {"module." + n: m for n, m in masks.items()})
    assert list(masks_of(wrapped)) == list(masks)
    train(wrapped, SGD(wrapped.parameters(), lr=0.1, momentum=0.9))
    assert n_revived(wrapped, masks) == 0
    fill_dense(wrapped)
    wrapped(X)
    assert n_revived(wrapped, masks) == 0
    release(wrapped)
    assert not masks_of(wrapped)


# --- hold again, release, refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_release_leaves_a_plain_module(net: str) -> None:
    model, plain = make(net), make(net)
    masks, optimizer = masks_for(model), SGD(model.parameters(), lr=0.1, momentum=0.9)
    hold(model, masks, optimizer=optimizer)
    hold(model, masks, optimizer=[optimizer])
    assert len(optimizer._optimizer_step_post_hooks) == 1
    fill_dense(model)
    release(model)
    release(model)  # and again changes nothing
    assert n_revived(model, masks) == 0
    assert all(torch.equal(model.get_parameter(name) != 0, mask) for name, mask in masks.items())
    assert not optimizer._optimizer_step_post_hooks
    assert all(not p._backward_hooks for p in model.parameters())
    for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
        assert ours.__dict__.keys() == theirs.__dict__.keys() and ours._buffers.keys() == theirs._buffers.keys()
        assert not ours._forward_pre_hooks and not ours._state_dict_pre_hooks


def test_a_pickled_module_holds_its_masks() -> None:
    model = make()
    masks = masks_for(model)
    hold(model, masks, optimizer=SGD(model.parameters(), lr=0.1))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    train(again, SGD(again.parameters(), lr=0.1, momentum=0.9))
    assert n_revived(again, masks) == 0 and list(masks_of(again)) == list(masks)


def refused(masks: Masks, model: nn.Module | None = None, optimizer: object = None) -> str:
    with pytest.raises((OptionError, ModelError)) as caught:
        hold(model if model is not None else make(), masks, optimizer=optimizer)
    return str(caught.value)


def test_refusals_name_the_parameter_and_the_way_out() -> None:
    ok = torch.ones(6, 1, 3, 3, dtype=torch.bool)
    assert "'nope'" in refused({"1.weight": ok, "nope": ok}) and "(6, 1, 3, 1)" in refused({"1.weight": ok[..., :1]})
    broken = make()
    with torch.no_grad():
        broken[1].weight[0, 0, 0, 0] = float("nan")
    assert "'1.weight' contains NaN" in refused({"1.weight": ok}, broken)
    taken = make()
    prune.custom_from_mask(taken[1], "weight", ok)
    assert "has renamed its parameters" in refused({"1.weight": ok}, taken)
    assert "no parameter of the model" in refused({"1.weight": ok}, optimizer=SGD(make().parameters(), lr=0.1))
    assert "must be a torch.optim.Optimizer, not a str" in refused({"1.weight": ok}, optimizer=["sgd"])
    held = make()
    hold(held, {"1.weight": ~ok})
    was = copy.deepcopy(held.state_dict())
    assert "would bring back 54 pruned weights" in refused({"5.weight": torch.zeros(3, 108) > 0, "1.weight": ok}, held)
    assert all(torch.equal(v, was[n]) for n, v in held.state_dict().items())  # refused as a whole


def test_a_parameter_renamed_while_held_is_reported_and_can_be_released() -> None:
    model, plain = make(), make()
    hold(model, masks_for(model))
    for one in (model, plain):
        parametrize.register_parametrization(one[1], "weight", nn.Identity())
    with pytest.raises(ModelError, match=r"'weight' of .*Conv2d was renamed"):
        model(X)
    release(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model(X)


# --- any order of events --------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    net=st.sampled_from(sorted(NETS)),
    events=st.lists(st.sampled_from(["sgd", "adamw", "dense", "copy", "shrink", "cast", "save", "load"]), max_size=8),
)
def test_any_order_of_events_leaves_the_pruned_weights_at_zero(net: str, events: list[str]) -> None:
    model = make(net)
    masks = masks_for(model, keep=0.6)
    hold(model, masks)
    for i, event in enumerate(events):
        if event in OPTIMIZERS:
            train(model, OPTIMIZERS[event](model.parameters()), 2)
        elif event == "dense":
            fill_dense(model)
            model(X)
        elif event == "copy":
            before, model = model, copy.deepcopy(model)
            release(before)  # each is released on its own
        elif event == "load":
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            train(model, optimizer, 2)
            hold(model, masks, optimizer=optimizer)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            train(model, optimizer, 1)
        elif event == "shrink":
            masks = {n: m & masks_for(model, keep=0.8, seed=i)[n] for n, m in masks.items()}
            hold(model, masks)
        elif event == "cast":
            model.double().type(torch.float32)  # type() casts the masks too
        else:
            fill_dense(model)
            model.state_dict()
        assert n_revived(model, masks) == 0
    assert all(torch.equal(m, masks[n]) for n, m in masks_of(model).items())


def test_all_ranks_of_a_ddp_network_hold_the_masks_of_the_first(tmp_path: Path) -> None:
    script = Path(__file__).with_name("ddp_masks.py")
    ranks = [subprocess.Popen([sys.executable, script, str(rank), tmp_path / "meet"]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
