"""`sipp.shrink` with a budget: which channels go, that nothing else changes, what the refit mends, and the record."""

import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from fresh_process import run_python
from runtime.shrinkable_networks import Part, network
from torch import Tensor, nn

import sipp
from sipp.errors import DataError, ModelError, OptionError
from sipp.results.shrunk import Shrunk

N_NETWORKS, AT_ONCE = 24, 8
N_CAUSES = 8  # of the inputs, whose entries are correlated, as in images
TOLERANCE = 1e-9  # of the largest output, in float64


def output(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return net.eval()(x)


def off_by(net: nn.Module, other: nn.Module, x: Tensor) -> float:
    """The distance of the outputs, relative to the norm of the first one's."""
    wanted = output(net, x)
    return float((output(other, x) - wanted).norm() / wanted.norm())


def masked(net: nn.Module, small: Shrunk) -> nn.Module:
    """The whole network with zeros in place of the inputs that the record says are gone."""
    assert small.chosen is not None
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for site in small.chosen.sites:
            copied.get_parameter(site.reader)[:, list(site.removed)] = 0.0
    return copied


def trained_norms(net: nn.Module) -> nn.Module:
    """The network in eval mode, with norms as training would leave them."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.3, 0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return net.eval()


class Block(nn.Module):
    """A residual block of two convolutions, or a bottleneck with a projection."""

    def __init__(self, n: int, inner: int, *, is_bottleneck: bool = False) -> None:
        super().__init__()
        kernel = 1 if is_bottleneck else 3
        layers = [nn.Conv2d(n, inner, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(inner), nn.ReLU()]
        if is_bottleneck:
            layers += [nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU()]
        self.inner = nn.Sequential(*layers)
        self.last = nn.Conv2d(inner, n, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(n)
        self.shortcut = nn.Conv2d(n, n, 1) if is_bottleneck else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.last(self.inner(x))) + self.shortcut(x))


class GatedMLP(nn.Module):
    def __init__(self, n: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(n, hidden), nn.Linear(n, hidden), nn.Linear(hidden, n, bias=False)
        self.norm = nn.LayerNorm(n)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Attention(nn.Module):
    """Four heads of queries, two of keys and values."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(n, n), nn.Linear(n, n // 2), nn.Linear(n, n // 2)
        self.out, self.each = nn.Linear(n, n), n // 4

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.each)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def chain() -> nn.Module:
    layers = [
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 4),
    ]  # fmt: skip
    return nn.Sequential(*layers)


