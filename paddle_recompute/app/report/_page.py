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

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{% if reload_seconds %}<meta http-equiv="refresh" content="{{ reload_seconds }}">{% endif %}
<title>{{ title }}</title>
<style>
  :root { color-scheme: light dark; --ink: #1f2933; --quiet: #616e7c; --line: #e4e7eb;
    --accent: #0f766e; --page: #f5f7fa; --part: #fff; }
  @media (prefers-color-scheme: dark) {
    :root { --ink: #e4e7eb; --quiet: #9aa5b1; --line: #3e4c59; --accent: #5eead4;
      --page: #12181f; --part: #1f2933; }
    .chart { filter: invert(1) hue-rotate(180deg); }
  }
  body { font: 16px/1.5 system-ui, sans-serif; margin: 0; color: var(--ink);
    background: var(--page); }
  main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
  h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
  h2 { font-size: 1.1rem; margin: 0 0 .5rem; }
  .quiet { color: var(--quiet); margin: .4rem 0; font-size: .9rem; }
  section, details { background: var(--part); border-radius: .6rem; padding: 1rem 1.25rem;
    min-width: 0; box-shadow: 0 1px 3px rgb(0 0 0 / 8%); }
  .tiles, .parts { display: grid; gap: 1rem; margin: 1rem 0; }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); }
  .tiles strong { display: block; font-size: 1.6rem; line-height: 1.2; color: var(--accent); }
  .tiles span { color: var(--quiet); font-size: .85rem; }
  .parts { grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); }
  .wide { grid-column: 1 / -1; }
  summary { cursor: pointer; font-weight: 600; font-size: 1.1rem; }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
    font-size: .9rem; }
  th, td { text-align: left; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line);
    vertical-align: top; overflow-wrap: break-word; white-space: pre-line; }
  td.number, th.number { text-align: right; white-space: nowrap; }
  td.number + td:not(.number), th.number + th:not(.number) { padding-left: .75rem; }
  td ol { margin: 0; padding-left: 1.2rem; }
  .right { font-weight: 600; color: var(--accent); }
  pre { overflow-x: auto; font-size: .85rem; margin: .5rem 0 0; }
  @media (max-width: 40rem) {
    main { padding: 1rem .5rem 3rem; }
    section, details { padding: .75rem; }
    table.stacked tr { display: block; border-bottom: 1px solid var(--line); padding: .4rem 0; }
    table.stacked th { display: none; }
    table.stacked td { display: block; border: 0; padding: .1rem 0; text-align: left; }
    table.stacked td[data-head]::before { content: attr(data-head) ": "; color: var(--quiet); }
  }
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
<p class="quiet">{{ subtitle }}</p>
{% if tiles %}<div class="tiles">
{% for value, words in tiles %}
<section><strong>{{ value }}</strong><span>{{ words }}</span></section>
{% endfor %}</div>{% endif %}
<div class="parts">
{% for part in parts %}
<{{ part.tag }} class="{{ 'wide' if part.is_wide or part.is_folded }}">
{% if part.is_folded %}<summary>{{ part.title }}</summary>
{% else %}<h2>{{ part.title }}</h2>{% endif %}
{% if part.chart %}
<div class="chart">{{ charts[loop.index0] }}</div>
{% endif %}
{% if part.rows %}<div class="scroll"><table class="{{ 'stacked' if part.is_stacked }}">
<tr>{% for name in part.head %}<th class="{{ part.kind(loop.index0) }}">{{ name }}</th>{% endfor %}
</tr>
{% for row in part.rows %}<tr>{% for cell in row %}
<td class="{{ part.kind(loop.index0) }}"{% if part.is_stacked and loop.index0 %}
 data-head="{{ part.head[loop.index0] }}"{% endif %}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}
{% if part.text %}<pre>{{ part.text }}</pre>{% endif %}
{% for line in part.note.splitlines() %}<p class="quiet">{{ line }}</p>
{% endfor %}
</{{ part.tag }}>
{% endfor %}
</div>
</main>
{{ library }}
<script>
{{ script }}
// A finger that moves over a chart scrolls the page.
if (matchMedia("(pointer: coarse)").matches) document.addEventListener("DOMContentLoaded", () => {
  const wait = setInterval(() => {
    const plots = Bokeh.documents.flatMap((one) => one.roots());
    if (plots.length) clearInterval(wait);
    for (const plot of plots) plot.toolbar.active_drag = null;
  }, 50);
});
</script>
</body>
</html>
"""


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
        text = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
            _TEMPLATE
        )
        page = text.render(
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
            unfinished.write_text(page, encoding="utf-8")
