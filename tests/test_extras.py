"""Without a package that only a part of sipp needs, that part names the extra, and every other part works."""

import ast
import re
import sys
from pathlib import Path

import pytest
from fresh_process import run_python

from sipp.cli.errors import run_and_report
from sipp.cli.main import app
from sipp.errors import OptionError
from sipp.extras import EXTRAS, needed_for

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = {"torch", "numpy", "scipy", "llvmlite", "numba", "safetensors", "rich", "typer", "pydantic"}

# What a user would call, and what it then says it needs: one row or more for each optional package.
NEEDS = [
    ("jinja2", "from sipp.report import render; render([], [])", "drawing the page needs jinja2", "report"),
    ("yaml", "from sipp_lab.recipes import load_recipe; load_recipe('digits-iterative', settings=('seed=1',))",
     "reading a recipe needs pyyaml", "train"),
    ("PIL", "from sipp_lab.data.folder import index_folders; index_folders('photos')",
     "reading images needs pillow", "train"),
    ("sklearn", "from sipp_lab.data.sets import load_digits; load_digits()",
     "the digits data set needs scikit-learn", "train"),
    ("ray", "from sipp_lab.runs.on_ray import import_ray; import_ray()",
     "engine 'ray' needs ray", "ray"),
    ("transformers", "from sipp.cli.hugging_face import hf_model; hf_model('hf:folder')",
     "--model hf:DIR needs transformers", "hf"),
    ("transformers", "import sipp.integrations.hugging_face",
     "holding masks in the HF Trainer needs transformers", "hf"),
    ("pytorch_lightning", "import sipp.integrations.lightning",
     "holding masks in Lightning needs pytorch-lightning", "lightning"),
    ("accelerate", "from sipp.cli import hugging_face as hf; hf.hf_model_without_weights('hf:.')",
     "reading a network without its weights needs accelerate", "hf"),
    *((name, "import torch; from sipp import export; "
       "export(torch.nn.Linear(2, 2), 'net.onnx', torch.ones(2, 2))",
       f"exporting to ONNX needs {name}", "onnx") for name in ("onnx", "onnxruntime", "onnxscript")),
]  # fmt: skip


def hidden(*packages: str) -> str:
    """Lines of Python after which these packages cannot be imported."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n"


@pytest.mark.parametrize(("package", "call", "says", "extra"), NEEDS, ids=[f"{n[0]}-{i}" for i, n in enumerate(NEEDS)])
def test_a_missing_package_is_named_with_its_extra(
    package: str, call: str, says: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for other in [name for name, (_, brought_by) in EXTRAS.items() if brought_by == extra == "onnx"]:
        if other != package:  # one that is missing here would be named in its place
            pytest.importorskip(other)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    for name in ("sipp.integrations.lightning", "sipp.integrations.hugging_face"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # these import at their head
    with pytest.raises(OptionError) as caught:
        exec(call, {})
    assert str(caught.value) == f"{says}; run pip install '.[{extra}]' in a clone of sipp"
    assert not list(tmp_path.iterdir())  # said before any work


def test_every_optional_package_has_a_row() -> None:
    assert {row[0] for row in NEEDS} == set(EXTRAS) - {"markupsafe", "huggingface_hub"}


def test_only_optional_packages_get_another_error() -> None:
    """A bug in sipp, or a package that is there and broken, keeps its own error."""
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needed_for("a test"):
        import no_such_package  # noqa: F401
    with pytest.raises(ImportError, match="no_such_name"), needed_for("a test"):
        from jinja2 import no_such_name  # noqa: F401


def test_the_extras_bring_what_they_are_named_for() -> None:
    def names(lines: list[str]) -> set[str]:
        return {re.match(r"[\w-]+(\[.*\])?", line).group() for line in lines}  # type: ignore[union-attr]

    extras = {extra: names(lines) for extra, lines in PROJECT["optional-dependencies"].items()}
    for name, extra in EXTRAS.values():
        assert name in extras[extra], f"{name} is not in the extra {extra}"
    assert names(PROJECT["dependencies"]) == CORE
    assert extras["all"] == {"sipp[report,train,ray,hf,lightning,onnx]"}
    assert set(extras) == {"report", "train", "ray", "hf", "lightning", "onnx", "docs", "all", "dev"}


def test_every_dependency_is_pinned() -> None:
    pinned = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    lines = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    wanted = {re.match(r"[\w-]+", line).group() for line in lines} - {"sipp"}  # type: ignore[union-attr]
    assert wanted <= set(pinned)
    assert all(pinned.count(name) <= 2 for name in pinned)  # for Python 3.10, and for newer ones


def test_imports_of_optional_packages_are_guarded() -> None:
    """Every one of them stands in `needed_for`, in a TYPE_CHECKING block, or in a function behind one of those."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:  # what runs when the file is imported
            for name in imported(node):
                assert name not in EXTRAS, f"{path.relative_to(SOURCE)} imports {name} at its head, without needed_for"


def imported(node: ast.stmt) -> list[str]:
    """The top-level packages that a statement at the head of a file imports."""
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0]]
    return []


WITHOUT_EXTRAS = """
import torch, sipp
from sipp.cli.errors import run_and_report
from sipp.cli.main import app
import numpy as np

net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
pruned = sipp.prune(net, torch.rand(64, 16), keep=0.9)
assert sipp.certify(net, pruned.model, torch.rand(100, 16)).n == 100
np.save("points.npy", np.random.default_rng(0).random((100, 784), dtype=np.float32))
np.save("more.npy", np.random.default_rng(1).random((100, 784), dtype=np.float32))
from sipp_lab.nets import build
torch.save(build("lenet-300-100").state_dict(), "net.pt")
model = "--model lenet-300-100 --weights net.pt".split()
for words in (
    ["prune", *model, "--data", "points.npy", "--keep", "0.9", "--method", "magnitude", "--out", "pruned"],
    "certify --model lenet-300-100 --dense net.pt --pruned pruned --holdout more.npy --out certificate.json".split(),
    ["run", "--status", "--out", "."],
    ["--help"],
):
    assert run_and_report(app, words) == 0, words
"""


def test_prune_and_certify_need_no_extra(tmp_path: Path) -> None:
    done = run_python(f"import os; os.chdir({str(tmp_path)!r})\n" + hidden(*EXTRAS) + WITHOUT_EXTRAS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "certificate.json").is_file()


def test_the_command_line_says_it_in_three_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run_and_report(app, ["demo"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the demo needs jinja2", "where: sipp demo", "do:    run pip install '.[report]' in a clone of sipp"
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())
