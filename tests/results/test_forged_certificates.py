"""Certificates edited by hand, field by field: each forgery is refused, found, or reported as not checked."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sipp.errors import DataError, OptionError
from sipp.results.certificate import DERIVED, KINDS, AnyCertificate, from_json, to_json
from sipp.verbs.certify import certify, certify_accuracy
from sipp.verbs.verify import verify

N = 200
CASES = ("delta", "epsilon", "labels", "label-free")


def points(seed: int, n: int = N) -> torch.Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    pruned = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    pruned.load_state_dict({name: value * 0.97 for name, value in dense.state_dict().items()})
    with torch.no_grad():
        pruned[0].weight[::3] = 0
    return dense, pruned


HOLDOUT = [(points(1), torch.randint(0, 4, (N,), generator=torch.Generator().manual_seed(2)))]
CALIBRATION = points(3, 50)


def made(case: str, ledger: Path) -> AnyCertificate:
    """A certificate on points that had been used once before, with everything that can be checked about it kept."""
    witnesses: dict[str, Any] = {"calibration": CALIBRATION, "ledger": ledger}
    dense, pruned = networks()
    certify(pruned, dense, HOLDOUT, ledger=ledger)
    if case in ("labels", "label-free"):
        labels: Any = "use" if case == "labels" else "ignore"
        return certify_accuracy(*networks(), HOLDOUT, labels=labels, **witnesses)
    return certify(*networks(), HOLDOUT, epsilon=0.3 if case == "epsilon" else None, **witnesses)


def forgeries(value: Any) -> list[Any]:
    """Other values of the same kind, large changes and small ones."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value - 1), 0, 10 * value + 3]
    if isinstance(value, float):
        return [value * 1.01, value * 0.99, value / 2]
    if isinstance(value, str) and len(value) == 64:
        return ["0" * 64, value[::-1]]
    others = {"delta": "epsilon", "epsilon": "delta", "labels": "label-free", "label-free": "labels"}
    return [others[value]] if value in others else [0, "logits"] if value is None else [value + "x", "float64"]


def believed(name: str, unchecked: tuple[str, ...]) -> bool:
    return any(name in line.split(":")[0].split(", ") for line in unchecked)


def forged_fields() -> Iterator[tuple[str, str]]:
    for case in CASES:
        kind = "accuracy" if case in ("labels", "label-free") else "output"
        yield from ((case, field.name) for field in dataclasses.fields(KINDS[kind]))


@pytest.mark.parametrize(("case", "name"), list(forged_fields()))
def test_a_forger_who_makes_all_numbers_and_words_fit_is_found_or_told_as_believed(
    case: str, name: str, tmp_path: Path
) -> None:
    """The forged record is written anew, sentence and all: what is left to find is what the networks do not show."""
    cert = made(case, tmp_path / "uses")
    witnesses: dict[str, Any] = {"calibration": CALIBRATION, "ledger": tmp_path / "uses"}
    honest = verify(cert, *networks(), HOLDOUT, **witnesses)
    assert honest.ok, honest
    n_tried = 0
    for value in forgeries(getattr(cert, name)):
        if value == getattr(cert, name):
            continue
        forged = dataclasses.replace(cert, **{name: value})
        for given in (witnesses, {}):
            n_tried += 1
            try:
                found = verify(from_json(to_json(forged)), *networks(), HOLDOUT, **given)
            except (DataError, OptionError):
                continue
            assert not found.ok or believed(name, found.unchecked), (value, found)
            direct = verify(forged, *networks(), HOLDOUT, **given)  # the API, without a file on the way
            assert not direct.ok or believed(name, direct.unchecked)
    assert n_tried


@pytest.mark.parametrize("case", CASES)
def test_a_forged_text_is_refused_wherever_it_does_not_follow_from_the_counts(case: str, tmp_path: Path) -> None:
    cert = made(case, tmp_path / "uses")
    good = json.loads(to_json(cert))
    assert from_json(json.dumps(good)) == cert
    for name in ("sentence", *DERIVED[good["kind"]]):
        values = forgeries(good[name]) if name != "sentence" else ["", None, good[name] + " ", good[name][:-1]]
        for value in values:
            if value == good[name]:
                continue
            with pytest.raises(DataError, match=name):
                from_json(json.dumps({**good, name: value}))
    softer = good["sentence"].replace("of this claim alone", "of this claim")
    assert softer != good["sentence"]
    with pytest.raises(DataError, match="sentence"):
        from_json(json.dumps({**good, "sentence": softer}))


def test_flags_without_a_witness_are_told_and_with_one_are_checked(tmp_path: Path) -> None:
    ledger = tmp_path / "uses"
    cert = made("delta", ledger)
    alone = verify(cert, *networks(), HOLDOUT)
    assert alone and all(believed(name, alone.unchecked) for name in ("calibration_checked", "prior_uses"))
    assert "not checked:     ledger_kept, prior_uses" in str(alone)
    whole = verify(cert, *networks(), HOLDOUT, calibration=CALIBRATION, ledger=ledger)
    assert whole and not any(believed(n, whole.unchecked) for n in ("calibration_checked", "prior_uses", "ledger_kept"))

    shared = torch.cat([CALIBRATION, points(1)[7:9]])
    found = verify(cert, *networks(), iter(HOLDOUT), calibration=shared)
    assert not found and any(reason.startswith("calibration_checked: 2 of 200") for reason in found.reasons)
    first = dataclasses.replace(cert, prior_uses=0)
    found = verify(first, *networks(), HOLDOUT, ledger=ledger)
    assert [reason.split(":")[0] for reason in found.reasons] == ["prior_uses"]
    again = made("delta", ledger)
    twice = verify(dataclasses.replace(again, prior_uses=1), *networks(), HOLDOUT, ledger=ledger)
    assert again.prior_uses == 3 and twice.ok and believed("prior_uses", twice.unchecked)  # its line, or the other one
    ledger.write_text("")
    assert verify(cert, *networks(), HOLDOUT, ledger=ledger).reasons == ("ledger_kept: the ledger holds no such claim",)
    absent = tmp_path / "absent"
    with pytest.raises(DataError, match="is not a file"):
        verify(cert, *networks(), HOLDOUT, ledger=absent)
    assert not absent.exists() and ledger.read_text() == ""  # a check is no use, and leaves no line
