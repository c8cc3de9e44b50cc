"""A pruned network and its certificate in JSON's types: what report.json, --json and the page are made of."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import torch

from sipp import __version__
from sipp.errors import ModelError, OptionError
from sipp.records.bounds import Guarantee, Measured, NetworkBound
from sipp.records.certificate import AccuracyCertificate, AnyCertificate, Certificate, to_json
from sipp.records.choice import Choice
from sipp.records.network_hash import buffers_hash, model_hash
from sipp.records.pruned import Pruned, PrunedLayer, as_it_is, not_zero
from sipp.storage.artifact_index import class_name
from sipp.storage.marks import RECORD_FORMAT, RECORD_KIND


def record_of(pruned: Pruned, certificate: AnyCertificate | None = None) -> dict[str, Any]:
    """The record of a network that was pruned in a program: it knows no options, and the dense network by its claim."""
    if not isinstance(pruned, Pruned):
        raise OptionError(f"a {type(pruned).__name__} is no pruned network", fix="give what sipp.prune gave")
    if certificate is not None and not isinstance(certificate, (Certificate, AccuracyCertificate)):
        raise OptionError(f"certificate is a {type(certificate).__name__}", fix="give what sipp.certify gave")
    record = pruned_record(pruned)
    if certificate is not None and certificate.pruned_hash != record["pruned_hash"]:
        raise OptionError("certificate is about another network than this one", fix="certify pruned.model")
    return record | {
        "model": class_name(pruned.model),
        "dense_hash": None if certificate is None else certificate.dense_hash,
        "certificate": certificate_record(certificate),
    }


def pruned_record(pruned: Pruned) -> dict[str, Any]:
    """The pruned network as it is now in JSON's types; floats that are not finite are for `plain` to turn into null."""
    pruned = as_it_is(pruned)
    if name := not_zero(pruned.model, pruned.masks):
        raise ModelError(
            "a weight outside of its mask is not zero: the record would count weights of another network",
            where=name,
            fix="hold the masks while you train (sipp.hold), or set what they leave out to zero",
        )
    return {
        "pruned_hash": model_hash(pruned.model),
        "buffers_hash": buffers_hash(pruned.model),
        "kind": RECORD_KIND,
        "format": RECORD_FORMAT,
        "sipp": __version__,
        "torch": torch.__version__,
        "method": pruned.method,
        "keep": pruned.keep,
        "budget": pruned.budget,
        "kept": pruned.kept,
        "n_weights": pruned.n_weights,
        "seed": pruned.seed,
        "draws": pruned.draws,
        "pattern": pruned.pattern,
        "repair": pruned.repair is not None,
        "layers": [_layer(layer) for layer in pruned.layers],
        "bound": _bound(pruned.bound),
        "guarantee": None if pruned.guarantee is None else str(pruned.guarantee),
        "conditions": None if pruned.guarantee is None else _conditions(pruned.guarantee),
        "measured": None if pruned.measured is None else _measured(pruned.measured),
        "moved": None if pruned.moved is None else asdict(pruned.moved),
        "choice": choice_values(pruned.choice),
        "repaired": None if pruned.repair is None else {**asdict(pruned.repair), "words": pruned.repair.sentence},
        "dead_rows": sum(len(layer.dead_rows) for layer in pruned.layers),
    }


def choice_values(choice: Choice | None) -> dict[str, Any] | None:
    """Which blend was taken, and how far each that was tried moves the output (T20)."""
    if choice is None:
        return None
    tried = [
        {
            **asdict(one),
            "name": one.name,
            "error": one.error if math.isfinite(one.error) else None,
            "is_taken": one == choice.taken,
        }
        for one in choice.tried
    ]
    return {"words": str(choice), "n_points": choice.n_points, "is_aside": choice.is_aside, "tried": tried}


def _layer(layer: PrunedLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "layer_type": layer.layer_type,
        "n_rows": layer.n_rows,
        "fan_in": layer.fan_in,
        "n_weights": layer.n_weights,
        "kept": layer.kept,
        "keep": layer.keep,
        "dead_rows": len(layer.dead_rows),
        "strategies": layer.strategies,
        "eps": layer.eps,
        "sign_complexity": layer.sign_complexity,
        "bound": layer.bound,
        "kappa": layer.kappa,
        "eps_measured": layer.eps_measured,
        "bound_measured": layer.bound_measured,
    }


def _bound(bound: NetworkBound) -> dict[str, Any]:
    is_finite = bound.epsilon is not None and math.isfinite(bound.epsilon)
    return {
        "mode": bound.mode,
        "epsilon": bound.epsilon if is_finite else None,
        "delta": bound.delta,
        "met": bound.met and is_finite,  # an infinite epsilon reads null: it must not look like a promise kept
        "reason": bound.reason or ("" if is_finite else "epsilon is infinite"),
        "words": str(bound),
        "coverage": None if bound.coverage is None else asdict(bound.coverage),
    }


def _measured(measured: Measured) -> dict[str, Any]:
    return {**asdict(measured), "joint_confidence": measured.joint_confidence, "words": str(measured)}


def _conditions(guarantee: Guarantee) -> dict[str, Any]:
    return {
        "met": guarantee.met,
        "verdict": guarantee.verdict,
        "contradicted": guarantee.contradicted,
        "delta": guarantee.delta,
        "n": guarantee.n,
        "n_needed": guarantee.n_needed,
        "unit": guarantee.unit,
        "c_constant": guarantee.c_constant,
        "k_constant": guarantee.k_constant,
        "reason": guarantee.reason,
        "n_weights": guarantee.n_weights,
        "n_refuting": guarantee.n_refuting,
        "layers": asdict(guarantee.layers),
    }


def certificate_record(certificate: AnyCertificate | None) -> dict[str, Any] | None:
    """The certificate as `sipp certify` writes it."""
    if certificate is None:
        return None
    content: dict[str, Any] = json.loads(to_json(certificate))
    return content
