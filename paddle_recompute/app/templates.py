"""Words and pages for people: templates beside the modules that have the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def render(file: Path, /, **values: Any) -> str:
    """The text of a template of Jinja; in a ``.html`` file, values are escaped.

    Raises:
        TemplateError: It shows a value that is not given.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

    templates = Environment(
        loader=FileSystemLoader(file.parent),
        autoescape=select_autoescape(["html"]),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return templates.get_template(file.name).render(**values)
