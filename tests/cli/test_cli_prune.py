"""`sipp prune`: what it writes and prints, for every kind of network and of data."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import Done, files_in, refused, run, three_lines, told
from safetensors.torch import load_file, save_file
from torch import nn

import sipp
from sipp import files
from sipp.results import hashing
from sipp_lab.nets import build

N_POINTS = 200
TO = ("--epsilon", 0.5, "--holdout", "new.npz")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: inputs, new inputs, named inputs, and weights."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.save("data.npy", rng.normal(size=(N_POINTS, 6)).astype(np.float32))
    np.savez("new.npz", inputs=rng.normal(size=(400, 6)), labels=rng.integers(0, 3, 400).astype(np.int32))
    np.save("images.npy", rng.normal(size=(N_POINTS, 4, 6, 6)).astype(np.float32))
    np.savez("tokens.npz", input_ids=rng.integers(0, 50, (N_POINTS, 8)))
    for name in ("sides", "new-sides"):
        torch.save({"left": torch.randn(N_POINTS, 6), "right": torch.randn(N_POINTS, 4)}, f"{name}.pt")
    save_file(mlp().state_dict(), "w.safetensors")
    return tmp_path


def words(*more: object, model: str = "cli_zoo:mlp", data: object = "data.npy") -> list[object]:
    return ["prune", "--model", model, "--data", data, *more]


def prune(*more: object) -> Done:
    return run(*words("--weights", "w.safetensors", "--out", "net", *more))


@pytest.fixture
def passes() -> Iterator[list[int]]:
    """The points of every forward pass of a whole network."""
    seen: list[int] = []

    def count(module: nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        if isinstance(module, nn.Sequential):
            seen.append(len(inputs[0]))

    handle = nn.modules.module.register_module_forward_hook(count)
    yield seen
    handle.remove()


def test_the_folder_holds_what_sipp_prune_gives(folder: Path) -> None:
    out = folder / "deep" / "out"
    record = told(*words("--keep", 0.4, "--out", out))
    tensors = load_file(out / "model.safetensors")
    inputs = torch.from_numpy(np.load("data.npy"))
    expected = sipp.prune(mlp().eval(), list(inputs.split(32)), keep=0.4)
    state = expected.model.state_dict()
    assert tensors.keys() == state.keys() and all(torch.equal(tensors[name], value) for name, value in state.items())
    assert sorted(path.name for path in out.iterdir()) == ["model.safetensors", "report.json"]
    report = json.loads((out / "report.json").read_text())
    written = record.pop("written")
    assert len(report.pop("check")) == 64 and record == report
    assert list(written) == [str(out / "model.safetensors"), str(out / "report.json")]
    assert (report["kind"], report["keep"], report["asked"]["options"]["keep"]) == ("pruned", expected.keep, 0.4)
    assert [layer["kept"] for layer in report["layers"]] == [layer.kept for layer in expected.layers]
    assert expected.guarantee is not None and report["guarantee"]["sentence"] == expected.guarantee.sentence
    assert report["certificate"] is None and report["data"]["n_inputs"] == N_POINTS


@pytest.mark.parametrize(
    ("model", "data"), [("cli_zoo:grouped", "images.npy"), ("lstm", "digits"), ("cli_zoo:gpt2", "tokens.npz")]
)
def test_networks_of_every_kind(model: str, data: str, folder: Path) -> None:
    if "gpt2" in model:
        pytest.importorskip("transformers", reason="the networks of transformers need it")
    record = told(*words("--keep", 0.5, "--out", "out", model=model, data=data))
    tensors = load_file("out/model.safetensors")
    assert record["keep"] == pytest.approx(0.5, abs=1e-3)
    for layer in record["layers"]:
        assert int((tensors[layer["name"]] != 0).sum()) == layer["kept"]
    if model == "cli_zoo:gpt2":
        assert {layer["layer_type"] for layer in record["layers"]} == {"Conv1D"}  # the head is tied to the embedding


def test_a_dry_run_prints_the_table_and_writes_nothing(folder: Path) -> None:
    before = files_in(folder)
    typed = words("--keep", 0.5, "--method", "sipp-det", "--dry-run", "--out", "out")
    done, record = run(*typed), told(*typed)
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if ".weight" in line}
    for layer in record["layers"]:
        assert table[layer["name"]][3:5] == [str(layer["kept"]), f"{layer['keep']:.2%}"]
    assert "nothing was written" in done.stdout and record["written"] == {} and files_in(folder) == before


@pytest.mark.parametrize("method", ["sipp-rand", "snip"])
def test_methods_and_layers_are_chosen(method: str, folder: Path) -> None:
    record = told(*words("--keep", 50 / 144, "--method", method, "--dry-run", data="new.npz"))
    assert (record["method"], record["kept"]) == (method, 50)
    chosen = told(*words("--keep", 0.5, "--method", method, "--include", "0*", "--dry-run", data="new.npz"))
    assert [layer["name"] for layer in chosen["layers"]] == ["0.weight"]


def test_without_data_only_methods_that_need_none(folder: Path) -> None:
    needs = run("prune", "--model", "digits-cnn", "--keep", 0.3, "--dry-run")
    assert needs.returncode == 2 and "needs data" in three_lines(needs.stderr)[0]
    typed = ["prune", "--model", "cli_zoo:mlp", "--method", "magnitude", "--keep", 0.5, "--dry-run"]
    assert "not used" in run(*typed).stdout
    done = run(*typed, "--data", "data.npy", "--no-statements")
    assert done.returncode == 0 and "theory:          no statements: magnitude needs no sensitivities" in done.stdout


def test_a_certificate_of_prune_is_the_one_of_certify(folder: Path) -> None:
    record = json.loads(prune("--keep", 0.6, "--holdout", "new.npz", "--json").stdout)
    networks = ["--model", "cli_zoo:mlp", "--dense", "w.safetensors", "--pruned", "net"]
    assert record["certificate"].items() <= told("certify", *networks, "--holdout", "new.npz").items()
    dry = run(*words("--keep", 0.6, "--holdout", "new.npz", "--dry-run"))
    said = " ".join(dry.stdout.split())  # what it costs is what was certified, said once
    assert "error: With 95 % confidence" in said and said.count("With 95 % confidence") == 1
    assert "certify on other inputs next time" in said


def test_a_tolerance_is_certified_on_a_holdout(folder: Path) -> None:
    typed = words("--epsilon", 0.6, "--method", "magnitude", "--holdout", "new.npz")
    record = told(*typed, "--dry-run")
    assert (record["data"]["n_inputs"], record["holdout"]["n_inputs"]) == (200, 400)
    certificate = record["certificate"]
    assert certificate["verdict"] == "certified" and certificate["calibration_checked"]  # so they are disjoint
    assert record["keep"] < 1 and record["path"][0]["passed"]
    done = run(*typed, "--out", "net")
    said = " ".join(done.stdout.split())
    assert (
        done.returncode == 0
        and said.count(certificate["sentence"]) == 1
        and "with --repair, which chooses the weights" in said
    )
    no = run(*[0 if one == 0.6 else one for one in typed], "--out", "no")
    assert no.returncode == 3 and "not certified" in three_lines(no.stderr)[0] and not Path("no").exists()


def test_named_inputs_and_a_part_of_the_output(folder: Path) -> None:
    typed = words(
        "--epsilon", 0.5, "--method", "magnitude", "--dry-run", "--holdout", "new-sides.pt",
        model="cli_zoo:Named", data="sides.pt",
    )  # fmt: skip
    assert told(*typed, "--part", "sum")["certificate"]["output"] == "sum"
    assert "--part" in refused(run(*typed), "--model")


def test_sets_give_training_points_to_calibrate_and_test_points_to_certify() -> None:
    digits = ["prune", "--model", "digits-cnn", "--data", "digits", "--dry-run"]
    record = told(*digits, "--max-accuracy-drop", 0.5, "--method", "magnitude", "--holdout", "digits")
    assert "of 1,437 training images" in record["data"]["what"]
    assert record["holdout"]["what"] == "360 test images of digits"
    few = told(*digits, "--keep", 0.5, "--points", 20, "--batchnorm", "running")
    assert few["data"]["n_inputs"] == 20 and few["guarantee"]["n"] == 15
    theory = told(*digits, "--keep", 0.5, "--batchnorm", "running")["guarantee"]
    assert theory["n_needed"] <= theory["n"] <= theory["n_needed"] + 1


def test_an_untrained_network_is_not_scored_with_statistics_it_does_not_have(tmp_path: Path) -> None:
    typed = ["prune", "--model", "digits-cnn", "--data", "digits", "--points", 40, "--keep", 0.3, "--dry-run"]
    assert told(*typed)["norm_stats"] == "batch" and "it has none of its own" in run(*typed).stdout
    assert told(*typed, "--batchnorm", "running")["norm_stats"] == "running"
    torch.manual_seed(0)
    trained = build("digits-cnn")
    trained(torch.randn(64, 1, 8, 8))  # in train mode: now it has statistics
    save_file(trained.state_dict(), tmp_path / "net.safetensors")
    assert told(*typed, "--weights", tmp_path / "net.safetensors")["norm_stats"] == "running"


def test_the_constants_of_the_theory_reach_the_bounds(folder: Path) -> None:
    typed = words("--keep", 0.5, "--method", "sipp-det", "--dry-run")
    usual, other = told(*typed), told(*typed, "--c-constant", 6, "--k-constant", 2)
    for one, two in zip(usual["layers"], other["layers"]):
        assert two["eps"] == pytest.approx(2 * one["eps"])  # T5: eps is C times a sum
    refused(run(*typed, "--k-constant", -1), "--k-constant -1.0")


# --- one small file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", ["fp32", "lossless", "bf16", "int8"])
def test_a_small_file_with_a_certificate_about_the_values_in_it(values: str, folder: Path) -> None:
    typed = words("--weights", "w.safetensors", "--keep", 0.5, "--repair", "--holdout", "new.npz", "--values", values)
    found = told(*typed, "--out", "net.safetensors")
    contents = sipp.inspect("net.safetensors")
    assert isinstance(contents, sipp.results.SavedFile)
    assert contents.certificate_about == "stored values" and contents.precision == values
    assert hashing.of_model(sipp.load("net.safetensors", into=mlp())) == found["certificate"]["pruned_hash"]
    assert found["written"] == {"net.safetensors": contents.n_bytes}
    said = run(*typed, "--out", "net.safetensors", "--force").stdout
    is_exact = values in ("fp32", "lossless")
    assert ("about the stored values" in said) == (f"{values} changed weights in 2 of 4 tensors" in said) != is_exact


def test_a_pattern(folder: Path) -> None:
    prune("--pattern", "2:4", "--method", "magnitude", "--out", "net.safetensors")
    said = run("inspect", "net.safetensors").stdout
    assert "2:4 along every row" in said and f"{16 * 4 + 3 * 8} of" in said  # fan-in 6: a group of 4, and one of 2
    refused(prune("--pattern", "4:2"), "--pattern", "is not a pattern")


# --- what cannot be meant, and first mistakes: told before any work ---------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (["--keep", 0.5, "--epsilon", 0.1], "--keep and --epsilon cannot be combined"),
        (["--pattern", "2:4", "--keep", 0.5], "cannot be combined"),
        ([], "no goal given"),
        (["--keep", 0.5, "--part", "x"], "--part has no effect without --holdout or --epsilon"),
        (["--keep", 0.5, "--share", 0.1], "--share has no effect without --holdout"),
        (["--epsilon", 0.5], "is certified on inputs that the pruning has not seen"),
        ([*TO, "--no-statements"], "--no-statements has no effect with --epsilon"),
        ([*TO, "--c-constant", 6], "--c-constant has no effect with --epsilon"),
        (["--keep", 0.5, "--values", "int8"], "--values int8 is for one small file"),
        (
            ["--epsilon", 0.5, "--holdout", "new.npz", "--values", "bf16", "--out", "n.safetensors"],
            "certifies the values before rounding",
        ),
        (["--keep", 0.5, "--holdout", "data.npy"], "these are the inputs of --data"),
        (["--keep", 0.5, "--method", "magnitud"], "did you mean 'magnitude'"),
    ],
)
def test_what_cannot_be_meant_is_refused(change: list[object], what: str, folder: Path, passes: list[int]) -> None:
    before = files_in(folder)
    done = prune(*change)
    assert done.returncode == 2 and what in three_lines(done.stderr)[0], done.stderr
    assert files_in(folder) == before and sum(passes) < N_POINTS


def test_first_mistakes_are_told_with_what_to_type_instead(folder: Path) -> None:
    assert "--max-accuracy-drop 0.02 is two percentage points" in refused(
        prune("--max-accuracy-drop", 2, "--holdout", "new.npz"), "--model"
    )
    done = prune("--max-accuracy-drop", 0.9, "--holdout", "new.npz", "--share", 0.05)
    assert done.returncode == 2 and "an accuracy drop leaves none out" in done.stderr
    assert "check the name" in refused(prune("--keep", 0.5, "--weights", "raeder.pt"), "--weights", "does not exist")
    Path("rows.py").write_text("")
    assert "rows.py:FUNCTION" in refused(run(*words("--keep", 0.5, "--dry-run", model="rows.py")), "--model")
    assert "row.py" in refused(run(*words("--keep", 0.5, "--dry-run", model="row:reader")), "--model", "no module")
    Path("reads.py").write_text("import absent_package\n")
    refused(run(*words("--keep", 0.5, "--dry-run", model="reads:net")), "--model", "No module named 'absent_package'")


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_half(
    forced: bool, call: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forced:
        assert prune("--keep", 0.5).returncode == 0
    before = files_in(folder)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, full)
        done = prune("--keep", 0.2, *(["--force"] if forced else []))
    assert done.returncode == 2 and "No space left" in done.stderr
    assert files_in(folder) in (before, before | {"net": b""})  # the new folder is empty
