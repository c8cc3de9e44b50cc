"""What goes in and what survives it: forms of data, choice of layers, bad values, state."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import draws
import numpy as np
import pytest
import torch
from oracles import sensitivity as oracle
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.inputs.data import data_of
from sipp.results.numerics import points_per_batch

F64 = torch.float64
randn = partial(draws.randn, dtype=torch.float64)
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


def agree(got: dict[str, Tensor], expected: dict[str, np.ndarray]) -> None:
    """Fail with words where scores differ from the oracle."""
    assert not oracle.disagreements(got, expected)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two results hold the same names and the same numbers up to the order of a sum."""
    return set(a) == set(b) and all(torch.allclose(a[name], b[name], rtol=1e-6, atol=1e-7) for name in a)


class Net(nn.Module):
    """A convolution, a BatchNorm, Dropout and Linear layers, over 1 x 3 x 3 images; statistics far from 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.Dropout(0.5)
        self.fc1 = nn.Linear(8, 4)
        self.head = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for tensor in [*self.parameters(), self.bn.running_mean]:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            self.bn.running_var.fill_(7.0)
        self.to(F64)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.drop(self.fc1(self.drop(self.bn(self.conv(image))).flatten(1))))


def net_oracle(net: Net, batches: list[Tensor], norm_stats: str) -> dict[str, np.ndarray]:
    """Scores (max) with running statistics, or with each batch's own mean and biased variance."""
    inputs: dict[str, list[Tensor]] = {"fc1": [], "head.0": [], "head.2": []}
    with torch.no_grad():
        for x in batches:
            z, column = net.conv(x), lambda v: v[:, None, None]
            mean, var = net.bn.running_mean, net.bn.running_var
            if norm_stats == "batch":
                mean, var = z.mean((0, 2, 3)), z.var((0, 2, 3), unbiased=False)
            z = (z - column(mean)) / torch.sqrt(column(var) + net.bn.eps) * column(net.bn.weight) + column(net.bn.bias)
            inputs["fc1"].append(z.flatten(1))
            inputs["head.0"].append(net.fc1(z.flatten(1)))
            inputs["head.2"].append(torch.tanh(net.head[0](inputs["head.0"][-1])))
        scores = {
            f"{name}.weight": oracle.linear_sensitivity(net.get_submodule(name).weight, torch.cat(x), "max")
            for name, x in inputs.items()
        }
    conv_points = oracle.conv_points(net.conv, torch.cat(batches))
    return scores | {"conv.weight": oracle.conv_sensitivity(net.conv, conv_points, "max")}


# --- Probes of data ---------------------------------------------------------------------------------------------------


class Items(Dataset):
    """A map-style dataset of what `make` gives for each index."""

    def __init__(self, n: int, make: Callable[[int], object]) -> None:
        self.n, self.make = n, make

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> object:
        if not 0 <= i < self.n:
            raise IndexError(i)
        return self.make(i)


IMAGES, LABELS = randn(7, 1, 3, 3), torch.arange(7)
FORMS: dict[str, Callable[[], object]] = {
    "one tensor": lambda: IMAGES,
    "list of tensors, last one short": lambda: list(IMAGES.split(3)),
    "single points": lambda: list(IMAGES.split(1)),
    "generator": lambda: (x for x in IMAGES.split(2)),
    "tuples with labels": lambda: list(zip(IMAGES.split(3), LABELS.split(3))),
    "tuples without labels": lambda: [(x,) for x in IMAGES.split(3)],
    "dicts": lambda: [{"image": x} for x in IMAGES.split(4)],
    "loader of tensors": lambda: DataLoader(TensorDataset(IMAGES, LABELS), batch_size=3),
    "loader of dicts": lambda: DataLoader(Items(7, lambda i: {"image": IMAGES[i]}), batch_size=3),
    "dataset of tuples": lambda: TensorDataset(IMAGES, LABELS),
    "dataset of tensors": lambda: Items(7, lambda i: IMAGES[i]),
    "dataset of dicts": lambda: Items(7, lambda i: {"image": IMAGES[i]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_data(form: str) -> None:
    agree(sipp.sensitivity(Net(), FORMS[form]()), net_oracle(Net(), [IMAGES], "running"))


@pytest.mark.parametrize(
    ("points", "sizes"),
    [
        (torch.zeros(3000, 8), [1024, 1024, 952]),
        (torch.zeros(200, 3, 32, 32), [85, 85, 30]),
        (torch.zeros(()).expand(40, 3, 224, 224), [16, 16, 8]),
        (torch.zeros(40, 7, dtype=torch.int64), [16, 16, 8]),  # tokens
        (torch.zeros(40, 7, dtype=torch.bfloat16), [16, 16, 8]),
        (torch.zeros(20, 0), [20]),
    ],
)
def test_small_points_come_many_at_once(points: Tensor, sizes: list[int]) -> None:
    assert [batch.n_points for batch in data_of(points).batches()] == sizes
    assert [batch.n_points for batch in data_of(TensorDataset(points, points[:, :0])).batches()] == sizes
    of_unknown_size = Items(len(points), lambda i: points[i])
    assert {batch.n_points for batch in itertools.islice(data_of(of_unknown_size).batches(), 1)} == {16}
    assert [batch.n_points for batch in data_of(points, batch_size=11).batches()][:1] == [11]


def test_a_gpu_takes_as_many_tokens_at_once_as_its_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, there = torch.zeros((), dtype=torch.int64).expand(300, 2048), torch.device("cuda")
    assert points_per_batch(tokens, torch.device("cpu")) == 1
    for gib, n_points, n_short in ((8, 2, 64), (80, 10, 320), (141, 17, 564)):
        there_are = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, there_are=there_are: there_are)
        assert points_per_batch(tokens, there) == n_points
        assert points_per_batch(tokens[:, :64], there) == n_short


@pytest.mark.parametrize(
    "data", [[], IMAGES[:0], DataLoader(Items(0, lambda i: IMAGES[i])), iter(()), Items(0, lambda i: IMAGES[i])]
)
def test_no_data(data: object) -> None:
    with pytest.raises(DataError, match=r"(?i)empty|no (batch|data|input)|0 inputs"):
        sipp.sensitivity(Net(), data)
    with pytest.raises(DataError, match=r"(?i)empty|no (batch|data|input)|0 inputs"):
        sipp.sensitivity(Net(), data, reduce="mean")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, LABELS), lambda x: {"image": x}])
