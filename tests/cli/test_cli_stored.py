"""A stored network: `inspect`, `export`, `shrink`, `bench` and `report`, from a folder or a small file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import Done, files_in, refused, run, told
from safetensors.torch import load_file, save_file

import sipp
from sipp.results import Bench, SavedFile, from_json

NET = ["--model", "cli_zoo:mlp"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs, dense weights, and what `sipp prune` makes of them, as a file and as a folder."""
    base = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)
    for name, n in (("data", 200), ("holdout", 200)):
        np.save(base / f"{name}.npy", rng.normal(size=(n, 6)).astype(np.float32))
    save_file(mlp().state_dict(), base / "w.safetensors")
    for out in ("net.safetensors", "net"):
        assert prune(base, "--out", base / out).returncode == 0
    return base


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def prune(folder: Path, *more: object) -> Done:
    net = [*NET, "--weights", folder / "w.safetensors", "--data", folder / "data.npy"]
    return run("prune", *net, "--keep", 0.5, "--repair", "--holdout", folder / "holdout.npy", *more)


def test_inspect_shows_what_is_in_a_file_and_in_a_folder(folder: Path) -> None:
    done, contents = run("inspect", "net.safetensors"), sipp.inspect("net.safetensors")
    assert isinstance(contents, SavedFile) and done.stdout == f"{contents}\n"
    found = told("inspect", "net.safetensors")
    assert found["n_bytes"] == contents.n_bytes and found["certificate"]["verdict"] == "certified"
    assert [one["names"] for one in found["tensors"]] == [list(one.names) for one in contents.tensors]
    assert "With 95 % confidence" in " ".join(run("inspect", "net").stdout.split())
    refused(run("inspect", "w.safetensors"), "FILE", "is not a file from sipp.save")
    refused(run("inspect", "absent"), "FILE", "is not a file")


def test_export_gives_the_network_back(folder: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    out = tmp_path / "net.onnx"
    words = ["export", "net.safetensors", "-o", out, *NET]
    found = told(*words, "--data", "data.npy")
    assert found["kind"] == "export" and found["to"] == "onnx" and found["n_bytes"] == out.stat().st_size
    net, x = mlp(), torch.ones(5, 6)
    net.load_state_dict(sipp.load("net.safetensors"))
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(made), net(x).detach())
    sparse = ["-o", tmp_path / "sparse.onnx", *NET, "--data", "data.npy", "--sparse"]
    assert "n_sparse" in told("export", "net.safetensors", *sparse)


