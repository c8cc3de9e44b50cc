"""Whole channels removed without training: accuracy and speed of smaller dense networks, beside other ways to choose.

    python benchmarks/bench_channels.py images --weights resnet56-cifar10.safetensors --cifar10 data --fewer 1.5 2 2.1 3
    python benchmarks/bench_channels.py images ... --steps 1000       # sipp also polished towards the dense outputs
    python benchmarks/bench_channels.py images ... --mirrored         # 1,000 images and their mirror images
    python benchmarks/bench_channels.py images ... --timed            # for a quiet machine
    python benchmarks/bench_channels.py train --cifar10 data --weights vgg16-cifar10.safetensors
    python benchmarks/bench_channels.py language --model stories15m --calibration train.jsonl --test new.jsonl
    python benchmarks/bench_channels.py networks --trials 300         # random networks: equal to their masked networks
    python benchmarks/bench_channels.py certificates --trials 300     # how often a certificate is false

Images: 1,000 training images without labels calibrate, all 10,000 test images judge. Language models lose the same
share of hidden units or of heads in every block (`uniform=True`), and their perplexity is that of the test text. Beside
sipp: `not refitted` is its choice with the dense weights; `l1` and `wanda` take as many channels from every layer as
`uniform=True` does, those with the smallest sums of magnitudes of all their weights, or of what reads them times the
norm of what they give; `torch-pruning` its group magnitudes of the same channels (with --peer, the folder it is
installed in). Norms of these have their statistics taken again on the same images. Rows go to
benchmarks/figures/channels.json, beside those of earlier calls.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import alternate, write_figures
from published import BATCH, Images, images_of, resnet
from safetensors.torch import save_file
from torch import Tensor, nn

import sipp
from sipp.results.shrunk import ChannelsLeft, Shrunk
from sipp_lab.data.images import draw_shifts, normalise, shift
from sipp_lab.data.sets import load_cifar10
from sipp_lab.nets import build

N_POINTS = 1_000
TIMED = 64
TOLERANCE = 1e-6  # in float64
WORK = "1,000 inputs without labels, 10,000 test images, not trained; language models: the sequences that are named"
FIGURES = Path(__file__).parent / "figures" / "channels.json"
LOADS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=8, min_new_tokens=8).shape[1])
"""


def note(*path: str, **values: Any) -> None:
    """Adds values to the figures, below those of earlier calls."""
    whole = json.loads(FIGURES.read_text())["values"] if FIGURES.exists() else {}
    at = whole
    for name in path:
        at = at.setdefault(name, {})
    at.update(values)
    print(*path, values, flush=True)
    write_figures("channels", WORK, whole)


def sites_of(small: Shrunk) -> tuple[ChannelsLeft, ...]:
    assert small.chosen is not None
    return small.chosen.sites


# --- Other ways to choose ---------------------------------------------------------------------------------------------


