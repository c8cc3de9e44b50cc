"""Run folders as `sipp run` writes them, made of invented numbers: of any size, in no time, always the same."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from sipp.results.certificate import Certificate, to_json
from sipp.storage.files import seal, write_json

METHODS = ("sipp-hybrid", "sipp-det", "wt", "snip", "random")


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


def accuracy(top1: float, top5: float | None = None, n: int = 1000) -> dict[str, Any]:
    return {"n": n, "top1": top1, "top5": min(1.0, top1 + 0.05) if top5 is None else top5, "loss": 0.3}


def dense(seed: int, top1: float = 0.93) -> dict[str, Any]:
    head = {"kind": "dense", "recipe": "r", "pipeline": "p", "net": "n", "data": "d", "seed": seed, "method": None}
    return {**head, "level": 0, "after": accuracy(top1), "seconds": 100.0, "part_seconds": {"train": 99.5}}


def certificate(epsilon: float | str, *, verdict: str = "certified") -> dict[str, Any]:
    """A certificate as `certify` writes it; of one that is not certified, 30 of 400 points were too far off."""
    digest = hashlib.sha256(str(epsilon).encode()).hexdigest()
    found = Certificate(
        fixed="delta", epsilon=float(epsilon), delta=0.05, confidence=0.95,
        violations=12 if verdict == "certified" else 30, n=400, n_duplicates=0, data_hash=digest, dense_hash=digest,
        pruned_hash=digest, dtype="float32", output=None, calibration_checked=True,
    )  # fmt: skip
    assert found.verdict == verdict
    content: dict[str, Any] = json.loads(to_json(found))
    return content


def evaluation(dense: float | None, pruned: float | None, *, points: str = "a", **changes: Any) -> str:
    """A record as `sipp eval --out` writes it, of the networks of `pruned_folder` and of these points."""
    data = {"spec": f"{points}.npz", "kind": "file", "what": f"300 points of {points}.npz", "hash": points * 64}
    error = {"error_mean": 0.2, "error_median": 0.1, "error_max": 1.5, "n_not_finite": 0, "same_class": 0.75}
    loss = {"dense_loss": 0.5, "pruned_loss": 0.625}
    hashes = {"dense_hash": "0" * 64, "pruned_hash": "0" * 64}
    values = {"kind": "evaluation", "format": 1, "sipp": "0", **hashes, "data": data, "n_points": 300, **error, **loss}
    return json.dumps(seal({**values, "dense_accuracy": dense, "pruned_accuracy": pruned, **changes}))


def layer(name: str, n_weights: int, kept: int, *, eps: float | None, dead: int) -> dict[str, Any]:
    return {
        "name": name, "n_weights": n_weights, "kept": kept, "dead_rows": dead, "eps": eps, "nnz": kept,
        "strategies": {"det": 3, "rand": 5},
    }  # fmt: skip


def level_record(
    *, seed: int, method: str, level: int, keep: float, top1: float, layers: list[dict[str, Any]], epsilon: float | str
) -> dict[str, Any]:
    sipp = method.startswith("sipp")
    kept = sum(one["kept"] for one in layers)
    bound = {
        "epsilon": 5e4 / keep if sipp else None,
        "delta": 1e-16,
        "met": False,
        "reason": "too few calibration points (n=256, needs 400)" if sipp else "a heuristic",
        "speaks_of": "the network before retraining, against the network it was pruned from",
    }
    return {
        "kind": "level", "recipe": "r", "pipeline": "p", "net": "n", "data": "d",
        "seed": seed, "method": method, "level": level, "keep": keep, "kept": kept, "budget": kept,
        "n_weights": sum(one["n_weights"] for one in layers), "after": accuracy(top1), "before": accuracy(top1 / 2),
        "bound": bound, "guarantee": "not met: too few points" if sipp else None, "certificate": certificate(epsilon),
        "dead_rows": sum(one["dead_rows"] for one in layers), "layers": layers, "train_loss": 0.1,
        "seconds": 110.0, "part_seconds": {"score": 4.0, "prune": 1.0, "certify": 2.0, "train": 102.5},
    }  # fmt: skip


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
                layers = []
                for index, size in enumerate(sizes):
                    share = min(1.0, keep * (2.5 - 2 * index / n_layers) * rng.uniform(0.8, 1.2))
                    dead = int(max(0, rank - 1) * (0.1 / keep) * rng.random())
                    eps = 3 * (1 - share) * rng.uniform(1, 20) if method.startswith("sipp") else None
                    kept = int(share * size)
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