def residual(*, is_bottleneck: bool = False) -> nn.Module:
    blocks = [Block(8, 12, is_bottleneck=is_bottleneck) for _ in range(3)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def depthwise() -> nn.Module:
    layers = [
        nn.Conv2d(3, 10, 1), nn.BatchNorm2d(10), nn.ReLU6(), nn.Conv2d(10, 10, 3, padding=1, groups=10, bias=False),
        nn.BatchNorm2d(10), nn.ReLU6(), nn.Conv2d(10, 6, 1), nn.Flatten(), nn.Linear(384, 4),
    ]  # fmt: skip
    return nn.Sequential(*layers)


IMAGES, TOKENS = (3, 8, 8), (6, 16)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {  # input, and how many sites it has
    "chain": (chain, IMAGES, 3),
    "residual": (residual, IMAGES, 3),
    "bottleneck": (lambda: residual(is_bottleneck=True), IMAGES, 7),
    "depthwise": (depthwise, IMAGES, 2),
    "gated": (lambda: nn.Sequential(GatedMLP(16, 24), GatedMLP(16, 24)), TOKENS, 2),
    "attention": (lambda: nn.Sequential(Attention(16), GatedMLP(16, 24), Attention(16)), TOKENS, 3),
}


def made(name: str, n: int = 200) -> tuple[nn.Module, Tensor, Tensor]:
    """A network, inputs to calibrate on, and others."""
    torch.manual_seed(0)
    make, shape, _ = NETWORKS[name]
    net, mix = trained_norms(make()), torch.randn(N_CAUSES, *shape) / N_CAUSES**0.5
    data, x = (torch.einsum("nc,c...->n...", torch.randn(many, N_CAUSES), mix) for many in (n, 50))
    return net, data, x


@pytest.fixture(autouse=True)
def _few_points() -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", NETWORKS)
def test_without_a_refit_it_is_the_masked_network(name: str) -> None:
    net, data, x = made(name)
    state = copy.deepcopy(net.state_dict())
    small = sipp.shrink(net, data, weights=0.75, repair=False, progress=False)
    assert all(torch.equal(value, state[key]) for key, value in net.state_dict().items())
    assert small.n_parameters <= 0.75 * small.n_parameters_before
    assert small.chosen is not None and len(small.chosen.sites) == NETWORKS[name][2]
    assert off_by(masked(net, small).double(), small.model.double(), x.double()) < TOLERANCE


@pytest.mark.parametrize("name", NETWORKS)
def test_the_refit_brings_outputs_nearer_on_new_inputs(name: str) -> None:
    net, data, x = made(name, 600)
    small, plain = (
        sipp.shrink(net, data, weights=0.75, repair=repair, progress=False).model for repair in (True, False)
    )
    assert off_by(net, small, x) < 0.95 * off_by(net, plain, x)


@pytest.mark.parametrize("first", range(0, N_NETWORKS, AT_ONCE))
def test_random_networks_are_their_masked_networks(first: int) -> None:
    """Networks of all kinds of parts: what can go goes, and nothing else changes (300 in benchmarks/bench_channels)."""
    n_smaller = 0
    for seed in range(first, first + AT_ONCE):
        net, _ = network(seed)
        try:
            small = sipp.shrink(net, torch.randn(24, 3, 8, 8), weights=0.95, repair=False, progress=False)
        except (OptionError, ModelError):  # nothing can go, or too little
            continue
        n_smaller += 1
        x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
        assert off_by(masked(net, small).double(), small.model.double(), x) < 1e-6, seed
    assert n_smaller >= 2


def test_duplicated_channels_go_and_the_refit_loses_nothing() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():
        net[0].weight[6:], net[0].bias[6:] = net[0].weight[:6], net[0].bias[:6]
    small = sipp.shrink(net, torch.randn(500, 10), weights=0.53, progress=False)
    assert small.model[0].weight.shape == (6, 10)
    assert off_by(net, small.model, torch.randn(50, 10)) < 0.02  # the ridge


def test_a_constant_channel_goes_into_the_bias() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        net[0].weight[3:5] = 0.0
        net[0].bias[3:5] = 5.0
    small = sipp.shrink(net, torch.randn(500, 10), weights=0.77, progress=False)
    assert small.chosen is not None and small.chosen.sites[0].removed == (3, 4)
    assert off_by(net, small.model, torch.randn(50, 10)) < 1e-4


class Added(nn.Module):
    def __init__(self, up: nn.Linear) -> None:
        super().__init__()
        self.up, self.down = copy.deepcopy(up), nn.Linear(up.out_features, 9)
        self.down.weight.data[1:], self.down.bias.data[1:] = 0.0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(x)))


def test_later_blocks_mend_what_earlier_ones_lost() -> None:
    """The second block has all hidden units of the first, so it can take over what those did that go."""
    torch.manual_seed(0)
    up = nn.Linear(9, 16)
    up.weight.data[:, 0] = 0.0  # nobody reads the entry that both blocks add to
    net = nn.Sequential(Added(up), Added(up), nn.Linear(9, 4)).eval()
    small = sipp.shrink(net, torch.randn(600, 9), weights=0.85, exclude="1.down", progress=False)
    assert small.chosen is not None and [site.reader for site in small.chosen.sites] == ["0.down.weight"]
    assert small.chosen.sites[0].after < 12
    x = torch.randn(50, 9)
    assert off_by(net[:2], small.model[:2], x) < 0.2 * off_by(net[:1], small.model[:1], x)


def test_what_the_output_hardly_shows_goes_first() -> None:
    torch.manual_seed(0)
    seen, hidden = (nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Linear(24, 4)) for _ in range(2))
    net = Part(lambda x, f, g: f(x) + 0.01 * g(x), seen, hidden).eval()
    small = sipp.shrink(net, torch.randn(300, 10), weights=0.6, progress=False)
    assert small.chosen is not None
    left = {site.reader: site.after for site in small.chosen.sites}
    assert left["modules_held.0.2.weight"] == 24 and left["modules_held.1.2.weight"] < 6


def test_widths_are_multiples_and_uniform_ones_are_alike() -> None:
    net, data, _ = made("residual")
    small = sipp.shrink(net, data, multiply_adds=0.7, multiple_of=4, progress=False)
    assert small.chosen is not None
    assert all(site.after % 4 == 0 for site in small.chosen.sites)
    alike = sipp.shrink(net, data, multiply_adds=0.7, uniform=True, progress=False)
    assert alike.chosen is not None and len({site.after for site in alike.chosen.sites}) == 1
    assert alike.chosen.sites[0].after < 12


