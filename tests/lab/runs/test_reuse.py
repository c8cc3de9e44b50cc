"""What decides a network's numbers, and that a run trains only what no run beside it has made."""

from pathlib import Path

import pytest
from lab.small_runs import equal, final

from sipp.files import read_json, write_json
from sipp_lab.recipes import Recipe, load_recipe
from sipp_lab.runs import store
from sipp_lab.runs.plan import Stage, plan
from sipp_lab.runs.reading import read_run
from sipp_lab.runs.reuse import stage_key
from sipp_lab.runs.run_recipe import FinishedRun, run
from sipp_lab.runs.store import TAKEN_FROM

pytestmark = pytest.mark.usefixtures("narrow")

SMALL = (
    "train.epochs=1",
    "train.decay={factor: 0.5, every: 1}",
    "train.batch_size=256",
    "data.n_calibration=40",
    "data.n_holdout=0",
    "prune.keeps=[0.5, 0.2]",
)


def small(name: str, *settings: str) -> Recipe:
    return load_recipe(name, settings=(*SMALL, "prune.methods=[magnitude]", *settings))


def taken(done: FinishedRun) -> set[str]:
    return {Stage(r["seed"], r["method"], r["level"]).name for r in done.records if r[TAKEN_FROM]}


def keys(recipe: Recipe) -> dict[str, str]:
    return {stage.name: stage_key(recipe, stage) for stage in plan(recipe)}


def test_a_networks_key_depends_on_every_setting_but_the_lists() -> None:
    old = keys(small("digits-iterative"))
    more = keys(
        small("digits-iterative", "prune.methods=[lamp, magnitude]", "repetitions=2", "prune.keeps=[0.5, 0.2, 0.1]")
    )
    assert old == keys(small("digits-iterative", "train.eval_every=7"))
    assert old.items() <= more.items() and len(set(more.values())) == len(more)
    for setting in ("seed=1", "train.rate=0.2", "init=pytorch", "data.split_seed=1", "n_threads=2"):
        assert not set(keys(small("digits-iterative", setting)).values()) & set(old.values()), setting
    for setting in (
        "pipeline=gradual",
        "prune.delta=0.1",
        "prune.batch_size=9",
        "retrain.epochs=2",
        "prune.draws=fixed",
        "prune.c_constant=2.0",
        "prune.k_constant=2.0",
        "prune.repair=true",
        "prune.keeps=[0.6, 0.2]",
        "retrain.distill={weight: 0.5, temperature: 1.0}",
    ):
        new = keys(small("digits-iterative", setting))
        assert {name for name in old if old[name] == new[name]} == {"seed0.dense"}, setting
    lower = keys(small("digits-iterative", "prune.keeps=[0.5, 0.1]"))
    assert {name for name in old if old[name] == lower[name]} == {"seed0.dense", "seed0.magnitude.01"}
    ladder = keys(small("digits-iterative", "prune.alpha=0.5", "prune.levels=3"))  # one share for all levels
    assert len(set(ladder.values())) == len(ladder) == 4
    one, other = (
        keys(small("digits-iterative", "prune.methods=[sipp-det, magnitude]", f"prune.reduce={r}"))
        for r in ("max", "mean")
    )
    assert (
        one["seed0.magnitude.02"] == other["seed0.magnitude.02"]
        and one["seed0.sipp-det.01"] != other["seed0.sipp-det.01"]
    )


def test_a_run_trains_only_what_is_new(tmp_path: Path) -> None:
    first = run(small("digits-iterative"), out=tmp_path, device="cpu")
    assert first.n_made == 3 and taken(first) == set()
    again = run(
        small("digits-iterative", "prune.methods=[lamp, magnitude]", "repetitions=2"), out=tmp_path, device="cpu"
    )
    assert taken(again) == {"seed0.dense", "seed0.magnitude.01", "seed0.magnitude.02"}
    assert again.n_made == 10 - 3 and again.folder != first.folder
    gradual = run(small("digits-gradual", "prune.keeps=[0.2]"), out=tmp_path, device="cpu")
    assert taken(gradual) == {"seed0.dense"} and gradual.n_made == 1
    assert {record["pipeline"] for record in gradual.records} == {"gradual"}
    assert gradual.records[0][TAKEN_FROM] in {
        first.folder.name,
        again.folder.name,
    }  # trained there, or copied
    alone = run(small("digits-gradual", "prune.keeps=[0.2]"), out=tmp_path / "alone", device="cpu")
    for stage in ("seed0.dense", "seed0.magnitude.01"):
        assert equal(final(gradual.folder, stage), final(alone.folder, stage))
    assert read_run(again.folder).notes == () and len(read_run(again.folder).origins) == 1


def test_other_code_is_taken_only_where_that_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(small("digits-at-init", "prune.keeps=[0.2]"), out=tmp_path, device="cpu")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / store.MANIFEST).write_text("{}")
    monkeypatch.setattr(store, "code_version", lambda: "another")
    lamp = small("digits-at-init", "prune.keeps=[0.2]", "prune.methods=[lamp]")
    refused = run(lamp, out=tmp_path, device="cpu")
    assert taken(refused) == set() and refused.n_made == 2
    both = small("digits-at-init", "prune.keeps=[0.2]", "prune.methods=[magnitude, erk]")
    done = run(both, out=tmp_path, device="cpu", accept_changes=True)
    assert taken(done) == {"seed0.dense", "seed0.magnitude.01"} and done.records[1][TAKEN_FROM] == first.folder.name
    assert [one.code for one in read_run(done.folder).origins][-1] == "another"
    assert len(read_run(done.folder).origins) == 2
    hurt = first.folder / "seed0.magnitude.01" / "final.safetensors"
    hurt.write_bytes(hurt.read_bytes()[:-1] + b"\xff")
    (done.folder / "seed0.magnitude.01" / "final.safetensors").unlink()
    with pytest.warns(UserWarning, match="SHA-256"):
        assert run(both, out=tmp_path, device="cpu", accept_changes=True).n_made == 1


def test_a_network_of_other_data_is_never_taken(tmp_path: Path) -> None:
    first = run(small("digits-at-init", "prune.keeps=[0.2]"), out=tmp_path, device="cpu")
    manifest = read_json(first.folder / store.MANIFEST)
    manifest["origins"][0]["data"] = "other"
    write_json(first.folder / store.MANIFEST, manifest)
    more = small("digits-at-init", "prune.keeps=[0.2]", "prune.methods=[magnitude, lamp]")
    assert taken(run(more, out=tmp_path, device="cpu", accept_changes=True)) == set()
