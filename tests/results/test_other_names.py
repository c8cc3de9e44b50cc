"""Words of other libraries are answered with ours, and every verb takes what `prune` and `prune_to` give."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import sipp
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.errors import OptionError, UnknownOption
from sipp.results import other_names
from sipp.scoring.methods import NAMES


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def points(seed: int, n: int = 300) -> Tensor:
    return torch.rand(n, 8, generator=torch.Generator().manual_seed(seed))


OPTIONS = (
    ("prune", {"sparsity": 0.9}, "sparsity=0.9 is keep=0.1"),
    ("prune", {"amount": 0.3}, "amount=0.3 is keep=0.7"),
    ("prune", {"density": 0.2}, "density=0.2 is keep=0.2"),
    ("prune", {"amount": 20}, "give keep=, the share of weights to keep, not the share to remove"),
    ("prune", {"epsilon": 0.1}, r"sipp.prune_to\(model, data, holdout, epsilon=...\)"),
    ("prune", {"structured": True}, r"sipp.shrink\(model, data, multiply_adds=0.5\) removes whole channels"),
    ("prune", {"ignored_layers": []}, "write exclude="),
    ("compare", {"sparsity": 0.9}, r"compare has no option sparsity; sparsity=0.9 is keeps=\(0.1,\)"),
    ("gradual", {"sparsity": 0.5}, "sparsity=0.5 is keep=0.5"),
    ("shrink", {"pruning_ratio": 0.5}, "give multiply_adds= or weights="),
    ("shrink", {"sparsity": 0.5}, "give multiply_adds= or weights="),
    ("shrink", {"round_to": 8}, "write multiple_of="),
    ("shrink", {"ignored_layers": []}, "write exclude="),
    ("shrink", {"structured": True}, "leave it out"),
)


@pytest.mark.parametrize(("verb", "options", "said"), OPTIONS)
def test_an_option_of_other_libraries_is_named_as_here(verb: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(TypeError, match=said) as found:
        getattr(sipp, verb)(net(), points(1), **options)
    assert isinstance(found.value, UnknownOption) and isinstance(found.value, OptionError)


def test_warnings_still_point_at_the_callers_line() -> None:
    x = points(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        sipp.prune(net(), None, budget=1, method="magnitude")
        sipp.prune_to(net(), x, points(2), epsilon=50.0, method="magnitude")
        sipp.compare(net(), [(x, x)], keeps=(0.5,), methods=("magnitude",))
    assert len(told) >= 3 and {one.filename for one in told} == {__file__}, [str(one) for one in told]


def test_a_method_of_another_name(capsys: pytest.CaptureFixture[str]) -> None:
    for given, here in other_names.METHODS.items():
        assert here in NAMES and given not in NAMES
        with pytest.raises(OptionError, match=f"is called '{here}' here; give method='{here}'"):
            sipp.prune(net(), points(1), keep=0.5, method=given)
    with pytest.raises(OptionError, match="did you mean 'wanda'"):
        sipp.prune(net(), points(1), keep=0.5, method="wandda")
    words = ["prune", "--model", "digits-cnn", "--data", "digits", "--keep", "0.5", "--method", "l1"]
    assert run_and_report(app, [*words, "--dry-run"]) == 2
    assert "give --method magnitude" in capsys.readouterr().err.replace("=", " ").replace("'", "")
    assert run_and_report(app, [*words[:5], "--sparsity", "0.9", "--dry-run"]) == 2
    assert "do:    give --keep, the share of weights to keep" in capsys.readouterr().err


def test_every_verb_takes_what_prune_and_prune_to_gave(tmp_path: Path) -> None:
    dense, example = net(), points(3, 4)
    best = sipp.prune_to(dense, points(1), points(2), epsilon=0.9, method="magnitude")
    assert best.pruned is not None and best.certificate is not None
    for record in (best, best.pruned):
        assert sipp.certify(dense, record, points(4)).pruned_hash == best.certificate.pruned_hash
        assert sipp.certify_accuracy(dense, record, points(4)).n == 300
        assert sipp.export(record, tmp_path / "net.onnx", points(3, 4)[:2]).off_by < 1e-5
        assert sipp.save(record, tmp_path / "net.safetensors").certificate == (
            best.certificate if record is best else None
        )
        folder = sipp.save_folder(record, tmp_path / "folder")
        assert ("certified" in (folder / "report.json").read_text()) == (record is best)
        page = sipp.page(record, path=tmp_path / "page.html", force=True).read_text()
        assert ("With 95 % confidence" in page) == (record is best)
    assert torch.allclose(sipp.sparse(best, example)(example), best.model(example), atol=1e-5)
    sipp.page([best], best.certificate, path=tmp_path / "page.html", force=True)  # the same one twice is one
    with torch.no_grad():
        best.model.get_parameter("0.weight").mul_(1.01)
    assert sipp.save(best, tmp_path / "net.safetensors").certificate is None  # it was about other weights
