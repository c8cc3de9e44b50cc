"""`sipp prune --out NAME.safetensors`, then `inspect`, `export`, `bench` and `report`: one flow, one network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import mlp
from commandline import Done, files_in, refused, run
from safetensors.torch import load_file, save_file

import sipp
from sipp.files import read_json
from sipp.report.summary import claim_of
from sipp.results import hashing, words
from sipp.results.bench import Bench
from sipp.results.jsonio import from_json
from sipp.runtime import timing
from sipp.verbs.certify import certify_accuracy
from sipp_lab.nets import build
from sipp_lab.page import read_results, render


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Points, dense weights of two networks, and what `sipp prune` makes of them."""
    base = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)
    for name, n in (("data", 200), ("holdout", 200)):
        np.save(base / f"{name}.npy", rng.normal(size=(n, 6)).astype(np.float32))
    save_file(mlp().state_dict(), base / "w.safetensors")
    done = prune(base, "--out", base / "net.sipp.safetensors")
    assert done.returncode == 0, done.stderr
    digits = sipp.prune(build("digits-cnn").eval(), None, keep=0.3, method="magnitude")
    sipp.save(digits, base / "digits.sipp.safetensors")
    return base


def prune(folder: Path, *more: object) -> Done:
    net = ["--model", "cli_zoo:mlp", "--weights", folder / "w.safetensors", "--data", folder / "data.npy"]
    return run("prune", *net, "--keep", 0.5, "--repair", "--holdout", folder / "holdout.npy", *more)


