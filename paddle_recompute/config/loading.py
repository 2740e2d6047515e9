"""Read a configuration file, apply overrides, and report every fault in one message."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from paddle_recompute.config._section import MISSING, allowed
from paddle_recompute.config.schema import Config
from paddle_recompute.errors import ConfigError

_SHOWN = 60  # characters of a received value in a message


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read `path`, apply `overrides`, and return the validated configuration.

    Reads only the file and the environment variable ``PADDLE_RECOMPUTE_CACHE``. Touches no device
    and does not import Paddle.

    Args:
        path: A YAML file, UTF-8.
        overrides: Strings ``"dotted.key=value"``; the value is YAML. The last override of a key
            counts.

    Returns:
        The checked configuration, frozen.

    Raises:
        ConfigError: The file cannot be read, is not a YAML mapping or repeats a key; or values are
            not allowed or contradict each other. The message then lists all faults.

    Examples:
        >>> config = load_config(
        ...     "fleet_configs/contrastive_ernie-tiny_2cpu.yaml", ["train.max_steps=50"]
        ... )
        >>> config.train.max_steps
        50
    """
    source = _read(Path(path))
    faults = [_apply(source, override) for override in overrides]
    messages = [message for message in faults if message]
    try:
        config = Config.model_validate(source.tree)
    except ValidationError as error:
        messages += _messages(error, source)
    else:
        if not messages:
            return config
    count = "1 fault" if len(messages) == 1 else f"{len(messages)} faults"
    raise ConfigError("\n  - ".join([f"{path} has {count}:", *messages]))


@dataclass
class _Source:
    """The tree as given, and where each of its values stands."""

    tree: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)  # dotted path -> "line 3"


class _Loader(yaml.SafeLoader):
    """Safe YAML 1.1, except that ``1e-4`` is a number, as in YAML 1.2 and in Python."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = sorted(str(other) for other in path.parent.glob("*.y*ml"))
        there = f"; the folder has {', '.join(near)}" if near else ""
        raise ConfigError(f"{path}: no such configuration file{there}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason})") from error
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        places = dict(_places(node, path)) if node else {}
        tree = loader.construct_document(node) if node else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: {_yaml_fault(error)}") from error
    if not isinstance(tree, dict):
        received = "nothing" if tree is None else f"only a {type(tree).__name__}"
        raise ConfigError(
            f"{path}: must hold a YAML mapping (key: value lines), it holds {received}"
        )
    return _Source(tree, places)


def _places(
    node: yaml.Node, path: Path, prefix: str = "", above: tuple[yaml.Node, ...] = ()
) -> Iterator[tuple[str, str]]:
    """Dotted path and line of every key; raises where a mapping repeats one."""
    if not isinstance(node, yaml.MappingNode) or node in above:
        return
    first_lines: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in first_lines:
            raise ConfigError(
                f"{path}, line {line}: the key {prefix}{name} is given twice (first in line "
                f"{first_lines[name]}); remove one of them"
            )
        first_lines[name] = line
        yield prefix + name, f"line {line}"
        yield from _places(value, path, f"{prefix}{name}.", (*above, node))


def _yaml_fault(error: yaml.YAMLError) -> str:
    return f"is not valid YAML: {getattr(error, 'problem', None) or error}"


def _apply(source: _Source, override: str) -> str | None:
    """Put one override into the tree; returns what is wrong with it, if anything is."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        return f"override {override!r}: must be written dotted.key=value, as in train.max_steps=50"
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        return f"override {override!r}: the value {_yaml_fault(error)}"
    section = source.tree
    for depth, name in enumerate(names[:-1], start=1):
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            above = ".".join(names[:depth])
            return f"override {override!r}: {above} is a value ({section[name]!r}), not a section"
        section = section[name]
    section[names[-1]] = value
    source.places[".".join(names)] = f"override {override}"
    return None


def _messages(error: ValidationError, source: _Source) -> list[str]:
    """One line per fault: dotted path, where it stands, the value received, what is allowed."""
    messages = []
    for details in error.errors(include_url=False):
        path = ".".join(str(part) for part in details["loc"])
        place = f" ({source.places[path]})" if path in source.places else ""
        wording = allowed(details["msg"])
        absent = details["type"] == MISSING or wording.startswith("required ")
        received = "" if absent else f"received {_shown(details['input'])}; "
        messages.append(f"{path}{place}: {received}{wording}")
    return messages


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"
