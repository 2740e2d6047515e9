"""A page that stands alone: text, tables and charts, with all that they need inside.

What a page says is in its template: ``run.html``, ``comparison.html``, ``memory.html``. They fill in
``page.html`` with the pieces of ``parts.html``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from paddle_recompute._files import write_text
from paddle_recompute._paddle.memory import format_bytes
from paddle_recompute.app.report._files import flat
from paddle_recompute.app.templates import render

if TYPE_CHECKING:
    from bokeh.plotting import figure

_HERE = Path(__file__).parent


def write_page(
    path: Path,
    template: str,
    charts: Mapping[str, figure],
    *,
    reload_seconds: int | None = None,
    **values: Any,
) -> None:
    """Write a page, whole or not at all.

    Args:
        path: The file. With charts it has 1.3 MB, most of them the library that draws.
        template: The file of its words.
        charts: By the names that the template has for them.
        reload_seconds: After these, a browser loads the page again; None: it does not.
        **values: What the template shows; ``title`` in each.

    Raises:
        OutputError: It cannot be written.
    """
    from bokeh.embed import components
    from bokeh.resources import Resources
    from bokeh.themes import Theme

    script, drawn, library = "", dict[str, str](), ""
    if charts:
        theme = Theme(filename=str(_HERE / "theme.yaml"))
        script, drawn = components(dict(charts), wrap_script=False, theme=theme)
        library = Resources(mode="inline", components=["bokeh"]).render_js()
    text = render(
        _HERE / template,
        charts={name: Markup(div) for name, div in drawn.items()},
        library=Markup(library),
        script=Markup(script),
        reload_seconds=reload_seconds,
        flat=flat,
        shown=shown,
        duration=duration,
        clock=_clock,
        **values,
    )
    write_text(path, text, "free the disk, or name another file")


def duration(seconds: float | None) -> str:
    """``2 h 5 min``, ``3 min 12 s``, ``40 s``; a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def shown(value: Any, name: str = "") -> str:
    """A setting as YAML has it; bytes with their unit, where the name says that they are some."""
    if name.endswith(("_bytes", "memory_budget")) and isinstance(value, int):
        return format_bytes(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
