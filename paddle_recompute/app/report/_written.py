"""Write the page of a run, of several, or of one that goes on."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jinja2 import TemplateError

from paddle_recompute._run_folder import EVENTS, METRICS, RECORD, REPORT, is_held
from paddle_recompute.app.report._files import RunFiles
from paddle_recompute.app.report._pages import comparison_page, run_page, write_page
from paddle_recompute.errors import DependencyError, OutputError, PaddleRecomputeError

COMPARISON = "comparison.html"
PERIOD = 10
"""Seconds between two pages of a run that goes on."""


def require_bokeh() -> None:
    """Check that pages can be made, without the import, which takes a second.

    Raises:
        DependencyError: Bokeh is not installed.
    """
    if importlib.util.find_spec("bokeh") is None:
        raise DependencyError(
            "the report of a run needs Bokeh, which is not installed; pip install bokeh "
            "(or 'paddle-recompute[train]')"
        )


def write_report(
    folders: Sequence[Path],
    output: Path | None = None,
    *,
    is_running: bool | None = None,
    reload_seconds: int | None = None,
) -> Path:
    """Write the page of a run, or of several beside each other.

    Args:
        folders: The ``train.output_dir`` of each run.
        output: The file; None: ``report.html`` in the folder, or, of several runs,
            ``comparison.html`` here: each run keeps its own page.
        is_running: Whether the runs go on; None: see which folders are held.
        reload_seconds: After these, a browser loads the page of a run that goes on again; None: it
            does not.

    Returns:
        The file.

    Raises:
        OutputError: A folder holds no run, or a damaged one, or the page cannot be written.
        PlanError: A ``plan.json`` is no plan.
        DependencyError: Bokeh is not installed.
    """
    require_bokeh()
    path = output or (folders[0] / REPORT if len(folders) == 1 else Path(COMPARISON))
    with _records_of(folders):
        runs = [RunFiles.read(folder, is_running=is_running) for folder in folders]
        page = run_page(runs[0]) if len(runs) == 1 else comparison_page(runs)
        goes_on = any(run.is_running for run in runs)
        write_page(path, reload_seconds=reload_seconds if goes_on else None, **page)
    return path


@contextmanager
def _records_of(folders: Sequence[Path]) -> Iterator[None]:
    """Inside, a page is made of what was read, and a record that does not fit it is damaged."""
    try:
        yield
    except PaddleRecomputeError:
        raise
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TemplateError,
        TypeError,
        ValueError,
    ) as error:
        raise OutputError(
            f"{', '.join(map(str, folders))}: a record in {METRICS}, {EVENTS} or {RECORD} is "
            f"damaged ({type(error).__name__}: {str(error)[:200]}); remove that record"
        ) from error


def follow_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page as `write_report` does, and again when a run has noted more, until all end.

    A browser loads the page again meanwhile. Costs half a second of one core for each page.
    """
    before: object = None
    while True:
        goes_on = any(map(is_held, folders))
        files = [folder / name for folder in folders for name in (METRICS, EVENTS, RECORD)]
        now = [file.stat().st_mtime_ns if file.exists() else 0 for file in files]
        has_begun = all((folder / METRICS).exists() for folder in folders)
        if not goes_on or (has_begun and now != before):
            path = write_report(folders, output, reload_seconds=PERIOD)
            before = now
        if not goes_on:
            return path
        time.sleep(PERIOD)