def test_prune_writes_one_small_file_with_its_certificate(folder: Path, tmp_path: Path) -> None:
    contents = sipp.inspect(folder / "net.sipp.safetensors")
    assert contents.certificate_about == "stored values" and contents.statements
    assert contents.statements["pruned"].startswith("sipp-blend: 72 of ")
    out = tmp_path / "again.safetensors"
    assert json.loads(prune(folder, "--out", out, "--json").stdout)["written"] == {str(out): out.stat().st_size}
    assert sipp.inspect(out).sha256 == contents.sha256
    before = files_in(tmp_path)
    refused(prune(folder, "--out", out), "--out", "exists")
    assert files_in(tmp_path) == before
    assert prune(folder, "--out", out, "--force").returncode == 0
    before = files_in(tmp_path)
    refused(prune(folder, "--out", folder / "w.safetensors", "--force"), "--out", "what --weights reads")
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("values", ["lossless", "fp16", "bf16", "int8"])
def test_the_certificate_is_about_the_values_in_the_file(values: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    found = json.loads(prune(folder, "--out", out, "--values", values, "--json").stdout)
    contents = sipp.inspect(out)
    assert contents.certificate_about == "stored values" and contents.precision == values
    stored = sipp.load(out, into=mlp())
    assert hashing.of_model(stored) == found["certificate"]["pruned_hash"]
    moved = max(one.largest_change for one in contents.tensors)
    assert max(one["largest_change"] for one in found["file"]["tensors"]) == moved and (moved > 0) == (
        values != "lossless"
    )
    told = prune(folder, "--out", out, "--values", values, "--force").stdout
    assert ("about the stored values" in told) == (f"{values} changed weights in 2 of 4 tensors" in told) == bool(moved)


def test_values_options_that_cannot_apply_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(prune(folder, "--out", tmp_path / "net", "--values", "int8"), "sipp prune", "is for one small file")
    net = ["--model", "cli_zoo:mlp", "--weights", folder / "w.safetensors", "--data", folder / "data.npy"]
    for goal in ("--epsilon", "--max-accuracy-drop"):
        words = ["prune", *net, goal, 0.5, "--holdout", folder / "holdout.npy", "--out", tmp_path / "n.safetensors"]
        refused(run(*words, "--values", "bf16"), "sipp prune", "before rounding")
    save_file({k: 1e6 * v for k, v in mlp().state_dict().items()}, tmp_path / "large.safetensors")
    words = ["prune", "--model", "cli_zoo:mlp", "--method", "magnitude", "--keep", 0.5, "--values", "fp16"]
    done = run(*words, "--weights", tmp_path / "large.safetensors", "--out", tmp_path / "n.safetensors")
    refused(done, "--out", "too large for fp16")
    assert not (tmp_path / "n.safetensors").exists()


def test_every_command_takes_a_folder_that_a_program_saved(folder: Path, tmp_path: Path) -> None:
    net = mlp().eval()
    net.load_state_dict(load_file(folder / "w.safetensors"))
    saved = sipp.save_folder(sipp.prune(net, None, keep=0.5, method="magnitude"), tmp_path / "net")
    words = ["--model", "cli_zoo:mlp", "--dense", folder / "w.safetensors", "--pruned", saved]
    assert run("eval", *words, "--data", folder / "holdout.npy").returncode == 0
    out = saved / "certificate.json"
    assert run("certify", *words, "--holdout", folder / "holdout.npy", "--out", out).returncode == 0
    bench = ["bench", saved, "--model", "cli_zoo:mlp", "--data", folder / "data.npy", "--batch-size", 1]
    timed = run(*bench)
    assert timed.returncode == 0 and "as a small file" in " ".join(timed.stdout.split())
    found = json.loads(run("report", saved, "--out", tmp_path / "page.html", "--json").stdout)
    assert found["of"] == ["net"] and found["marked"] == []


def test_weights_may_come_from_a_small_file(folder: Path, tmp_path: Path) -> None:
    small = tmp_path / "net.safetensors"
    words = [
        "prune",
        "--model",
        "cli_zoo:mlp",
        "--method",
        "magnitude",
        "--keep",
        0.5,
        "--weights",
        folder / "w.safetensors",
    ]
    assert run(*words, "--out", small).returncode == 0
    pair = ["--model", "cli_zoo:mlp", "--dense", folder / "w.safetensors", "--pruned", small]
    assert run("eval", *pair, "--data", folder / "holdout.npy").returncode == 0
    certificate = tmp_path / "c.json"
    assert run("certify", *pair, "--holdout", folder / "holdout.npy", "--out", certificate).returncode == 0
    stored = model_hash_of(small)
    assert json.loads(certificate.read_text())["pruned_hash"] == stored


def model_hash_of(path: Path) -> str:
    return hashing.of_model(sipp.load(path, into=mlp().eval()))


def test_a_pattern_from_the_command_line(folder: Path, tmp_path: Path) -> None:
    words = ["prune", "--model", "cli_zoo:mlp", "--method", "magnitude", "--out", tmp_path / "net.safetensors"]
    assert run(*words, "--pattern", "2:4").returncode == 0
    found = json.loads(run("inspect", tmp_path / "net.safetensors", "--json").stdout)
    kept = 16 * 4 + 3 * 8  # fan-in 6: a group of 4, and one of 2
    assert f"{kept} of" in found["statements"]["pruned"] and "2:4 along every row" in found["statements"]["pruned"]
    refused(run(*words, "--pattern", "2:4", "--keep", 0.5, "--force"), "sipp prune", "exclude each other")
    refused(run(*words, "--pattern", "4:2", "--force"), "--pattern", "is not a pattern")
    rand = ["prune", "--model", "cli_zoo:mlp", "--data", folder / "data.npy", "--method", "sipp-rand", "--dry-run"]
    refused(run(*rand, "--pattern", "2:4"), "--model", "draws weights")


def test_inspect_shows_what_is_in_a_file(folder: Path) -> None:
    done = run("inspect", folder / "digits.sipp.safetensors")
    assert done.returncode == 0
    contents = sipp.inspect(folder / "digits.sipp.safetensors")
    assert str(contents) in done.stdout
    assert "bytes by entropy" in contents.sheet.tables[0].columns
    found = json.loads(run("inspect", folder / "digits.sipp.safetensors", "--json").stdout)
    assert found["n_bytes"] == contents.n_bytes
    assert [one["names"] for one in found["tensors"]] == [list(one.names) for one in contents.tensors]
    assert found["bound_bytes"] == pytest.approx(contents.bound_bytes) and found["certificate"] is None
    own = json.loads(run("inspect", folder / "net.sipp.safetensors", "--json").stdout)
    assert own["certificate"]["verdict"] == "certified"
    refused(run("inspect", folder / "w.safetensors"), "FILE", "is not a file from sipp.save")
    refused(run("inspect", folder / "absent"), "FILE", "is not a file")


def test_export_gives_the_network_back(folder: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")
    own, out = ["--model", "cli_zoo:mlp", "--data", folder / "data.npy"], tmp_path / "net.onnx"
    words = ["export", folder / "net.sipp.safetensors", "-o", out]
    done = run(*words, *own, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["n_bytes"] == out.stat().st_size and found["to"] == "onnx"
    assert found["n_inputs"] is None
    net, x = mlp(), torch.ones(5, 6)
    net.load_state_dict(sipp.load(folder / "net.sipp.safetensors"))
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    made = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(made), net(x).detach())
    before = files_in(tmp_path)
    refused(run(*words, *own), "--out", "exists")
    refused(run(*words[:-1], tmp_path / "new.onnx", *own[2:]), "FILE", "does not say how that is built")
    refused(run(*words[:-1], tmp_path / "absent" / "x.onnx", *own), "--out", "is not a folder")
    refused(run(*words[:-1], tmp_path / "new", *own), "--data", "does nothing for new")
    assert files_in(tmp_path) == before


def test_a_folder_becomes_the_small_file_with_one_command(folder: Path, tmp_path: Path) -> None:
    net, out = tmp_path / "net", tmp_path / "small.safetensors"
    done = prune(folder, "--out", net)
    assert f"sipp export {net} --model cli_zoo:mlp --out small.safetensors makes a small file" in " ".join(
        done.stdout.split()
    )
    words = ["export", net, "--model", "cli_zoo:mlp", "--out"]
    done = run(*words, out, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["n_bytes"] == out.stat().st_size
    state, found = load_file(net / "model.safetensors"), sipp.load(out)
    assert all(torch.equal(found[name], value) for name, value in state.items())
    assert sipp.inspect(out).certificate_about == "stored values"
    assert run(*words, tmp_path / "bf16.safetensors", "--values", "bf16").returncode == 0
    assert sipp.inspect(tmp_path / "bf16.safetensors").n_bytes < out.stat().st_size
    assert sipp.inspect(tmp_path / "bf16.safetensors").certificate_about != "stored values"
    refused(run(*words, tmp_path / "x.safetensors", "--shard", "5GB"), "--shard", "does nothing")
    refused(run(*words, out), "--out", "exists")


def test_export_that_cannot_be(folder: Path, tmp_path: Path) -> None:
    words = ["export", folder / "net.sipp.safetensors", "--model", "cli_zoo:mlp", "-o", tmp_path / "x"]
    refused(run(*words, "-o", tmp_path / "x.onnx"), "FILE", "needs inputs to run on")
    refused(run(*words, "--data", folder / "data.npy"), "--data", "does nothing")
    refused(run(*words), "FILE", "has no save_pretrained")
    refused(run(*words, "--model", "cli_zoo:grouped"), "FILE", "does not fit")
    assert not list(tmp_path.iterdir())


def test_shrink_gives_a_smaller_network_with_its_certificate(folder: Path, tmp_path: Path) -> None:
    net = mlp()
    net[2].weight.data[:, 5:] = 0
    points = torch.from_numpy(np.load(folder / "holdout.npy"))
    certificate = sipp.certify(mlp(), net, points, progress=False)
    sipp.save(net, tmp_path / "net", certificate=certificate)
    words = ["shrink", tmp_path / "net", "--model", "cli_zoo:mlp", "--data", folder / "data.npy", "--out"]
    done = run(*words, tmp_path / "small.pt", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [layer["after"] for layer in found["layers"]] == [[5, 6], [3, 5]] and found["n_parameters"] == 53
    assert found["certificate"]["sentence"] == certificate.sentence
    small = torch.load(tmp_path / "small.pt", weights_only=False)
    torch.testing.assert_close(small(points), net(points))
    done = run(*words, tmp_path / "small.onnx")
    assert done.returncode == 0 and "53 (3.08 x fewer)" in done.stdout and "computes the same" in done.stdout
    assert (tmp_path / "small.onnx").is_file()
    refused(run(*words, tmp_path / "small.pt"), "--out", "exists")
    refused(run(*words, tmp_path / "small.npy"), "--out", "ends in none of")


def test_shrink_within_a_budget(folder: Path, tmp_path: Path) -> None:
    sipp.save(mlp(), tmp_path / "net.sipp.safetensors")
    net = ["--model", "cli_zoo:mlp", "--data", folder / "data.npy"]
    words = ["shrink", tmp_path / "net.sipp.safetensors", *net, "--out"]
    done = run(*words, tmp_path / "small.pt", "--multiply-adds", 0.6, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["multiply_adds"] <= 0.6 * found["multiply_adds_before"] and found["chosen"]["n_fit"] > 36
    refused(run(*words, tmp_path / "other.pt", "--multiply-adds", 0.01), "", "channels that can go leave")


def test_bench_ends_with_three_numbers(folder: Path, tmp_path: Path) -> None:
    text = ["bench", folder / "net.sipp.safetensors", "--model", "cli_zoo:mlp", "--data", folder / "data.npy"]
    threads = torch.get_num_threads()
    record = tmp_path / "bench.json"
    done = run(*text, "--batch-size", 20, "--out", record)
    assert done.returncode == 0, done.stderr
    found = from_json(Bench, read_json(record), record)
    assert found.sentence in " ".join(done.stdout.split())
    contents = sipp.inspect(folder / "net.sipp.safetensors")
    assert contents.certificate is not None
    assert contents.n_bytes > contents.dense_bytes  # a tiny network: its certificate alone is larger
    grew = f"{contents.n_bytes / contents.dense_bytes:.2f} x larger: in a network this small, names and records take"
    assert found.sentence.startswith(grew) and grew in str(contents) and "smaller" not in found.sentence
    assert found.sentence.endswith(
        f"; 20 inputs per call, {words.counted(threads, 'thread')}: {found.runs[-1].faster.words}"
    )
    assert "PyTorch running the same pruned network" in done.stdout
    assert "ms torch" in found.sheet.tables[0].columns  # dense: before pruning, and nothing else
    assert (found.bytes.file, found.bytes.dense) == (contents.n_bytes, contents.dense_bytes)
    assert [run.n_inputs for run in found.runs] == [1, 20] and max(run.off_by for run in found.runs) < 1e-5
    assert [round(step.keep or 0, 2) for step in found.steps] and torch.get_num_threads() == threads
    assert len(found.steps) == 2 and found.pruned_hash == contents.certificate.pruned_hash
    refused(run(*text, "--out", record), "--out", "exists")
    refused(run(*text, "--out", folder / "net.sipp.safetensors", "--force"), "--out", "what FILE reads")
    found_json = json.loads(run(*text, "--batch-size", 1, "--json").stdout)
    assert found_json["kind"] == "file bench" and [one["n_inputs"] for one in found_json["runs"]] == [1]


def test_what_is_certified_of_tokens_is_not_told_as_an_error_of_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9))
    windows = torch.randint(0, 9, (200, 6))
    pruned = sipp.prune(net, None, keep=0.5, method="magnitude")
    words = []
    for measure in ("output", "kl", "next-token"):
        certificate = sipp.certify(net, pruned, windows, measure=measure, progress=False)
        words.append(claim_of(certificate))
    assert "output" in words[0] and "sequences" not in words[0]
    assert "nats of the dense network's (KL" in words[1] and "of new sequences" in words[1]
    assert "the pruned network predicts a different next token at no more" in words[2]
    said = claim_of(certify_accuracy(net, pruned, windows, progress=False))
    assert said.startswith("On new inputs, pruning lowers the accuracy of the next token by at most ")


def test_where_torch_runs_all_of_it_nothing_is_faster(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If torch runs every layer, no speed-up is shown, whatever was timed."""
    monkeypatch.setattr(timing, "dense_time", lambda function, trials=1: 1e3)  # every step by itself wins,
    monkeypatch.setattr(timing, "race", lambda fast, dense: ([2.0], [1.0]))  # and all together lose
    net = tmp_path / "net"
    assert prune(folder, "--out", net).returncode == 0
    words = ["bench", net, "--model", "cli_zoo:mlp", "--data", folder / "data.npy", "--batch-size", 4]
    done = run(*words, "--out", net / "bench.json")
    assert "run by torch: nothing gained" in " ".join(done.stdout.split())
    found = from_json(Bench, read_json(net / "bench.json"), net / "bench.json")
    assert {(step.kernel, step.ratio, step.n_bytes == step.n_dense_bytes) for step in found.steps} == {
        ("torch", None, True)
    }
    page = render(read_results([net]))
    assert "run by torch: nothing gained" in page and "x faster" not in page


def test_the_page_shows_a_record_that_lies_beside_its_network(folder: Path, tmp_path: Path) -> None:
    net = tmp_path / "net"
    assert prune(folder, "--out", net).returncode == 0
    assert "Size and speed" not in render(read_results([net]))
    words = ["bench", net, "--model", "cli_zoo:mlp", "--data", folder / "data.npy", "--batch-size", 4]
    done = run(*words, "--out", net / "bench.json")
    assert done.returncode == 0, done.stderr
    page = render(read_results([net]))
    found = from_json(Bench, read_json(net / "bench.json"), net / "bench.json")
    assert "Size and speed" in page and f"{found.bytes.file:,} bytes" in page and "4 inputs per call" in page
    assert prune(folder, "--out", net, "--force", "--seed", 5, "--points", 100).returncode == 0  # another network now
    (result,) = read_results([net])
    assert result.notes == ("bench.json is a benchmark for other networks and is not shown.",)
    assert "Size and speed" not in render([result])
    values = json.loads((net / "bench.json").read_text())
    (net / "bench.json").write_text(json.dumps(values | {"step_inputs": 1000}))
    (result,) = read_results([net])
    assert result.notes == ("bench.json cannot be read as a benchmark.",) and result.bench is None