@pytest.mark.parametrize("where", [0, 2])
def test_a_bad_input_is_refused_with_its_batch(where: int, wrap: Callable[[Tensor], object], value: float) -> None:
    batches = [x.clone() for x in IMAGES.split(2)]
    batches[where][1, 0, 2, 1] = value
    with pytest.raises(DataError, match=rf"(?i)batch\D{{0,9}}{where}\b"):
        sipp.sensitivity(Net(), [wrap(x) for x in batches])
    with pytest.raises(DataError, match=rf"(?i)batch\D{{0,9}}{where}\b"):  # also where the model would swallow it
        sipp.sensitivity(nn.Sequential(nn.Hardtanh(), Net()), batches)


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("middle", [nn.ReLU(), nn.LayerNorm(3)], ids=["infinite", "NaN"])
def test_a_value_that_overflows_inside_the_model_is_refused(middle: nn.Module, kernel: str) -> None:
    """Finite inputs, finite weights, non-finite activations: no score may come out of them."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), middle, nn.Linear(3, 2)).half()
    model[0].weight.data.fill_(1e3)
    with pytest.raises((DataError, ModelError), match=r"2\.weight"):
        sipp.sensitivity(model, [torch.full((2, 3), 1e3, dtype=torch.half)], kernel=kernel)


# --- n_points --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_points", [1, 3, 4, 8])
def test_n_points_takes_the_first_of_an_iterable(n_points: int) -> None:
    """The batch that crosses n is cut, also one with labels; the source is not read further than needed."""
    read = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for i in itertools.count(0, 3):
            read.append(i)
            yield torch.arange(i, i + 3)[:, None], torch.zeros(3)

    found = torch.cat([batch.args[0] for batch in data_of(batches(), n_points=n_points).batches()])
    assert found.flatten().tolist() == list(range(n_points))
    assert len(read) == math.ceil(n_points / 3)


# --- The choice of layers --------------------------------------------------------------------------------------------

ALL = {"conv.weight", "fc1.weight", "head.0.weight", "head.2.weight"}
LINEAR = ALL - {"conv.weight"}


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        (None, None, ALL),
        ("head*", None, {"head.0.weight", "head.2.weight"}),
        ("head.?.weight", None, {"head.0.weight", "head.2.weight"}),
        ("fc1.weight", None, {"fc1.weight"}),
        (nn.Linear, None, LINEAR),
        ([nn.Conv2d, "head.2*"], None, {"conv.weight", "head.2.weight"}),
        (None, [nn.Conv2d, "fc1*"], {"head.0.weight", "head.2.weight"}),
        (nn.Linear, "head.0*", {"fc1.weight", "head.2.weight"}),
        ("*", None, ALL),
    ],
)
def test_include_and_exclude(include: object, exclude: object, names: set[str]) -> None:
    everything = sipp.sensitivity(Net(), IMAGES)
    got = sipp.sensitivity(Net(), IMAGES, include=include, exclude=exclude)
    assert same(got, {name: everything[name] for name in names})


@pytest.mark.parametrize("side", ["include", "exclude"])
@pytest.mark.parametrize("selector", ["nowhere*", ["head*", "nowhere*"]])
def test_a_glob_that_matches_nothing(side: str, selector: object) -> None:
    with pytest.raises(OptionError, match=r"nowhere.*the layers are: conv"):
        sipp.sensitivity(Net(), IMAGES, **{side: selector})


def test_nothing_left_to_prune() -> None:
    with pytest.raises((OptionError, ModelError)):
        sipp.sensitivity(Net(), IMAGES, exclude=[nn.Linear, nn.Conv2d])
    with pytest.raises((OptionError, ModelError)):
        sipp.sensitivity(Net(), IMAGES, include="bn")
    with pytest.raises(ModelError):
        sipp.sensitivity(nn.Sequential(nn.BatchNorm2d(1), nn.ReLU()), IMAGES.float())


# --- State -----------------------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, object]:
    """Everything about a model that scoring must leave as it was."""
    modules = dict(model.named_modules())
    return {
        "hooks": {name: [len(getattr(m, table)) for table in HOOK_TABLES] for name, m in modules.items()},
        "attributes": {name: sorted(vars(m)) for name, m in modules.items()},
        "flags": {name: [v for v in vars(m).values() if isinstance(v, bool)] for name, m in modules.items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "grad": {name: p.grad is None for name, p in model.named_parameters()},
        "tensors": {name: (id(t), t.tolist()) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "global": (torch.is_grad_enabled(), torch.get_rng_state().tolist()),
    }


def mixed_state(model: nn.Module) -> nn.Module:
    """The model in train() with a frozen part in eval(), a frozen parameter and a user's own hook."""
    model.train()
    model.get_submodule("bn").eval()
    model.get_submodule("fc1").weight.requires_grad_(False)
    model.get_submodule("fc1").register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("norm_stats", ["running", "batch"])
