"""Refuses contradictory options of `sipp prune`, and places it cannot write to, before any work."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from sipp.cli.commands.prune_command import PruneRequest
from sipp.cli.errors import naming_option
from sipp.cli.hugging_face_models import PREFIX
from sipp.cli.options import load_code, option_name
from sipp.errors import OptionError
from sipp.results.options import PruneOptions, unused_in_prune_to
from sipp.storage.outputs import FILE_SUFFIX, check_file, check_folder, refuse_input


def check(request: PruneRequest) -> None:
    """Refuses contradictory options."""
    goals = {
        "--keep": request.options.keep,
        "--budget": request.options.budget,
        "--pattern": request.options.pattern,
        "--epsilon": request.epsilon,
        "--max-accuracy-drop": request.max_accuracy_drop,
    }
    chosen = [name for name, value in goals.items() if value is not None]
    if len(chosen) != 1:
        raise OptionError(
            "nothing says how far to prune" if not chosen else f"{' and '.join(chosen)} exclude each other",
            fix=f"give exactly one of {', '.join(goals)}",
        )
    if request.out is None and not request.dry_run:
        raise OptionError(
            "the pruned network would be lost",
            fix="give --out DIR or --out NAME.safetensors, or --dry-run to see the table",
        )
    load_code(request.code)
    _check_places(request)
    _refuse_ignored(request, chosen[0])


def _check_places(request: PruneRequest) -> None:
    """Refuses outputs that cannot be written, or that are also inputs."""
    if request.out is not None:
        with naming_option(f"--out {request.out}", "give another place"):
            if request.weights is not None:
                refuse_input(request.out, "--weights", request.weights)
            if request.model.startswith(PREFIX):
                refuse_input(request.out, "--model", Path(request.model.removeprefix(PREFIX)))
            if request.is_one_file:
                check_file(request.out, force=request.force)
            else:
                check_folder(request.out, force=request.force)


def _refuse_ignored(request: PruneRequest, goal: str) -> None:
    """Refuses an option that would have no effect with the others."""
    certifies = request.has_tolerance or request.holdout is not None
    only_certificates = "applies only together with --holdout or --epsilon", "add one of them, or leave it out"
    one_file = f"give --out NAME{FILE_SUFFIX}, or leave it out"
    rows = [  # option, typed value, whether it has an effect, why not, what to do
        ("--output", request.output, certifies, *only_certificates),
        ("--share", request.share, certifies, *only_certificates),
        ("--holdout-points", request.holdout_points, certifies, *only_certificates),
        (
            "--share", request.share, request.max_accuracy_drop is None,
            "is for --epsilon; an accuracy drop leaves no inputs out",
            "leave it out, or give --epsilon instead of --max-accuracy-drop",
        ),
        (
            f"--values {request.values}", None if request.values == "fp32" else request.values, request.is_one_file,
            "is for one small file; a folder holds plain weights", one_file,
        ),
    ]  # fmt: skip
    if request.has_tolerance:
        defaults = {field.name: field.default for field in fields(PruneOptions)}
        for name in unused_in_prune_to(request.options):
            option = f"--{option_name(name, defaults.get(name)).replace('_', '-')}"
            rows.append((option, name, False, f"cannot be chosen with {goal}", "leave it out, or use --keep"))
        rounded = request.values if request.rounds else None
        why = f"does not fit {goal}, which certifies the values before rounding, not those in the file"
        fix = "give --values lossless; or --keep with --holdout, which certifies what is stored"
        rows.append((f"--values {request.values}", rounded, False, why, fix))
    for option, typed, has_effect, why, fix in rows:
        if typed is not None and not has_effect:
            raise OptionError(f"{option} {why}", fix=fix)
