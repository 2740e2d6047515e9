"""``report``: the page of a run, of one that goes on, or of several beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from paddle_recompute.app.cli._process import as_json, command, prepare_one_process, tell_written
from paddle_recompute.errors import OutputError


@command(
    click.option(
        "--output",
        metavar="FILE",
        help="A .html file; by default report.html in RUN, or, of several, comparison.html here.",
    ),
    click.option("--follow", is_flag=True, help="Write the page again while a RUN goes on."),
    as_json,
    click.argument("runs", nargs=-1, required=True, metavar="RUN..."),
    interrupted="interrupted; the page is as it was written last",
)
def report(output: str | None, follow: bool, as_json: bool, runs: tuple[str, ...]) -> None:
    """Write the report of a run, or compare runs.

    For example: paddle-recompute report outputs/a outputs/b --output both.html

    RUN is the train.output_dir of a run. The page stands alone: open it in a browser, or send it.
    With --follow the browser loads it again while a run goes on.
    """
    if output is not None and Path(output).suffix != ".html":
        raise OutputError(f"--output {output}: must end in .html; any file there is replaced")
    prepare_one_process("Reading the run and drawing its page")
    from paddle_recompute.app.report import follow_report, write_report

    write = follow_report if follow else write_report
    path = write([Path(run) for run in runs], Path(output) if output else None)
    tell_written(path, f"written: {path}", as_json)