def test_a_folder_becomes_the_small_file_with_the_command_that_prune_names(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "small.safetensors"
    said = " ".join(prune(folder, "--out", tmp_path / "net").stdout.split())
    command = f"sipp export {tmp_path / 'net'} --model cli_zoo:mlp --out small.safetensors"
    assert f"for a small file: {command}" in said
    told("export", "net", *NET, "--out", out)
    assert told("bench", "net", *NET, "--data", "data.npy")["file_bytes"] == sipp.inspect(out).n_bytes
    state, found = load_file("net/model.safetensors"), sipp.load(out)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    contents = sipp.inspect(out)
    assert isinstance(contents, SavedFile) and contents.certificate_about == "stored values"
    told("export", "net", *NET, "--out", tmp_path / "bf16.safetensors", "--values", "bf16")
    assert (tmp_path / "bf16.safetensors").stat().st_size < out.stat().st_size


@pytest.mark.parametrize(
    ("change", "where", "what"),
    [
        (["-o", "x.onnx", *NET], "FILE", "needs inputs to run on"),
        (["-o", "x.onnx", "--data", "data.npy"], "FILE", "cannot be built from this file alone"),
        (["-o", "absent/x.onnx", *NET], "--out", "is not a folder"),
        (["-o", "x", *NET, "--data", "data.npy"], "--data", "has no effect on x"),
        (["-o", "x.safetensors", *NET, "--shard", "5GB"], "--shard", "has no effect"),
        (["-o", "x", *NET], "FILE", "has no save_pretrained"),
        (["-o", "x.safetensors", "--model", "cli_zoo:grouped"], "FILE", "does not fit"),
        (["-o", "net.safetensors", *NET], "--out", "what FILE reads"),
        (["-o", "w.safetensors", *NET], "--out", "exists"),
    ],
)
def test_an_export_that_cannot_be(change: list[object], where: str, what: str, folder: Path) -> None:
    before = files_in(folder)
    refused(run("export", "net.safetensors", *change), where, what)
    assert files_in(folder) == before


def test_shrink_gives_a_smaller_network_with_its_certificate(folder: Path, tmp_path: Path) -> None:
    net, points = mlp(), torch.from_numpy(np.load("holdout.npy"))
    net[2].weight.data[:, 5:] = 0  # type: ignore[index,union-attr,operator]
    certificate = sipp.certify(mlp(), net, points, progress=False)
    sipp.save(net, tmp_path / "net", certificate=certificate)
    words = ["shrink", tmp_path / "net", *NET, "--data", "data.npy", "--out"]
    found = told(*words, tmp_path / "small.pt")
    assert [layer["after"] for layer in found["layers"]] == [[5, 6], [3, 5]] and found["n_parameters"] == 53
    assert found["certificate"]["sentence"] == certificate.sentence
    small = torch.load(tmp_path / "small.pt", weights_only=False)
    torch.testing.assert_close(small(points), net(points))
    load = f"torch.load('{tmp_path / 'small.pt'}', weights_only=False)"
    assert load in run(*words, tmp_path / "small.pt", "--force").stdout
    asked = ["eval", *NET, "--dense", "w.safetensors", "--pruned", tmp_path / "small.pt", "--data", "data.npy"]
    assert f"sipp.evaluate(dense, {load}, data)" in refused(run(*asked), "--pruned", "contains more than tensors")
    refused(run(*words, tmp_path / "small.npy"), "--out", "ends in none of")
    budget = told(
        "shrink", "net.safetensors", *NET, "--data", "data.npy", "--multiply-adds", 0.6, "--out", tmp_path / "b.pt"
    )
    assert budget["multiply_adds"] <= 0.6 * budget["multiply_adds_before"]
    assert sipp.inspect("net.safetensors").certificate is not None and budget["certificate"] is None


def test_bench_tells_size_and_speed_and_its_record_is_shown_beside_the_network(folder: Path, tmp_path: Path) -> None:
    words = ["bench", "net.safetensors", *NET, "--data", "data.npy", "--batch-size", 20]
    record = tmp_path / "bench.json"
    done = run(*words, "--out", record)
    values = json.loads(record.read_text())
    found, contents = from_json(Bench, values, record), sipp.inspect("net.safetensors")
    assert isinstance(contents, SavedFile) and contents.certificate is not None
    assert found.sentence in " ".join(done.stdout.split()) and "PyTorch running the same pruned network" in done.stdout
    assert (found.file_bytes, found.dense_bytes) == (contents.n_bytes, contents.dense_bytes)
    assert [run.n_inputs for run in found.runs] == [1, 20] and max(run.off_by for run in found.runs) < 1e-5
    assert found.pruned_hash == contents.certificate.pruned_hash
    refused(run(*words, "--out", record), "--out", "exists")


def test_what_lies_beside_a_network_is_on_its_page_until_the_network_changes(folder: Path, tmp_path: Path) -> None:
    net, page = tmp_path / "net", tmp_path / "page.html"
    prune(folder, "--out", net)
    both = [*NET, "--dense", "w.safetensors", "--pruned", net]
    told("bench", net, *NET, "--data", "data.npy", "--batch-size", 4, "--out", net / "bench.json")
    told("eval", *both, "--data", "holdout.npy", "--out", net / "eval.json")
    np.save(tmp_path / "other.npy", np.random.default_rng(9).normal(size=(90, 6)).astype(np.float32))
    told("certify", *both, "--holdout", tmp_path / "other.npy", "--out", net / "c.json")
    made = told("report", net, "--out", page)
    assert made["of"] == ["net"] and made["marked"] == []
    text = page.read_text()
    assert "Size and speed" in text and "4 inputs per call" in text and "Certificate of the output (c.json)" in text
    prune(folder, "--out", net, "--force", "--seed", 5, "--points", 100)  # another network now
    said = run("report", net, "--out", page, "--force").stdout
    for name in ("bench.json", "eval.json", "c.json"):
        assert f"marked: net: {name} is about other networks and is not shown." in said
    assert "Size and speed" not in page.read_text()


def test_a_report_of_a_folder_that_is_not_there_names_it(tmp_path: Path) -> None:
    refused(run("report", tmp_path / "no", "--out", tmp_path / "p.html"), "sipp report", "there is no such folder")
