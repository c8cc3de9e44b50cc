"""Run folders as `sipp run` writes them, made of invented numbers: of any size, in no time, always the same."""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sipp.files import seal, write_json
from sipp.results import Certificate, Evaluation, NetworkBound, Pruned, PrunedLayer, hashing, to_json
from sipp_lab.runs.records import Accuracy, NetworkRecord

STAND_IN = {"weight": torch.zeros(1)}  # for the network that is told of
STAND_IN_HASH = hashing.of_state(STAND_IN)
METHODS = ("sipp-hybrid", "sipp-det", "magnitude", "snip", "random")


def config(
    *, name: str, pipeline: str, methods: tuple[str, ...], n_levels: int, n_seeds: int, alpha: float = 0.85
) -> dict[str, Any]:
    return {
        "name": name,
        "pipeline": pipeline,
        "net": "resnet56",
        "data": {"name": "cifar10", "n_calibration": 256, "n_holdout": 400, "split_seed": 0},
        "prune": {"methods": list(methods), "levels": n_levels, "alpha": alpha, "delta": 1e-16},
        "train": {"epochs": 182, "decay": {"factor": 0.1, "milestones": [91, 136]}},
        "repetitions": n_seeds,
        "seed": 0,
    }


def accuracy(top1: float, top5: float | None = None, n: int = 1000) -> Accuracy:
    five = min(1.0, top1 + 0.05) if top5 is None else top5
    return Accuracy(n=n, n_top1=round(n * top1), n_top5=round(n * five), loss=0.3)


HEAD = {"recipe": "r", "pipeline": "p", "net": "n", "data": "d"}


def dense(seed: int, top1: float = 0.93) -> dict[str, Any]:
    record = NetworkRecord(
        **HEAD, seed=seed, method=None, level=0, after=accuracy(top1), train_loss=0.1, seconds=100.0,
    )  # fmt: skip
    values: dict[str, Any] = to_json(record)
    return values


def certificate(epsilon: float, *, verdict: str = "certified") -> Certificate:
    """A certificate; of one that is not certified, 30 of 400 points were too far off."""
    digest = hashlib.sha256(str(epsilon).encode()).hexdigest()
    found = Certificate(
        fixed="share", epsilon=float(epsilon), share=0.05, confidence=0.95,
        violations=12 if verdict == "certified" else 30, n=400, n_duplicates=0, data_hash=digest, dense_hash=digest,
        pruned_hash=STAND_IN_HASH, dtype="float32", output=None, calibration_checked=True,
    )  # fmt: skip
    assert found.verdict == verdict
    return found


def evaluation(dense: float | None, pruned: float | None, *, points: str = "a", **changes: Any) -> str:
    """A record as `sipp eval --out` writes it, of the networks of `pruned_folder` and of these points."""
    is_known = dense is not None and pruned is not None
    evaluated = Evaluation(
        changes.pop("n_inputs", 800), (dense, pruned) if is_known else None, (0.5, 0.625) if is_known else None,
        same_class=0.75, error_mean=0.2, error_median=0.1, error_max=1.5, data_hash=points * 64,
        dense_hash="0" * 64, pruned_hash=STAND_IN_HASH, inputs=f"300 points of {points}.npz",
    )  # fmt: skip
    return json.dumps(seal({"kind": "Evaluation", "sipp": "0", **to_json(evaluated), **changes}))


def layer(name: str, n_weights: int, kept: int, *, eps: float | None, dead: int) -> PrunedLayer:
    return PrunedLayer(
        name=name, layer_type="Linear", n_rows=1, fan_in=n_weights, kept=kept, strategies={"det": 3, "rand": 5},
        dead_rows=dead, eps=eps, sign_complexity=None, kappa=None,
    )  # fmt: skip


def facts(layers: Sequence[PrunedLayer], *, method: str, epsilon: float | None, **changes: Any) -> Pruned:
    """What is known about a network with these layers, whose bound does not hold."""
    kept = sum(one.kept for one in layers)
    reason = "a heuristic" if epsilon is None else "too few calibration points (n=256, needs 400)"
    bound = NetworkBound("paper", epsilon, 1e-16, None, reason)
    known = Pruned(layers=tuple(layers), guarantee=None, bound=bound, method=method, budget=kept, kept=kept, seed=0)
    return replace(known, **changes)


def level_record(
    *, seed: int, method: str, level: int, keep: float, top1: float, layers: list[PrunedLayer], epsilon: float
) -> dict[str, Any]:
    record = NetworkRecord(
        **HEAD, seed=seed, method=method, level=level, after=accuracy(top1), before=accuracy(top1 / 2),
        pruned=facts(layers, method=method, epsilon=5e4 / keep if method.startswith("sipp") else None),
        certificate=certificate(epsilon), train_loss=0.1, seconds=110.0,
    )  # fmt: skip
    values: dict[str, Any] = to_json(record)
    return values


def write_run(folder: Path, settings: dict[str, Any], records: list[dict[str, Any]]) -> Path:
    """The folder, with a manifest and these records."""
    folder.mkdir(parents=True, exist_ok=True)
    origin = {"data": "ab" * 32, "code": "sipp 0.1.0, torch 2.13.0+cpu, source 0123456789ab", "device": "cpu"}
    values = {"config": settings, "origins": [origin]}
    write_json(folder / "manifest.json", values)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def big_run(
    folder: Path,
    *,
    name: str = "resnet56-cifar10-iterative",
    pipeline: str = "iterative",
    methods: tuple[str, ...] = METHODS,
    n_levels: int = 20,
    n_seeds: int = 3,
    n_layers: int = 56,
) -> Path:
    """A run of this size with numbers that look like a run's."""
    rng = random.Random(0)
    sizes = [432, *(2304 * 4 ** (3 * i // max(1, n_layers - 1)) for i in range(1, n_layers))]
    records = []
    for seed in range(n_seeds):
        records.append(dense(seed, 0.925 + 0.004 * rng.random()))
        for rank, method in enumerate(methods):
            for level in range(1, n_levels + 1):
                keep = 0.85**level
                top1 = 0.93 - 0.002 * (1 + rank) / keep ** (0.55 + 0.12 * rank) * rng.uniform(0.7, 1.3)
                layers, left, room = [], round(keep * sum(sizes)), sum(sizes)
                for index, size in enumerate(sizes):
                    share = min(1.0, keep * (2.5 - 2 * index / n_layers) * rng.uniform(0.8, 1.2))
                    dead = int(max(0, rank - 1) * (0.1 / keep) * rng.random())
                    eps = 3 * (1 - share) * rng.uniform(1, 20) if method.startswith("sipp") else None
                    room -= size  # of the layers that come, which must take what is left, and no more
                    kept = min(size, left, max(int(share * size), left - room))
                    left -= kept
                    layers.append(
                        layer(f"layers.{index // 2}.conv{index % 2 + 1}.weight", size, kept, eps=eps, dead=dead)
                    )
                epsilon = min(1.0, 0.03 * (1 + rank) / keep * rng.uniform(0.8, 1.2))
                records.append(
                    level_record(
                        seed=seed,
                        method=method,
                        level=level,
                        keep=keep,
                        top1=max(0.1, top1),
                        layers=layers,
                        epsilon=epsilon,
                    )
                )
    settings = config(name=name, pipeline=pipeline, methods=methods, n_levels=n_levels, n_seeds=n_seeds)
    return write_run(folder, settings, records)
