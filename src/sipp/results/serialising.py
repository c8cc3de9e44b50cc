"""Serialises a pruned network and its certificate to JSON types, for files, runs, --json and the page."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import torch

from sipp import __version__
from sipp.errors import ModelError, OptionError
from sipp.results.certificate import AnyCertificate, certificate_values, check_certificate
from sipp.results.json_values import json_value
from sipp.results.network_hash import buffers_hash, class_name, model_hash
from sipp.results.pruned import NetworkBound, Pruned, regrown_weight, up_to_date
from sipp.results.schemas import PRUNED_FORMAT, PRUNED_KIND

Values = dict[str, Any]

LAYER_KEYS = (
    "name", "layer_type", "n_rows", "fan_in", "n_weights", "kept", "keep", "strategies", "eps", "sign_complexity",
    "bound", "kappa", "eps_measured", "bound_measured",
)  # fmt: skip
GUARANTEE_KEYS = (
    "met", "verdict", "contradicted", "delta", "n", "n_needed", "unit", "c_constant", "k_constant", "reason",
    "n_weights",
)  # fmt: skip


def pruned_values(pruned: Pruned, certificate: AnyCertificate | None = None) -> Values:
    """The complete record of a pruned network, with its certificate if there is one.

    It describes the network as it is now. The hash of the dense network is known only from a certificate.
    """
    if not isinstance(pruned, Pruned):
        raise OptionError(f"a {type(pruned).__name__} is not a pruned network", fix="pass what sipp.prune returned")
    check_certificate(certificate)
    if name := regrown_weight(pruned.model, pruned.masks):
        raise ModelError(
            "a weight outside its mask is not zero: the record would count the weights of another network",
            where=name,
            fix="hold the masks while you train (sipp.hold), or set the pruned weights to zero",
        )
    pruned_hash = model_hash(pruned.model)
    if certificate is not None and certificate.pruned_hash != pruned_hash:
        raise OptionError("the certificate is about another network", fix="certify pruned.model")
    now = up_to_date(pruned)
    return {
        "kind": PRUNED_KIND,
        "format": PRUNED_FORMAT,
        "sipp": __version__,
        "torch": str(torch.__version__),
        "model": class_name(pruned.model),
        "pruned_hash": pruned_hash,
        "buffers_hash": buffers_hash(pruned.model),
        "dense_hash": None if certificate is None else certificate.dense_hash,
        "certificate": certificate_values(certificate),
        **pruning_values(now),
        "seen": sorted(pruned.seen),
        "seen_all": pruned.seen_all and bool(now.described_hash),  # the points of later changes are unknown
    }


def pruning_values(pruned: Pruned) -> Values:
    """How a network was pruned, and its statements at that time, even if its weights changed since."""
    guarantee, measured, repair = pruned.guarantee, pruned.measured, pruned.repair
    values = {
        "method": pruned.method,
        "keep": pruned.keep,
        "budget": pruned.budget,
        "kept": pruned.kept,
        "n_weights": pruned.n_weights,
        "seed": pruned.seed,
        "draws": pruned.draws,
        "pattern": pruned.pattern,
        "repair": repair is not None,
        "layers": [{**_named(layer, LAYER_KEYS), "dead_rows": len(layer.dead_rows)} for layer in pruned.layers],
        "bound": _bound_values(pruned.bound),
        "guarantee": None if guarantee is None else str(guarantee),
        "conditions": guarantee
        and {
            **_named(guarantee, GUARANTEE_KEYS),
            "n_refuting": guarantee.n_never_above,
            "layers": asdict(guarantee.layers),
        },
        "measured": measured
        and {**asdict(measured), "joint_confidence": measured.joint_confidence, "words": str(measured)},
        "moved": pruned.moved and asdict(pruned.moved),
        "choice": pruned.choice and asdict(pruned.choice),
        "repaired": repair and asdict(repair),
        "dead_rows": sum(len(layer.dead_rows) for layer in pruned.layers),
    }
    return {key: json_value(value) for key, value in values.items()}


def _bound_values(bound: NetworkBound) -> Values:
    is_finite = bound.epsilon is not None and math.isfinite(bound.epsilon)
    return {
        "mode": bound.mode,
        "epsilon": bound.epsilon,
        "delta": bound.delta,
        "met": bound.met and is_finite,  # an infinite epsilon is written as null, and must not look like a bound
        "reason": bound.reason or ("" if is_finite else "epsilon is infinite"),
        "words": str(bound),
        "coverage": bound.coverage and asdict(bound.coverage),
    }


def _named(record: object, names: tuple[str, ...]) -> Values:
    return {name: getattr(record, name) for name in names}
