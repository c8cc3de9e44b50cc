"""`sipp prune`: what it writes and prints, for every kind of network and of data."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_zoo import bert, gpt2, grouped, mlp
from commandline import files_in, run, three_lines
from PIL import Image
from safetensors.torch import load_file, save_file

import sipp
from sipp import files
from sipp.cli import data_option as points
from sipp.results import hashing
from sipp_lab.nets import build

N_POINTS = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    np.savez(folder / "vectors.npz", inputs=rng.normal(size=(N_POINTS, 6)), labels=rng.integers(0, 3, N_POINTS))
    np.save(folder / "vectors.npy", rng.normal(size=(N_POINTS, 6)).astype(np.float32))
    np.savez(folder / "fresh.npz", inputs=rng.normal(size=(400, 6)), labels=rng.integers(0, 3, 400))
    np.save(folder / "images.npy", rng.normal(size=(N_POINTS, 4, 6, 6)).astype(np.float32))
    tokens = rng.integers(0, 50, (N_POINTS, 8))
    np.savez(folder / "tokens.npz", input_ids=tokens, attention_mask=np.ones_like(tokens))
    sides = {"left": torch.randn(N_POINTS, 6), "right": torch.randn(N_POINTS, 4)}
    save_file(sides, folder / "sides.safetensors")
    return folder


def prune(model: str, data: object, *words: object) -> dict[str, object]:
    """The record of a command that must succeed."""
    done = run("prune", "--model", model, "--data", data, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_folder(folder: Path, dense: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a pruned network: the dense one's names and shapes, and as many zeros as its report says."""
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", "report.json"]
    report = json.loads((folder / "report.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in dense.state_dict().items()}
    for layer in report["layers"]:
        assert int((tensors[layer["name"]] != 0).sum()) == layer["kept"]
        assert layer["n_weights"] == tensors[layer["name"]].numel() == layer["n_rows"] * layer["fan_in"]
    assert report["kept"] == sum(layer["kept"] for layer in report["layers"])
    return tensors


def test_the_folder_holds_what_sipp_prune_gives(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    record = prune("cli_zoo:mlp", data / "vectors.npy", "--keep", 0.4, "--out", out)
    tensors = check_folder(out, mlp())
    inputs = torch.from_numpy(np.load(data / "vectors.npy"))
    expected = sipp.prune(mlp().eval(), list(inputs.split(32)), keep=0.4)
    for name, value in expected.model.state_dict().items():
        assert torch.equal(tensors[name], value), name
    report = json.loads((out / "report.json").read_text())
    written = record.pop("written")
    assert len(report.pop("check")) == 64
    assert record == report and list(written) == [str(out / "model.safetensors"), str(out / "report.json")]
    assert (report["kind"], report["keep"], report["asked"]["keep"]) == ("pruned", expected.keep, 0.4)
    assert [layer["eps"] for layer in report["layers"]] == [layer.eps for layer in expected.layers]
    assert (report["guarantee"]["sentence"], report["bound"]["epsilon"]) == (
        expected.guarantee.sentence,
        expected.bound.epsilon,
    )
    assert report["certificate"] is None and report["data"]["n_inputs"] == N_POINTS
    assert [path.name for path in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("model", "file", "build_it"),
    [
        ("cli_zoo:grouped", "images.npy", grouped),
        ("lstm", "digits", lambda: build("lstm")),
        ("cli_zoo:bert", "tokens.npz", bert),
        ("cli_zoo:gpt2", "tokens.npz", gpt2),
    ],
)
def test_networks_of_every_kind(model: str, file: str, build_it: object, data: Path, tmp_path: Path) -> None:
    if "bert" in model or "gpt2" in model:
        pytest.importorskip("transformers", reason="the networks of transformers need it")
    source = file if file == "digits" else data / file
    record = prune(model, source, "--keep", 0.5, "--out", tmp_path / "out")
    assert record["keep"] == pytest.approx(0.5, abs=1e-3) and "the theory assumes" in str(record["guarantee"])
    check_folder(tmp_path / "out", build_it())  # type: ignore[operator]
    if model == "cli_zoo:gpt2":
        kinds = {layer["layer_type"] for layer in record["layers"]}  # type: ignore[attr-defined]
        assert kinds == {"Conv1D"}  # the head is tied to the embedding


def test_tied_weights_load_with_and_without_their_second_name(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the networks of transformers need it")
    state = {name: tensor.clone() for name, tensor in gpt2().state_dict().items()}
    save_file(state, tmp_path / "all.safetensors")
    del state["lm_head.weight"]
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, tmp_path / "some.safetensors")
    hashes = {
        prune("cli_zoo:gpt2", data / "tokens.npz", "--keep", 0.5, "--dry-run", "--weights", tmp_path / name)[
            "dense_hash"
        ]
        for name in ("all.safetensors", "some.safetensors")
    }
    assert hashes == {hashing.of_model(gpt2())}


def test_a_dry_run_prints_the_table_and_writes_nothing(data: Path, tmp_path: Path) -> None:
    positive = tmp_path / "positive.npy"  # inputs of one sign: small bounds
    np.save(positive, np.random.default_rng(0).random((400, 6)))
    words = ["--keep", 130 / 144, "--method", "sipp-det", "--dry-run", "--out", tmp_path / "out"]
    done = run("prune", "--model", "cli_zoo:mlp", "--data", positive, *words)
    assert done.returncode == 0 and [Path(name).name for name in files_in(tmp_path)] == [positive.name]
    table = {line.split()[0]: line.split() for line in done.stdout.splitlines() if ".weight" in line}
    record = prune("cli_zoo:mlp", positive, *words)
    inputs = torch.from_numpy(np.load(positive)).float()
    pruned = sipp.prune(mlp().eval(), inputs, keep=130 / 144, method="sipp-det", progress=False)
    for layer, own in zip(record["layers"], pruned.layers, strict=True):  # type: ignore[call-overload]
        assert table[layer["name"]][3:5] == [str(layer["kept"]), f"{layer['keep']:.2%}"]
        assert (layer["kept"], layer["eps"], layer["bound"]) == (own.kept, own.eps, own.bound) and own.eps > 0
    assert "eps" not in done.stdout and "contradicts the theory's assumption" in done.stdout  # so the table has none
    assert "nothing was written" in done.stdout and record["written"] == {}
    assert "float64 read as float32" in done.stdout
    few = run("prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npz", "--keep", 0.2, "--dry-run")
    assert "no useful bound for this network" in few.stdout and "eps" not in few.stdout and "--json" in few.stdout


def test_a_method_that_needs_data_says_so_without(tmp_path: Path) -> None:
    done = run("prune", "--model", "digits-cnn", "--keep", 0.3, "--dry-run")
    assert done.returncode == 2 and "needs data" in three_lines(done.stderr)[0] and not files_in(tmp_path)
    noise = run("prune", "--model", "digits-cnn", "--data", "random:16x1x8x8", "--keep", 0.3, "--dry-run")
    assert noise.returncode == 0 and "not about yours" in noise.stdout


@pytest.mark.parametrize("method", ["sipp-det", "sipp-rand", "sipp-simple", "magnitude", "snip", "random"])
def test_every_method(method: str, data: Path) -> None:
    record = prune("cli_zoo:mlp", data / "vectors.npz", "--keep", 50 / 144, "--method", method, "--dry-run")
    assert (record["method"], record["kept"]) == (method, 50)
    assert record["guarantee"] is not None and record["data"] is not None  # also of methods that need no data (T17)


def test_include_and_exclude_choose_layers(data: Path) -> None:
    def names(*words: str) -> list[str]:
        record = prune("cli_zoo:mlp", data / "vectors.npz", "--keep", 0.5, "--dry-run", *words)
        return [layer["name"] for layer in record["layers"]]  # type: ignore[attr-defined]

    assert names("--include", "0*") == ["0.weight"] == names("--exclude", "2")
    assert names("--include", "0", "--include", "2") == ["0.weight", "2.weight"]


def test_named_inputs_and_a_part_of_the_output(data: Path, tmp_path: Path) -> None:
    words = ["--epsilon", 0.5, "--method", "magnitude", "--out", tmp_path / "out"]
    record = prune("cli_zoo:Named", data / "sides.safetensors", *words, "--part", "sum")
    assert record["certificate"]["output"] == "sum"  # type: ignore[index]
    refused = run("prune", "--model", "cli_zoo:Named", "--data", data / "sides.safetensors", *words, "--force")
    assert refused.returncode == 2 and "--part" in three_lines(refused.stderr)[2]


def test_a_tolerance_splits_the_data_into_disjoint_halves(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []
    honest = points.Reader._collect

    def spy(reader: points.Reader, source: points.Source, items: torch.Tensor) -> points.Points:
        seen.append(set(items.tolist()))
        return honest(reader, source, items)

    monkeypatch.setattr(points.Reader, "_collect", spy)
    record = prune("cli_zoo:mlp", data / "vectors.npz", "--epsilon", 0.6, "--method", "magnitude", "--dry-run")
    ours, theirs = seen[-2:]
    assert (record["data"]["n_inputs"], record["holdout"]["n_inputs"]) == (len(ours), len(theirs))  # type: ignore[index]
    assert len(ours) == len(theirs) == N_POINTS // 2 and not ours & theirs
    certificate = record["certificate"]
    assert certificate["verdict"] == "certified" and certificate["calibration_checked"]  # type: ignore[index]
    assert record["keep"] < 1 and record["path"][0]["passed"]  # type: ignore[index,operator]


def test_a_certificate_of_prune_is_the_one_of_certify(data: Path, tmp_path: Path) -> None:
    out, dense = tmp_path / "out", tmp_path / "dense.safetensors"
    save_file(mlp().state_dict(), dense)
    words = ["--keep", 0.6, "--holdout", data / "fresh.npz", "--weights", dense, "--out", out]
    record = prune("cli_zoo:mlp", data / "vectors.npz", *words)
    done = run(
        "certify", "--model", "cli_zoo:mlp", "--dense", dense, "--pruned", out, "--holdout", data / "fresh.npz",
        "--calibration", data / "vectors.npz", "--json",
    )  # fmt: skip
    assert done.returncode == 0 and record["certificate"].items() <= json.loads(done.stdout).items()
    dry = run("prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npz", *words[:6], "--dry-run")
    assert dry.returncode == 0 and "take other inputs for your next claim" in dry.stdout
    said = " ".join(dry.stdout.split())  # what it costs is what was certified, said once
    assert "what it costs: With 95 % confidence" in said and said.count("With 95 % confidence") == 1
    walked = run(
        "prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npz", "--holdout", data / "fresh.npz",
        "--epsilon", 0.9, "--method", "magnitude", "--dry-run",
    )  # fmt: skip
    assert walked.returncode == 0 and " ".join(walked.stdout.split()).count("With 95 % confidence") == 1
    assert "not known" not in walked.stdout and "what it costs:   see the certificate below" in walked.stdout


def test_sets_give_training_points_to_calibrate_and_test_points_to_certify(data: Path) -> None:
    record = prune("digits-cnn", "digits", "--max-accuracy-drop", 0.5, "--method", "magnitude", "--dry-run")
    assert "of 1,437 training images" in record["data"]["what"]  # type: ignore[index]
    assert record["holdout"]["what"] == "360 test images of digits"  # type: ignore[index]
    few = prune("digits-cnn", "digits", "--keep", 0.5, "--points", 20, "--batchnorm", "running", "--dry-run")
    assert few["data"]["n_inputs"] == 20 and few["guarantee"]["n"] == 15  # type: ignore[index]
    theory = prune("digits-cnn", "digits", "--keep", 0.5, "--batchnorm", "running", "--dry-run")["guarantee"]
    assert theory["n"] >= theory["n_needed"] > 20 and theory["n"] <= theory["n_needed"] + 1  # type: ignore[index,operator]


def test_folders_of_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for place in ("flat", "parts/train/a", "parts/val/a"):
        (tmp_path / place).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(rng.integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(tmp_path / place / f"{i}.png")
    for folder, words in (("flat", "2 images of"), ("parts", "training images")):
        cheap = ("--keep", 0.5, "--method", "magnitude", "--no-statements", "--dry-run")
        words_of = prune("resnet20", tmp_path / folder, *cheap)["data"]
        assert words in words_of["what"]  # type: ignore[index]
    (tmp_path / "flat" / "0.png").write_bytes(b"no image")
    refused = run("prune", "--model", "resnet20", "--data", tmp_path / "flat", "--keep", 0.5, "--dry-run")
    assert refused.returncode == 2 and "0.png" in three_lines(refused.stderr)[0]


def test_a_folder_with_content_is_replaced_only_by_force(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prune("cli_zoo:mlp", data / "vectors.npy", "--keep", 0.5, "--out", out)  # empty: nothing to lose
    (out / "mine.txt").write_text("keep me")
    before = files_in(tmp_path)
    words = ["prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npy", "--keep", 0.3, "--out", out]
    refused = run(*words)
    assert refused.returncode == 2 and "--force" in three_lines(refused.stderr)[2]
    assert files_in(tmp_path) == before
    assert run(*words, "--force").returncode == 0
    after = files_in(tmp_path)
    assert set(after) == set(before) and after["out/mine.txt"] == b"keep me"
    assert json.loads(after["out/report.json"])["asked"]["keep"] == 0.3


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_half(
    forced: bool, call: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npy", "--keep", 0.5, "--out", out]
    if forced:
        assert run(*words).returncode == 0
        words[words.index(0.5)] = 0.2
    before = files_in(tmp_path)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files.os, call, full)
        done = run(*words, *(["--force"] if forced else []))
    assert done.returncode == 2 and "No space left" in done.stderr
    after = files_in(tmp_path)
    assert after == before


def test_a_method_of_others_without_statements(data: Path) -> None:
    words = ["prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npz", "--method", "magnitude", "--dry-run"]
    done = run(*words, "--keep", 0.5, "--no-statements")
    assert done.returncode == 0 and "statements:      none: magnitude needs no sensitivities" in done.stdout
    refused = run(*words, "--epsilon", 0.5, "--no-statements")
    assert refused.returncode == 2 and "--no-statements" in three_lines(refused.stderr)[0]


def test_the_constants_of_the_theory_reach_the_bounds(data: Path) -> None:
    words = ["--keep", 0.5, "--method", "sipp-det", "--dry-run"]
    usual, other = (
        prune("cli_zoo:mlp", data / "vectors.npy", *words, *more)
        for more in ((), ("--c-constant", 6, "--k-constant", 2))
    )
    for one, two in zip(usual["layers"], other["layers"]):  # type: ignore[call-overload]
        assert two["eps"] == pytest.approx(2 * one["eps"])  # T5: eps is C times a sum
    assert (usual["asked"]["c_constant"], other["asked"]["k_constant"]) == (3.0, 2.0)  # type: ignore[index]
    done = run(
        "prune",
        "--model",
        "cli_zoo:mlp",
        "--data",
        data / "vectors.npz",
        "--epsilon",
        1,
        "--c-constant",
        6,
        "--dry-run",
    )
    assert done.returncode == 2 and "--c-constant does nothing with --epsilon" in done.stderr
    done = run("prune", "--model", "cli_zoo:mlp", "--data", data / "vectors.npy", *words, "--k-constant", -1)
    assert done.returncode == 2 and three_lines(done.stderr)[1] == "--k-constant -1.0"


def test_an_untrained_network_is_not_scored_with_statistics_it_does_not_have(tmp_path: Path) -> None:
    words = [
        "--model",
        "digits-cnn",
        "--data",
        "digits",
        "--points",
        40,
        "--keep",
        0.3,
        "--method",
        "sipp-det",
        "--dry-run",
    ]
    told = {more: json.loads(run("prune", *words, *more, "--json").stdout) for more in ((), ("--batchnorm", "running"))}
    assert [one["norm_stats"] for one in told.values()] == ["batch", "running"]
    kept = [[layer["kept"] for layer in one["layers"]] for one in told.values()]
    assert kept[0] != kept[1]
    assert "it has none of its own" in run("prune", *words).stdout
    torch.manual_seed(0)
    trained = build("digits-cnn")
    trained(torch.randn(64, 1, 8, 8))  # in train mode: now it has statistics
    save_file(trained.state_dict(), tmp_path / "net.safetensors")
    done = run("prune", *words, "--weights", tmp_path / "net.safetensors", "--json")
    assert json.loads(done.stdout)["norm_stats"] == "running"