def test_the_record_names_what_stays_and_shows_what_went() -> None:
    net, data, _ = made("residual")
    small = sipp.shrink(net, data, multiply_adds=0.6, progress=False)
    chosen = small.chosen
    assert chosen is not None and chosen.of == "multiply-adds" and chosen.is_refitted
    assert any(line.startswith("0.weight") and "residual stream" in line for line in chosen.stays)
    assert (chosen.n_fit, chosen.n_test) == (180, 10) and chosen.output_error is not None
    assert small.multiply_adds <= 0.6 * small.multiply_adds_before
    counted = sum(site.before - site.after for site in chosen.sites)
    assert sum(len(site.removed) for site in chosen.sites) == counted  # a channel is one input of a convolution
    text = str(small)
    assert "with fewer channels" in text and "180 inputs" in text and "residual stream" in text
    net, data, _ = made("attention")
    chosen = sipp.shrink(net, data, weights=0.85, exclude="*out", progress=False).chosen
    assert chosen is not None and [site.reader for site in chosen.sites] == ["1.down.weight"]
    assert "0.query.weight: 0.out.weight, which reads them, is excluded" in chosen.stays


def test_layers_have_bounds_that_hold_on_new_inputs() -> None:
    """T17: relative errors of outputs on the dense layer's inputs stay below the bounds, as far as they are finite."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    small = sipp.shrink(net, torch.rand(400, 10), weights=0.8, repair=False, progress=False)
    assert small.chosen is not None and small.chosen.guarantee is not None
    layer = small.chosen.layers[1]
    hidden = output(net[:2], torch.rand(200, 10))
    weight = net[2].weight.detach()
    gone = list(small.chosen.sites[0].removed)
    lost = (hidden[:, gone] @ weight[:, gone].T).norm(dim=1)
    assert layer.bound is not None and float((lost / (hidden @ weight.T).norm(dim=1)).max()) <= layer.bound


def test_certificates_speak_of_the_first_network_and_refuse_the_inputs_it_was_made_with() -> None:
    net, data, x = made("chain", 300)
    small = sipp.shrink(net, data, multiply_adds=0.7, progress=False)
    new = made("chain", 900)[1][300:]
    certificate = sipp.certify(net, small, new, share=0.05, confidence=0.95, progress=False)
    assert certificate.verdict == "certified" and off_by(net, small.model, x) < certificate.epsilon
    with pytest.raises(DataError, match="calibration"):
        sipp.certify(net, small, data, progress=False)
    pruned = sipp.prune(small.model, data, keep=0.7, progress=False)  # zeros go into the smaller network
    assert sipp.certify(net, pruned, new, calibration=data, progress=False).n == 600


def test_a_polish_brings_it_nearer() -> None:
    net, data, x = made("chain", 400)
    small = sipp.shrink(net, data, multiply_adds=0.6, progress=False)
    polished = sipp.shrink(net, data, multiply_adds=0.6, steps=150, progress=False)
    assert polished.chosen is not None and polished.chosen.polish is not None
    assert off_by(net, polished.model, x) < off_by(net, small.model, x)
    assert [layer.after for layer in polished.layers] == [layer.after for layer in small.layers]


def test_a_code_with_a_number_of_channels_keeps_them_all() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 1), nn.ReLU(), Part(lambda x: x.view(-1, 6 * 64)), nn.Linear(384, 4))
    with pytest.raises(ModelError, match="no channels can be removed"):
        sipp.shrink(net, torch.randn(30, *IMAGES), weights=0.8, progress=False)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"multiply_adds": 0.5, "weights": 0.5}, OptionError, "cannot be combined"),
        ({"multiply_adds": 1.5}, OptionError, "multiply_adds"),
        ({"multiply_adds": 0.01}, OptionError, "give at least"),
        ({"uniform": True}, OptionError, "uniform.*needs a budget"),
        ({"steps": 5}, OptionError, "steps.*needs a budget"),
        ({"multiply_adds": 0.5, "multiple_of": 0}, OptionError, "multiple_of"),
    ],
)
def test_mistakes_are_named(options: dict[str, object], error: type[Exception], words: str) -> None:
    net, data, _ = made("chain", 40)
    with pytest.raises(error, match=words):
        sipp.shrink(net, data, progress=False, **options)


CALLS = itertools.count()


@torch.library.custom_op("sipp_tests::in_float32", mutates_args=())
def in_float32(x: Tensor) -> Tensor:
    """Rounds to float32 whatever it is given, and each time another way, as kernels of GPUs that add with atomics."""
    return x * (1 + (next(CALLS) % 3) * torch.finfo(torch.float32).eps)


@in_float32.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_kernel_that_rounds_to_float32_is_no_other_network() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), Part(lambda x: in_float32(x)))
    small = sipp.shrink(net, torch.randn(30, 8), weights=0.8, repair=False, progress=False)
    assert off_by(masked(net, small), small.model, torch.randn(5, 8)) < 1e-6


# --- Language models --------------------------------------------------------------------------------------------------

LOADS = """
import sys, torch, transformers
net = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
x = torch.arange(9)[None]
assert torch.allclose(net(x).logits, torch.load(sys.argv[2]), atol=1e-5)
assert net.generate(x, max_new_tokens=3).shape == (1, 12)
"""


def language_model(n_heads: int, n_key_heads: int, n: int) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=n, intermediate_size=64, num_hidden_layers=2, num_attention_heads=n_heads,
        num_key_value_heads=n_key_heads, vocab_size=50, max_position_embeddings=32,
    )  # fmt: skip
    data = [{"input_ids": torch.randint(0, 50, (8, 12))} for _ in range(4)]
    return transformers.LlamaForCausalLM(config).eval(), data


def test_a_language_model_folder_loads_with_a_changed_configuration(tmp_path) -> None:
    model, data = language_model(4, 2, 32)
    small = sipp.shrink(model, data, weights=0.8, uniform=True, exclude="*o_proj", progress=False)
    assert small.model.config.intermediate_size < 64 and small.model.config.num_key_value_heads == 2
    assert small.model.config.use_cache and model.config.intermediate_size == 64
    small.model.save_pretrained(tmp_path)
    torch.save(small.model(torch.arange(9)[None]).logits.detach(), tmp_path / "logits.pt")
    done = run_python(LOADS, tmp_path, tmp_path / "logits.pt")
    assert done.returncode == 0, done.stderr
    with pytest.warns(UserWarning, match="from_pretrained would not load it"):
        sipp.shrink(model, data, weights=0.9, exclude=["*o_proj", "*layers.0*"], progress=False)


def test_heads_go_in_numbers_that_the_configuration_accepts(tmp_path) -> None:
    """Five heads do not divide a hidden size of 48."""
    model, data = language_model(6, 6, 48)
    small = sipp.shrink(model, data, weights=0.93, uniform=True, exclude="*down_proj", progress=False)
    assert {(site.before, site.after) for site in small.chosen.sites} == {(6, 4)}
    small.model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    x = torch.randint(0, 50, (2, 9))
    torch.testing.assert_close(loaded(x).logits, small.model(x).logits)
    with pytest.warns(UserWarning, match="from_pretrained would not load it"):
        sipp.shrink(model, data, weights=0.93, uniform=True, exclude="*down_proj", multiple_of=5, progress=False)


def test_an_excluded_layer_keeps_its_inputs_and_its_outputs() -> None:
    torch.manual_seed(0)
    sizes = (6, 20, 21, 22, 3)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    net, data = nn.Sequential(*layers[:-1]).eval(), torch.randn(300, 6)
    for excluded in ("2", [net[2]], nn.Sequential(net[2], net[3])):
        small = sipp.shrink(net, data, multiply_adds=0.8, exclude=excluded, progress=False)
        shapes = {layer.name: layer.after for layer in small.layers}
        assert shapes["2.weight"] == (21, 20) and shapes["4.weight"][0] < 22
        assert small.chosen is not None and "2.weight: 2.weight is excluded" in small.chosen.stays
    with pytest.raises(OptionError, match="a Linear without a layer of this network"):
        sipp.shrink(net, data, multiply_adds=0.8, exclude=[nn.Linear(2, 2)], progress=False)


@pytest.mark.parametrize("exclude", [None, "4", nn.ConvTranspose2d])
def test_a_layer_without_an_adapter_keeps_its_channels(exclude: str | type | None) -> None:
    torch.manual_seed(0)
    ends = nn.ConvTranspose2d(8, 6, 2, 2), nn.ReLU(), nn.Conv2d(6, 4, 1)
    net = nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 3), nn.ReLU(), *ends).eval()
    small = sipp.shrink(net, torch.randn(100, 3, 8, 8), multiply_adds=0.8, exclude=exclude, progress=False)
    shapes = {layer.name: layer.after[:2] for layer in small.layers}
    assert shapes["2.weight"][0] == 8 and shapes["2.weight"][1] < 12 and shapes["4.weight"] == (8, 6)
    assert small.chosen is not None
    assert [layer.name for layer in small.chosen.layers] == ["0.weight", "2.weight", "6.weight"]
