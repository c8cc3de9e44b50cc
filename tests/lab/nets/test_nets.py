"""Every network: parameter count, output shape, a traceable graph, an initialisation that the seed fixes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import sipp
from sipp.errors import OptionError
from sipp_lab.data.sets import load_digits
from sipp_lab.nets import NETS, build, net_spec
from sipp_lab.nets.resnet import SubsampleAndPad

N_PARAMETERS = {
    "resnet20": 269_722,
    "resnet32": 464_154,
    "resnet44": 658_586,
    "resnet56": 853_018,
    "resnet110": 1_727_962,
    "wrn16-8": 10_961_370,
    "vgg16": 14_728_266,
    "densenet22": 71_686,
    "cnn5": 1_557_066,
    "lenet-300-100": 266_610,
    "lenet-5": 431_080,
    "lstm": 19_594,
    "digits-cnn": 24_058,
    "digits-cnn5": 98_682,
    "digits-fc": 50_610,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
}


def seeded(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build(name)


def example(name: str, n_images: int = 2) -> torch.Tensor:
    shape = NETS[name].input_shape
    if shape == (3, 224, 224):
        shape = (3, 64, 64)
    return torch.randn(n_images, *shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", NETS)
def test_count_shape_graph_and_seed(name: str) -> None:
    net = seeded(name).eval()
    assert sum(p.numel() for p in net.parameters()) == N_PARAMETERS[name]
    x = example(name)
    with torch.inference_mode():
        out = net(x)
        traced = fx.symbolic_trace(net)
        assert torch.equal(traced(x), out)
    assert out.shape == (2, NETS[name].n_classes)
    assert out.isfinite().all() and out.std() > 0
    # A module that is called at two places would hide one of its uses from whoever walks the graph.
    targets = [node.target for node in traced.graph.nodes if node.op == "call_module"]
    assert len(targets) == len(set(targets))
    again = seeded(name).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize("name", ["cnn5", "resnet56", "densenet22", "lenet-5"])
@pytest.mark.parametrize(("init", "variance"), [("he", 2.0), ("pytorch", 1 / 3)])
def test_initialisations(name: str, init: Any, variance: float) -> None:
    torch.manual_seed(0)
    for module in build(name, init=init).modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight
            expected = (variance / weight[0].numel()) ** 0.5
            # The standard deviation of n normal draws is off by a relative 1 / sqrt(2 n); six of those.
            assert abs(weight.std().item() / expected - 1) < 6 / (2 * weight.numel()) ** 0.5 + 1e-3
            assert init != "he" or module.bias is None or not module.bias.any()
    with pytest.raises(OptionError, match="init"):
        build(name, init="xavier")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet20", "densenet22", "vgg16", "lenet-5"])
def test_fan_out_initialisation(name: str) -> None:
    torch.manual_seed(0)
    for module in build(name, init="fan-out").modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            weight = module.weight
            spread, six = weight.std().item(), 6 / (2 * weight.numel()) ** 0.5 + 1e-3
            if isinstance(module, nn.Conv2d):
                expected = (2 / (weight.shape[0] * weight[0, 0].numel())) ** 0.5
                assert module.bias is None or not module.bias.any()
            elif name == "vgg16":
                expected = 0.01
                assert not module.bias.any()
            else:  # uniform, as torch draws it
                expected = (1 / (3 * weight.shape[1])) ** 0.5
                assert weight.abs().max() <= weight.shape[1] ** -0.5 and module.bias.any()
            assert abs(spread / expected - 1) < six


@pytest.mark.filterwarnings("ignore::sipp.errors.DeadRowsWarning")
def test_magnitude_leaves_the_classifier_of_resnet20_nothing_at_fan_out_initialisation_and_sipp_does_not() -> None:
    """Why magnitude falls to chance in the paper's figure; `sipp-det` as the authors ran it, with the mean."""
    images = F.interpolate(load_digits().images[:32], size=32, mode="bilinear").repeat(1, 3, 1, 1)

    def left_in_classifier(init: Any, method: str, reduce: Any = None) -> int:
        torch.manual_seed(0)
        net = build("resnet20", init=init)
        pruned = sipp.prune(net, images, keep=0.05, method=method, reduce=reduce, norm_stats="batch", progress=False)
        return int(pruned.masks["linear.weight"].sum())

    assert left_in_classifier("fan-out", "magnitude") == 0
    assert left_in_classifier("fan-out", "sipp-det", "mean") > 100
    assert left_in_classifier("he", "magnitude") > 100  # so it is the initialisation


@pytest.mark.parametrize(
    ("name", "n_convs", "n_blocks"), [("resnet18", 2, (2, 2, 2, 2)), ("resnet50", 3, (3, 4, 6, 3))]
)
def test_imagenet_resnet_names(name: str, n_convs: int, n_blocks: tuple[int, ...]) -> None:
    keys = {key for key in build(name).state_dict() if key.endswith("weight")}
    expected = {"conv1.weight", "bn1.weight", "fc.weight"}
    for stage, count in enumerate(n_blocks, start=1):
        for i in range(count):
            expected |= {f"layer{stage}.{i}.{kind}{k + 1}.weight" for kind in ("conv", "bn") for k in range(n_convs)}
        if stage > 1 or n_convs == 3:
            expected |= {f"layer{stage}.0.downsample.{k}.weight" for k in (0, 1)}
    assert keys == expected


def test_option_a_shortcut_pixel_by_pixel() -> None:
    x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float32).view(2, 3, 4, 4)
    out = SubsampleAndPad(2)(x)
    assert out.shape == (2, 7, 2, 2)
    for n in range(2):
        for c in range(7):
            for i in range(2):
                for j in range(2):
                    assert out[n, c, i, j] == (x[n, c - 2, 2 * i, 2 * j] if 2 <= c < 5 else 0)


def test_wide_resnet_projection_meets_the_activated_input() -> None:
    block = seeded("wrn16-8").layer1[0].eval()
    x = torch.full((1, 16, 8, 8), -1.0)  # relu(bn(x)) is 0, so nothing may pass, neither branch nor shortcut
    assert not block(x).any()
    plain = seeded("wrn16-8").layer1[1].eval()
    x = torch.full((1, 128, 8, 8), -1.0)
    assert torch.equal(plain(x), x)  # an identity shortcut passes the raw input


def test_lstm_reads_images_and_sequences_alike() -> None:
    net = seeded("lstm")
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(net(x), net(x[:, 0]))
    assert net(torch.randn(2, 5, 8)).shape == (2, 10)  # any length
    with torch.no_grad():
        changed = x.clone()
        changed[:, :, -1] += 1
        assert not torch.equal(net(x), net(changed))


def test_n_classes() -> None:
    assert build("digits-cnn", n_classes=3)(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    for wrong in (0, -1, True, 2.0):
        with pytest.raises(OptionError, match="n_classes"):
            build("digits-cnn", n_classes=wrong)  # type: ignore[arg-type]


def test_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(OptionError, match=r"'ResNet-20' \(did you mean 'resnet20'\?\); known: resnet20, .*resnet101"):
        build("ResNet-20")
    with pytest.raises(OptionError, match="unknown network 'xyz'; known"):
        net_spec("xyz")