def test_state_is_restored_and_batch_norm_reads_what_it_was_told(norm_stats: str) -> None:
    model = mixed_state(Net())
    before, batches = snapshot(model), [IMAGES[:4], IMAGES[4:] * 3 + 1]
    got = sipp.sensitivity(model, batches, norm_stats=norm_stats)
    assert snapshot(model) == before
    agree(got, net_oracle(model, batches, norm_stats))
    other = {"running": "batch", "batch": "running"}[norm_stats]
    assert oracle.disagreements(got, net_oracle(model, batches, other))  # the two are different things here


# --- Models that cannot be handled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "1.weight"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 2, batch_first=True)), "1.weight_hh_l0"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), "self_attn.in_proj_weight"),
        (lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), "self_attn.out_proj.weight"),
    ],
)
def test_a_bad_weight_is_named(make: Callable[[], nn.Module], name: str, value: float) -> None:
    model = make()
    model.get_parameter(name).data.view(-1)[1] = value
    with pytest.raises(ModelError, match=name):
        sipp.sensitivity(model, [randn(2, 3, 4, dtype=torch.float32)])


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "transposed": (lambda: nn.ConvTranspose1d(3, 3, 1), "exclude"),
    "parametrised": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "remove_parametrizations"),
    "parametrised-gru": (
        lambda: parametrizations.orthogonal(nn.GRU(4, 4, batch_first=True), "weight_hh_l0"),
        "remove_parametrizations",
    ),
    "spectral-norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), "remove_parametrizations"),
    "weight-norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "exclude"),
    "torch-prune": (lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), r"sipp\.release"),
    "quantised": (lambda: pytest.importorskip("torch.ao.nn.quantized.dynamic").Linear(4, 4), "exclude"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own notes on its older ways of changing weights
@pytest.mark.parametrize("kind", ODD)
def test_what_cannot_be_handled_is_named_with_the_way_out(kind: str) -> None:
    make, way_out = ODD[kind]
    model = nn.Sequential()
    model.add_module("fine", nn.Linear(4, 4))
    model.add_module("odd", make())
    x = randn(2, 3, 4, dtype=torch.float32)
    with pytest.raises(ModelError, match=rf"odd[\s\S]*{way_out}"):
        sipp.sensitivity(model, [x])
    assert set(sipp.sensitivity(model, [x], exclude="odd*")) == {"fine.weight"}
    with pytest.raises(ModelError, match="the model itself") as caught:  # all there is: it cannot be left out
        sipp.sensitivity(make(), [x])
    assert caught.value.fix and "exclude" not in caught.value.fix


def test_a_layer_that_no_data_reaches_is_named() -> None:
    model = Net()
    model.spare = nn.Linear(3, 3).to(F64)
    with pytest.raises(ModelError, match="spare"):
        sipp.sensitivity(model, IMAGES)
    assert set(sipp.sensitivity(model, IMAGES, exclude="spare")) == ALL
