"""Reads runs and pruned networks from folders, and renders them as one page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sipp.errors import DataError
from sipp.files import JOURNAL_NAME, RECORD_NAME, check_file, make_folder, write_atomic
from sipp.report import (
    Article,
    PrunedModel,
    network_articles,
    read_pruned_result,
    render as render_page,
)
from sipp_lab.page import series
from sipp_lab.page.article import panel_article
from sipp_lab.page.comparison import comparison
from sipp_lab.page.panels import panels_of
from sipp_lab.runs.folder import HOW_TO_REPAIR, MANIFEST, Run, read_run
from sipp_lab.studies import Form, Study

DEPTH = 2  # of nested folders: results/STUDY/RUN
RUN_WORDS = {
    "dense top-1": "accuracy of the network before pruning",
    "top-1": "accuracy: share of test inputs whose largest output is the right class",
    "just pruned": "accuracy before any retraining",
    "smallest keep": "the smallest share of weights that this run pruned to",
}

Result = Run | PrunedModel


@dataclass(frozen=True)
class Broken:
    """A result folder that cannot be read, and why."""

    folder: Path
    what: str
    do: str = HOW_TO_REPAIR


def read_results(paths: Sequence[Path]) -> tuple[list[Result], list[Broken]]:
    """The runs and pruned networks in these folders, and the folders inside them that cannot be read.

    Those in `paths` must be intact.
    """
    results: dict[Path, Result] = {}
    broken: dict[Path, Broken] = {}
    for path in paths:
        folders = _result_folders(path)
        if not folders:
            raise DataError(
                f"no results in this folder: neither a run ({MANIFEST}) nor a pruned network",
                where=path,
                fix="give a folder written by sipp prune --out FOLDER, sipp.save_folder or sipp run",
            )
        for folder in folders:
            resolved = folder.resolve()
            if resolved in results:
                continue
            try:
                results[resolved] = (read_run if (folder / MANIFEST).exists() else read_pruned_result)(folder)
            except (DataError, OSError) as error:
                if folder == path:  # named by the caller
                    raise
                broken[resolved] = Broken(folder, str(error))
    return list(results.values()), list(broken.values())


def _is_result(folder: Path) -> bool:
    """Whether this is a result, intact or not."""
    return any((folder / name).exists() for name in (MANIFEST, RECORD_NAME, JOURNAL_NAME))


def _result_folders(path: Path, depth: int = DEPTH) -> list[Path]:
    """The folder itself if it is a result, else the results in it or in its subfolders."""
    if _is_result(path):
        return [path]
    try:
        folders = sorted(inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink())
        direct = [inner for inner in folders if _is_result(inner)]
        if direct or depth == 0:
            return direct
        return [folder for inner in folders for folder in _result_folders(inner, depth - 1)]
    except FileNotFoundError as error:
        raise DataError(
            "there is no such folder", where=path, fix="check the name, and the folder you are in"
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read as a folder ({error.strerror or error})", where=path) from error


# --- the page ---------------------------------------------------------------------------------------------------------


def write_results(
    path: Path,
    results: Sequence[Result],
    broken: Sequence[Broken] = (),
    *,
    force: bool,
    study: Study | None = None,
    form: Form = "short",
    title: str = "",
) -> None:
    """Writes the page of these results; an existing file is replaced only with `force`."""
    check_file(path, force=force, makes_folder=True)
    make_folder(path.parent)
    text = render(results, broken, study=study, form=form, title=title)
    write_atomic(path, text.encode(errors="replace"))  # a folder name may not be valid text


def render(
    results: Sequence[Result],
    broken: Sequence[Broken] = (),
    *,
    study: Study | None = None,
    form: Form = "short",
    title: str = "",
) -> str:
    """The page of these results in order, with those that could not be read.

    Runs that differ only in seeds or methods share an article. With several articles, or for a study, the page starts
    with a comparison, and the articles are collapsed below.
    `title` is used for a page with several results.
    """
    articles = _articles(results, study, form)
    heading = title or f"{len(results)} pruning results" if len(articles) != 1 else ""
    only_runs = all(isinstance(result, Run) for result in results)
    arms = [series.methods_of(result) if isinstance(result, Run) else (result.arm,) for result in results]
    return render_page(
        articles,
        [name for names in arms for name in names],
        heading=heading if study is None else f"Study {study.name} ({form})",
        broken=[f"Not shown: {one.folder.name} is broken. {one.what}" for one in broken],
        words=RUN_WORDS if only_runs else {},
    )


def _articles(results: Sequence[Result], study: Study | None, form: Form) -> list[Article]:
    """The articles of the page: comparisons first, then single results."""
    panels = panels_of([result for result in results if isinstance(result, Run)])
    models = [result for result in results if isinstance(result, PrunedModel)]
    compared = [comparison(panels, study, form)] if len(panels) > 1 or study is not None else []
    single = [panel_article(panel, f"part{i}") for i, panel in enumerate(panels)]
    of_networks = network_articles(models) if models else []
    if len(models) > 1:
        compared.append(of_networks.pop(0))
    return compared + [replace(article, is_closed=bool(compared)) for article in single + of_networks]
