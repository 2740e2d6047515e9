"""A page that stands alone: text, tables and charts, with all that they need inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from paddle_recompute._files import writing, written_whole

if TYPE_CHECKING:
    from bokeh.model import Model
    from bokeh.plotting import figure

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Part:
    """A part of a page; what is empty is left out.

    Attributes:
        title: Its heading.
        chart: Stands first.
        head: The heads of the columns.
        rows: The cells.
        numbers: The columns that hold numbers.
        text: In a fixed-width font.
        note: Sentences below, a line for each.
        is_wide: Whether it takes the whole width.
        is_folded: Whether a click opens it.
        is_stacked: Whether the cells of a row stand one under the other on a phone.
    """

    title: str
    chart: figure | None = None
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    numbers: Sequence[int] = ()
    text: str = ""
    note: str = ""
    is_wide: bool = False
    is_folded: bool = False
    is_stacked: bool = False

    @property
    def tag(self) -> str:
        return "details" if self.is_folded else "section"

    def kind(self, column: int) -> str:
        return "number" if column in self.numbers else ""


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: Its heading.
        subtitle: A line below.
        tiles: (value, words) of the most important figures.
        parts: In order.
    """

    title: str
    subtitle: str
    tiles: Sequence[tuple[str, str]] = ()
    parts: Sequence[Part] = field(default_factory=tuple)

    def write(self, path: Path, *, reload_seconds: int | None = None) -> None:
        """Write the page, whole or not at all.

        Args:
            path: The file. With charts it has 1.3 MB, most of them the library that draws.
            reload_seconds: After these, a browser loads the page again; None: it does not.

        Raises:
            OutputError: It cannot be written.
        """
        from bokeh.embed import components
        from bokeh.resources import Resources

        drawn: dict[str, Model] = {
            str(number): part.chart for number, part in enumerate(self.parts) if part.chart
        }
        script, charts = components(drawn, wrap_script=False) if drawn else ("", {})
        library = Resources(mode="inline", components=["bokeh"]).render_js() if drawn else ""
        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        text = page.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
            title=self.title,
            subtitle=self.subtitle,
            tiles=self.tiles,
            parts=self.parts,
            reload_seconds=reload_seconds,
            charts={int(number): Markup(div) for number, div in charts.items()},
            library=Markup(library),
            script=Markup(script),
        )
        with (
            writing(path, "free the disk, or name another file"),
            written_whole(path) as unfinished,
        ):
            unfinished.write_text(text, encoding="utf-8")
