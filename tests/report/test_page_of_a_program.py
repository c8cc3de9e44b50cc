"""`sipp.page`: the page of `sipp report`, of networks that are still in the program."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import sipp
from sipp.errors import OptionError
from sipp_lab.page import read_results, render


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3)).eval()


@pytest.fixture(scope="module")
def networks(dense: nn.Module) -> list[sipp.Pruned]:
    return [sipp.prune(dense, None, keep=keep, method="magnitude") for keep in (0.9, 0.5)]


@pytest.fixture(scope="module")
def holdout() -> torch.Tensor:
    return torch.rand(100, 8, generator=torch.Generator().manual_seed(2))


def facts(page: Path) -> str:
    """The page without what names it: titles, folders and paths."""
    return re.sub(r"Sequential|\bnet\b", "NAME", page.read_text())


def test_the_page_is_that_of_the_saved_folder(
    dense: nn.Module, networks: list[sipp.Pruned], holdout: torch.Tensor, tmp_path: Path
) -> None:
    certificate = sipp.certify(dense, networks[0].model, holdout)
    page = sipp.page(networks[0], certificate, path=tmp_path / "page.html")
    results, _ = read_results([sipp.save_folder(networks[0], tmp_path / "net", certificate=certificate)])
    (tmp_path / "report.html").write_text(render(results))
    assert certificate.sentence in page.read_text()
    ours, theirs = (set(facts(tmp_path / name).splitlines()) for name in ("page.html", "report.html"))
    assert all("check" in line for line in ours ^ theirs), ours ^ theirs


def test_several_networks_and_certificates(
    dense: nn.Module, networks: list[sipp.Pruned], holdout: torch.Tensor, tmp_path: Path
) -> None:
    claims = [sipp.certify(dense, one.model, holdout) for one in networks]
    claims.append(sipp.certify_accuracy(dense, networks[1].model, holdout))
    text = sipp.page(networks, *claims[::-1], path=str(tmp_path / "page.html")).read_text()
    assert "Networks side by side" in text and "Sequential 1" in text and "Sequential 2" in text
    assert all(claim.sentence in text for claim in claims)
    text = sipp.page({"mild": networks[0], "<b>bold": networks[1]}, path=tmp_path / "named.html").read_text()
    assert "mild" in text and "&lt;b&gt;bold" in text and claims[0].sentence not in text


def test_what_is_refused(
    dense: nn.Module,
    networks: list[sipp.Pruned],
    holdout: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="about none of these"):
        sipp.page(networks[0], sipp.certify(dense, networks[1].model, holdout))
    with pytest.raises(OptionError, match="no network to show"):
        sipp.page([])
    with pytest.raises(OptionError, match="a Sequential is not a result"):
        sipp.page({"a": dense})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match=r"print\(small\) shows what it saves"):
        sipp.page(sipp.shrink(networks[0], torch.rand(2, 8)))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"give results of sipp\.certify, one after the other"):
        sipp.page(networks[0], [sipp.certify(dense, networks[0], holdout)])  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_networks_of_other_layers_are_not_drawn_as_one(networks: list[sipp.Pruned], tmp_path: Path) -> None:
    """A program does not say which network its networks come from, so those with the same layers are compared."""
    other = sipp.prune(nn.Sequential(nn.Linear(8, 5)), None, keep=0.5, method="magnitude")
    alike = sipp.page({"a": networks[0], "b": networks[1]}, path=tmp_path / "alike.html").read_text()
    apart = sipp.page({"a": networks[0], "b": other}, path=tmp_path / "page.html").read_text()
    said = "Not all networks were pruned from the same dense network"
    assert said not in alike and said in apart


def test_rows_that_were_zero_before_are_not_said_to_keep_a_weight(dense: nn.Module, tmp_path: Path) -> None:
    net = copy.deepcopy(dense)
    with torch.no_grad():
        net.get_parameter("0.weight")[3] = 0.0
    pruned = sipp.prune(net, None, keep=0.9, method="magnitude")
    assert not any(layer.dead_rows for layer in pruned.layers)
    text = sipp.page(pruned, path=tmp_path / "zero.html").read_text()
    assert "No row lost all its weights." in text and "keeps at least one weight" not in text