def recalibrated(net: nn.Module, points: Tensor) -> nn.Module:
    """The network with the statistics of its norms taken on these inputs."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    with torch.no_grad():
        for part in points.split(BATCH):
            net.train()(part)
    return net.eval()


def without_least(
    net: nn.Module, points: Tensor, sites: tuple[ChannelsLeft, ...], score: Callable[[nn.Module, ChannelsLeft], Tensor]
) -> nn.Module:
    """The network with as many channels at each site as are left there, those with the highest scores."""
    trial = copy.deepcopy(net)
    with torch.no_grad():
        for site in sites:
            gone = score(net, site).argsort()[: site.before - site.after]
            _columns(trial.get_parameter(site.reader), site)[:, gone] = 0.0
    return sipp.shrink(trial, points[:2], progress=False).model


def _columns(weight: Tensor, site: ChannelsLeft) -> Tensor:
    """A reading weight as rows x channels x the inputs of each."""
    return weight.flatten(1).view(len(weight), site.before, -1)


def magnitudes(net: nn.Module, site: ChannelsLeft) -> Tensor:
    """The sum of magnitudes of all weights that give a channel or read it."""
    return filter_magnitudes(net, site) + _columns(net.get_parameter(site.reader), site).abs().sum((0, 2))


def filter_magnitudes(net: nn.Module, site: ChannelsLeft) -> Tensor:
    return torch.stack([net.get_parameter(name).abs().reshape(site.before, -1).sum(1) for name in site.makers]).sum(0)


def wanda(net: nn.Module, points: Tensor) -> Callable[[nn.Module, ChannelsLeft], Tensor]:
    """Scores: the norm of each input of the reader times the magnitudes that read it."""
    squares: dict[str, Tensor] = {}

    def add(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            squares[name] = squares.get(name, 0) + given[0].flatten(0, -2).double().square().sum(0)

        return hook

    hooks = [
        module.register_forward_pre_hook(add(f"{name}.weight"))
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for part in points.split(8):
            net(part)
    for hook in hooks:
        hook.remove()

    def score(net: nn.Module, site: ChannelsLeft) -> Tensor:
        scored = net.get_parameter(site.reader).abs() * squares[site.reader].sqrt()
        return _columns(scored, site).sum((0, 2))

    return score


def by_torch_pruning(net: nn.Module, points: Tensor, fewer: float, sites: tuple[ChannelsLeft, ...]) -> nn.Module:
    """What Torch-Pruning leaves: the same share of the same channels, by the magnitude of their groups."""
    import torch_pruning  # type: ignore[import-not-found]

    example, low, high = points[:1], 0.0, 1.0
    whole, _ = torch_pruning.utils.count_ops_and_params(net, example)
    makers = {maker for site in sites for maker in site.makers}
    for _ in range(10):
        share = (low + high) / 2
        trial = copy.deepcopy(net)
        stay = [
            module
            for name, module in trial.named_modules()
            if isinstance(module, (nn.Conv2d, nn.Linear)) and f"{name}.weight" not in makers
        ]
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)
        pruner = torch_pruning.pruner.BasePruner(trial, example, importance, pruning_ratio=share, ignored_layers=stay)
        pruner.step()
        if whole > fewer * torch_pruning.utils.count_ops_and_params(trial, example)[0]:
            high, found = share, trial
        else:
            low = share
    return recalibrated(found, points)


# --- Networks on images -----------------------------------------------------------------------------------------------


def images_command(given: argparse.Namespace) -> None:
    images, net = images_of(given.cifar10, given.seed), resnet(given.weights).to(given.device)
    points = images.points(0, N_POINTS).to(given.device)
    used = torch.stack((points, points.flip(3)), 1).flatten(0, 1) if given.mirrored else points
    name = given.weights.name.split("-")[0] + (", mirrored" if given.mirrored else "")
    note(name, dense={"accuracy": round(accuracy(net, images), 2)})

    def small(fewer: float, **more: Any) -> Shrunk:
        return sipp.shrink(net, used, multiply_adds=1 / fewer, progress=False, **more)

    def evenly(fewer: float) -> tuple[ChannelsLeft, ...]:
        return sites_of(small(fewer, uniform=True, repair=False))

    if given.peer:
        sys.path.insert(0, str(given.peer))
    ways: dict[str, Callable[[float], nn.Module]] = {
        "sipp": lambda fewer: small(fewer).model,
        "sipp, polished": lambda fewer: small(fewer, steps=given.steps).model,
        "sipp, widths of 8": lambda fewer: small(fewer, multiple_of=8).model,
        "not refitted": lambda fewer: recalibrated(small(fewer, repair=False).model, points),
        "l1": lambda fewer: recalibrated(without_least(net, points, evenly(fewer), filter_magnitudes), points),
        "torch-pruning": lambda fewer: by_torch_pruning(net, points, fewer, evenly(fewer)),
    }
    for fewer in given.fewer:
        for way in given.only:
            start = time.perf_counter()
            made = ways[way](fewer)
            values: dict[str, Any] = {"accuracy": round(accuracy(made, images), 2)}
            values["seconds"] = round(time.perf_counter() - start, 1)
            if given.timed:
                values |= timings(net, made, points[:TIMED])
            if way == "sipp, polished":
                values["steps"] = given.steps
            note(name, way, f"{fewer:g}", **values)


def accuracy(net: nn.Module, images: Images) -> float:
    """The share of right answers on the test images, in per cent."""
    device = next(net.parameters()).device
    with torch.no_grad():
        answers = [net(part.to(device)).argmax(1).cpu() for part in images.test.split(BATCH)]
    return 100 * float((torch.cat(answers) == images.labels).float().mean())


def timings(net: nn.Module, made: nn.Module, x: Tensor) -> dict[str, float]:
    """How many times faster the smaller network runs: plain torch on its device, and ONNX Runtime on the CPU."""
    import onnxruntime

    both, threads = (net, made), torch.get_num_threads()

    def run(one: nn.Module) -> None:
        with torch.inference_mode():
            one(x)
        if x.is_cuda:
            torch.cuda.synchronize()

    seconds = alternate(*(lambda one=one: run(one) for one in both))
    found = {"faster": round(seconds[0] / seconds[1], 2), "milliseconds": round(1e3 * seconds[1], 2)}
    with tempfile.TemporaryDirectory() as folder:
        sessions = []
        for i, one in enumerate(both):
            file = f"{folder}/{i}.onnx"
            torch.onnx.export(copy.deepcopy(one).cpu(), (x.cpu(),), file, dynamo=True, verbose=False)
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            sessions.append(onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"]))
        feed = {sessions[0].get_inputs()[0].name: x.cpu().numpy()}
        seconds = alternate(*(lambda one=one: one.run(None, feed) for one in sessions))
    return {**found, "faster in ONNX Runtime": round(seconds[0] / seconds[1], 2), "threads": threads}


def training_images(folder: Path) -> tuple[Tensor, Tensor]:
    """The training images as bytes, and their labels."""
    data = load_cifar10(folder)
    return data.images[: data.n_train], data.labels[: data.n_train]


def train_command(given: argparse.Namespace) -> None:
    """Trains the network that the file is named after: SGD, one cycle of the learning rate, shifts and mirroring."""
    images, labels = (x.to(given.device) for x in training_images(given.cifar10))
    torch.manual_seed(given.seed)
    net = build(given.weights.name.split("-")[0], n_classes=10).to(given.device)
    n_steps = given.epochs * (len(images) // given.batch)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=given.rate, total_steps=n_steps)
    generator = torch.Generator(given.device).manual_seed(given.seed)
    for epoch in range(given.epochs):
        order = torch.randperm(len(images), generator=generator, device=given.device)
        for at in order.split(given.batch)[: len(images) // given.batch]:
            x = shift(normalise(images[at]), draw_shifts(len(at), generator))
            with torch.autocast(given.device, torch.bfloat16):
                loss = F.cross_entropy(net(x), labels[at], label_smoothing=0.05)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            cycle.step()
        print(epoch, f"{float(loss):.3f}", flush=True)
    save_file({name: x.contiguous().cpu() for name, x in net.state_dict().items()}, given.weights)


# --- Language models --------------------------------------------------------------------------------------------------


def language_command(given: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(given.model)
    net = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(given.device).eval()
    drawn = {"length": given.length, "n_sequences": given.sequences, "seed": given.seed}
    points = sipp.text(given.calibration, tokenizer, **drawn).to(given.device)
    windows = sipp.text(given.test, tokenizer, length=given.length, apart=False)[: given.windows].to(given.device)
    name, batches = given.model.name, [{"input_ids": part} for part in points.split(8)]
    note(name, calibration=f"{len(points)} x {given.length} tokens", test=f"{len(windows)} windows of {given.length}")
    note(name, dense={"perplexity": perplexity(net, windows)})
    total = sum(one.numel() for one in net.parameters())
    kinds = {"hidden units": ("*o_proj", ("mlp",)), "heads": ("*down_proj", ("q_proj", "k_proj", "v_proj", "o_proj"))}
    for kind, (exclude, of) in kinds.items():
        size = sum(one.numel() for path, one in net.named_parameters() if any(word in path for word in of))
        for share in given.shares if kind == "hidden units" else given.heads:
            # half a unit more than asked for, so that rounding takes no other one
            options = {"weights": 1 - (share - 1e-4) * size / total, "uniform": True, "exclude": exclude}

            def small(options: Mapping[str, Any] = options, **more: Any) -> Shrunk:
                return sipp.shrink(net, batches, progress=False, **options, **more)

            chosen = small(repair=False)
            sites = sites_of(chosen)
            ways: dict[str, Callable[[Shrunk], Any]] = {
                "sipp": lambda _, small=small: small(),  # type: ignore[misc]
                "not refitted": lambda given: given,
                "magnitude": lambda given: without_least(net, points, sites_of(given), magnitudes),
                "wanda": lambda given: without_least(net, points, sites_of(given), wanda(net, points)),
            }
            left = f"{sites[0].after} of {sites[0].before}"
            for way in given.only:
                start = time.perf_counter()
                made = ways[way](chosen)
                seconds = time.perf_counter() - start
                model = made.model if isinstance(made, Shrunk) else made
                values = {"perplexity": perplexity(model, windows), "left": left, "seconds": round(seconds, 1)}
                if way == "sipp":
                    values["loads and generates"] = loads(model)
                note(name, kind, f"{share:g}", way, **values)


def perplexity(net: nn.Module, windows: Tensor) -> float:
    return round(sipp.perplexity(net, windows, progress=False).perplexity, 3)


def loads(net: Any) -> bool:
    """Whether a fresh process loads the saved model and generates with it."""
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        done = subprocess.run([sys.executable, "-c", LOADS, folder], capture_output=True, text=True, check=False)
    return done.stdout.strip().endswith("12")


# --- Claims -----------------------------------------------------------------------------------------------------------


def networks_command(given: argparse.Namespace) -> None:
    """Random networks with a budget, not refitted: the same as with zeros in place of what is gone, or the seed."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from runtime.shrinkable_networks import network

    wrong, smaller = [], 0
    for seed in range(given.trials):
        net, _ = network(seed)
        try:
            small = sipp.shrink(net, torch.randn(24, 3, 8, 8), weights=0.95, repair=False, progress=False)
        except sipp.errors.SippError:  # nothing can go, or too little
            continue
        smaller += 1
        with torch.no_grad():
            for site in sites_of(small):
                net.get_parameter(site.reader)[:, list(site.removed)] = 0.0
            x = torch.randn(5, 3, 8, 8, dtype=torch.float64)
            wanted, found = net.double()(x), small.model.double()(x)
        if not float((wanted - found).norm()) <= TOLERANCE * float(wanted.norm()):
            wrong.append(seed)
    print(f"{given.trials} random networks: {smaller} smaller, outputs differ for {wrong or 'none'}")
    note("random networks", tried=given.trials, smaller=smaller, wrong=len(wrong))


