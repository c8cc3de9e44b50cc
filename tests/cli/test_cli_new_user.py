"""A first hour with a network of one's own: named by its file, and what the page suggests runs when it is pasted."""

import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from commandline import refused, run, told

from sipp.report import read_pruned_result
from sipp.report.one_network import next_steps

NET = """
import torch

def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a network in own_net.py, its weights, and labelled inputs."""
    monkeypatch.chdir(tmp_path)
    Path("own_net.py").write_text(NET)
    namespace: dict[str, object] = {}
    exec(NET, namespace)
    net = namespace["net"]()  # type: ignore[operator]
    torch.save(net.state_dict(), "net.pt")
    torch.save(net, "whole.pt")
    for name, seed in (("data", 0), ("new", 1)):
        x = torch.randn(400, 6, generator=torch.Generator().manual_seed(seed))
        np.savez(f"{name}.npz", inputs=x.numpy(), labels=net(x).argmax(1).numpy())
    return tmp_path


def prune(out: str) -> None:
    net = ["--model", "own_net.py:net", "--weights", "net.pt", "--data", "data.npz"]
    told("prune", *net, "--keep", 0.5, "--method", "magnitude", "--out", out)


def test_a_network_is_named_by_its_file(here: Path) -> None:
    prune("sparse")
    typed = ["prune", "--keep", 0.5, "--dry-run", "--model"]
    refused(run(*typed, "own_net.py"), "--model", "is a file of code")
    refused(run(*typed, "net.pt"), "--model", "contains weights")
    done = run(*typed, "own_net.py:net", "--weights", "whole.pt")
    assert "torch.save(model.state_dict(), ...)" in refused(done, "--weights", "could not be read")


def test_the_commands_that_the_page_suggests_run_when_pasted(here: Path) -> None:
    (here / "deeper").mkdir()
    prune("deeper/sparse")
    tried: list[str] = []
    for _ in range(3):  # each command adds what its page then no longer asks for
        for _, command in next_steps(read_pruned_result(Path("deeper/sparse"))):
            if command.startswith("sipp ") and "..." not in command and command not in tried:
                tried.append(command)
                told(*shlex.split(command.replace(" NEW", " new.npz"))[1:])
    assert {command.split()[1] for command in tried} == {"eval", "certify", "bench", "export"}
    told("report", "deeper/sparse", "--out", "page.html")
    page = Path("page.html").read_text()
    assert "not measured" not in page and "the accuracy is" in page


def test_what_people_type_first_is_answered_with_what_to_type(here: Path) -> None:
    net = ["--model", "own_net.py:net", "--weights", "net.pt", "--data", "data.npz", "--keep", 0.5]
    assert "write --model own_net.py:net" in refused(
        run("prune", "own_net.py:net", "--keep", 0.5), "sipp prune", "--model"
    )
    assert "write --pruned sparse" in refused(run("eval", "sparse", "--data", "new.npz"), "sipp eval", "Missing")
    assert "give a name without .pt" in refused(run("prune", *net, "--out", "d.pt"), "--out d.pt", "names a file")
    said = " ".join(run("prune", *net, "--method", "magnitude", "--out", "sparse").stdout.split())
    command = "sipp eval --model own_net.py:net --pruned sparse --dense net.pt --data NEW"
    assert command in said and "sipp report sparse" in said
    told(*shlex.split(command.replace("NEW", "new.npz"))[1:])
    shrunk = ["sparse", "--model", "own_net.py:net", "--data", "data.npz"]
    run("shrink", *shrunk, "--out", "a.pt")
    said = refused(
        run(*shlex.split(command.replace("NEW", "new.npz").replace("sparse", "a.pt"))[1:]), "--pruned", "read"
    )
    assert "sipp.evaluate(dense, torch.load('a.pt'" in said
    told("prune", *net[:-1], 0.99, "--method", "magnitude", "--out", "denser")
    said = run("shrink", "denser", *shrunk[1:], "--out", "b.pt").stdout
    assert "no dead channels; --multiply-adds 0.5 removes others" in said
