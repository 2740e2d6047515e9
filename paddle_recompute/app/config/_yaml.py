"""Read YAML: a tree of plain values within limits, or one sentence on what is wrong.

The dialect is what YAML 1.1 and 1.2 agree on: no dates, no numbers to the base 60 (``1:30:30`` is
5430 in YAML 1.1), no octal numbers with a leading 0, no explicit tags. An alias stands for a single
value, never for a list or a mapping: the tree is not larger than its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

import yaml

from paddle_recompute.errors import ConfigError

LARGEST = 1 << 16
"""Characters of a file, or of a value given as an override."""
_DEEPEST = 20
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"[-+]?(?:(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "value")}


class _Loader(yaml.SafeLoader):
    """Safe YAML in the dialect of this module; ``1e-4`` is a number, as in Python."""

    yaml_implicit_resolvers: ClassVar[Any] = {  # type: ignore[misc]
        first: [(tag, regex) for tag, regex in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Look at the depth, the tag and the alias of a node before anything is read of it."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        meant = self.anchors.get(event.anchor) if isinstance(event, yaml.AliasEvent) else None
        if isinstance(meant, yaml.CollectionNode):
            raise _fault(f"the alias *{event.anchor} stands for more than one value", event)
        if getattr(event, "tag", None) is not None:
            raise _fault(f"the tag {event.tag!r} is not supported; remove it", event)
        if self.depth == _DEEPEST:
            raise _fault(f"nested deeper than {_DEEPEST} levels", event)
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _fault(words: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=words, problem_mark=place.start_mark)


class _Dumper(yaml.SafeDumper):
    pass


for _one in (_Loader, _Dumper):
    _one.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INTEGER, list("-+0123456789"))


def parse(text: str, name: str, *, has_lines: bool = True) -> tuple[Any, dict[str, str]]:
    """The value that `text` stands for, and the line of each of its keys by dotted path.

    Args:
        text: One YAML document.
        name: What it is, for messages.
        has_lines: Whether messages name a line of it.

    Raises:
        ConfigError: It is none that this library reads; the message begins with `name`.
    """
    try:
        if len(text) > LARGEST:
            raise yaml.YAMLError(f"{len(text)} characters; at most {LARGEST} are read")
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        return loader.construct_document(node), dict(_places(node))
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a number of 5,000 digits, too
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}, column {mark.column + 1}:" if mark and has_lines else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    raise ConfigError(f"{name}{at} is not valid YAML: {problem[:200]}")


def line_of_yaml(value: Any) -> str:
    """One line that is read again as `value`: a text ``1e5`` is in quotes."""
    text = yaml.dump(value, None, _Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return str(text).removesuffix("\n").removesuffix("\n...")


def _places(node: yaml.Node, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted path and line of every key; raises where a mapping repeats one."""
    if not isinstance(node, yaml.MappingNode):
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        word, line = str(key.value), key.start_mark.line + 1
        if word in first_lines:
            first = f"first in line {first_lines[word]}"
            raise _fault(f"the key {prefix}{word} is given twice ({first}); remove either", key)
        first_lines[word] = line
        yield prefix + word, f"line {line}"
        yield from _places(value, f"{prefix}{word}.")