def certificates_command(given: argparse.Namespace) -> None:
    """How often the certificate of a smaller network is false: ten networks, each with many holdouts."""
    share, confidence, n_networks, false = 0.2, 0.8, 10, 0
    for seed in range(n_networks):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
        small = sipp.shrink(net, torch.randn(300, 8), weights=0.5, progress=False)
        with torch.no_grad():
            new = torch.randn(100_000, 8)
            dense = net(new)
            error = (small.model(new) - dense).norm(dim=1) / dense.norm(dim=1)
        for _ in range(given.trials // n_networks):
            made = sipp.certify(net, small, torch.randn(60, 8), share=share, confidence=confidence, progress=False)
            false += bool((error > made.epsilon).double().mean() > share)
    note("certificates", tried=given.trials, false=false, allowed=round((1 - confidence) * given.trials))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--device", default="cpu")
    both.add_argument("--seed", type=int, default=0)
    both.add_argument("--trials", type=int, default=300)
    made = {
        name: commands.add_parser(name, parents=[both])
        for name in ("images", "train", "language", "networks", "certificates")
    }
    for name in ("images", "train"):
        made[name].add_argument("--weights", type=Path, required=True)
        made[name].add_argument("--cifar10", type=Path, required=True)
    images, train, language = made["images"], made["train"], made["language"]
    images.add_argument("--fewer", type=float, nargs="+", default=[2.0])
    images.add_argument("--only", nargs="+", default=["sipp", "not refitted", "l1"])
    images.add_argument("--steps", type=int, default=1000)
    images.add_argument("--mirrored", action="store_true")
    images.add_argument("--peer", type=Path)
    images.add_argument("--timed", action="store_true")
    train.add_argument("--epochs", type=int, default=40)
    train.add_argument("--batch", type=int, default=256)
    train.add_argument("--rate", type=float, default=0.1)
    language.add_argument("--model", type=Path, required=True)
    language.add_argument("--calibration", type=Path, required=True)
    language.add_argument("--test", type=Path, required=True)
    language.add_argument("--sequences", type=int, default=128)
    language.add_argument("--length", type=int, default=256)
    language.add_argument("--windows", type=int, default=100, help="of the test text")
    language.add_argument("--shares", type=float, nargs="*", default=[0.1, 0.2, 0.3])
    language.add_argument("--heads", type=float, nargs="*", default=[])
    language.add_argument("--only", nargs="+", default=["sipp", "not refitted", "magnitude", "wanda"])
    for name, command in made.items():
        command.set_defaults(run=globals()[f"{name}_command"])
    given = parser.parse_args()
    warnings.simplefilter("ignore")  # of bounds
    given.run(given)


if __name__ == "__main__":
    main()
