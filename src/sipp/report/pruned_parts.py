"""A pruned network in, its part of the page out: promises, accuracy, layers, repair, size and speed."""

from __future__ import annotations

from sipp.records.display import percent_up
from sipp.records.schemas import CertificateRecord, EvalRecord, PrunedRecord, given_values
from sipp.report.blends import BLEND, blend_finding
from sipp.report.evaluations import EVALUATIONS, evaluation_finding, evaluation_of
from sipp.report.parts import Part, Section, flat
from sipp.report.plots import Plot
from sipp.report.read import PrunedModel
from sipp.report.repairs import REPAIR, repair_finding, repair_note
from sipp.report.size_and_speed import BENCH, bench_finding
from sipp.report.words import Finding, is_useless, number

# Of its record, elsewhere on the page
SHOWN = {"layers", "bound", "certificate", "kind", "measured", "repaired", "choice"}


def pruned_part(pruned: PrunedModel, ident: str, plots: dict[str, Plot]) -> Part:
    """What the page says of one pruned network."""
    record = pruned.record
    told = Finding(
        "What is promised, and how surely",
        "All statements speak of the pruned network as it was saved, against the one it was pruned from.",
    )
    sections = [
        Section("Promise", Finding(_promise(pruned), _layers_words(record)), [[plots["layers"]["id"]]]),
        Section("Statements", told, [[plots["statements"]["id"]]]),
    ]
    measured = evaluation_of(pruned)
    if measured is not None:
        sections.insert(1, Section("Accuracy", evaluation_finding(measured), [[plots[EVALUATIONS]["id"]]]))
    if record.choice is not None:
        rows = [[plots[BLEND]["id"]]] if BLEND in plots else []
        sections.append(Section("Method", blend_finding(record.choice), rows))
    if record.repaired is not None:
        rows = [[plots[REPAIR]["id"]]] if REPAIR in plots else []
        sections.append(Section("Repair", repair_finding(record.repaired), rows, note=repair_note(record.repaired)))
    if pruned.bench is not None:
        sections.append(Section("Size and speed", bench_finding(pruned.bench), [[plots[name]["id"]] for name in BENCH]))
    return Part(
        ident=ident,
        kicker="pruned model",
        title=f"{pruned.name}: {pruned.arm} at {number(record.keep, 'share')} keep",
        state="",
        caveats=[],
        remarks=list(pruned.marks),
        tiles=[
            ("keep", number(record.keep, "share")),
            ("kept weights", f"{record.kept:,}"),
            ("prunable weights", f"{record.n_weights:,}"),
            ("layers", f"{len(record.layers):,}"),
            ("dead rows", f"{record.dead_rows:,}"),
            ("output moved", _moved(record)),
            *_accuracy(measured),
        ],
        sections=sections,
        tables=[
            (
                "Everything else in its report",
                list(flat({key: value for key, value in given_values(record).items() if key not in SHOWN})),
            )
        ],
    )


def _moved(record: PrunedRecord) -> str:
    return "unknown" if record.moved is None or record.moved.error is None else number(record.moved.error, "share")


def _accuracy(measured: EvalRecord | None) -> list[tuple[str, str]]:
    if measured is None or measured.accuracies is None:
        return []
    return [("accuracy", number(measured.accuracies[1], "share"))]


def _layers_words(record: PrunedRecord) -> str:
    dead = [layer for layer in record.layers if layer.dead_rows]
    least = min(record.layers, key=lambda layer: layer.kept / max(1, layer.n_weights))
    n_dead = sum(layer.dead_rows for layer in dead)
    words = f"{n_dead:,} row{'' if n_dead == 1 else 's'} died in {len(dead)} layer{'' if len(dead) == 1 else 's'}"
    words = words if dead else "No row died"
    return f"{words}. {least.name} keeps least: {least.kept:,} of {least.n_weights:,} weights."


def _promise(pruned: PrunedModel) -> str:
    """What the first certificate that promises something promises, that of `sipp prune` before those of `certify`."""
    record = pruned.record
    for certificate in (record.certificate, *pruned.certificates.values()):
        if certificate is not None and (words := _certified(certificate)):
            return words
    if record.certificate is not None:
        return f"Certificate: {record.certificate.verdict or record.certificate.mode}"
    if record.bound is not None and record.bound.holds:
        return "The theory's bound is met, for all but a share of inputs; no holdout was used"
    if record.measured is not None and record.measured.c_constant is not None:
        return "Rows and layers have a measured bound; what the network costs is not known: sipp certify measures it"
    return "Nothing is promised: no certificate, no bound"


def _certified(certificate: CertificateRecord) -> str:
    """The promise of a certificate in a few words, empty where it makes none."""
    if certificate.drop_upper is not None:
        return f"The holdout certifies that accuracy falls by at most {percent_up(certificate.drop_upper)}"
    if certificate.verdict != "certified" or certificate.limit is None:
        return ""
    limit = percent_up(certificate.limit)
    if is_useless(certificate.limit):
        return f"The certificate is useless: it allows an error of {limit} of the output's length"
    return f"The holdout certifies outputs within {limit} of the dense network's, for all but a share of inputs"
