"""Read a configuration file, apply overrides, and report every fault in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from paddle_recompute.app.config._model import PRESETS
from paddle_recompute.app.config._section import MISSING, allowed
from paddle_recompute.app.config._yaml import LARGEST, parse
from paddle_recompute.app.config.config import Config
from paddle_recompute.errors import ConfigError

_SHOWN = 60  # characters of a received value in a message
_MOST_NAMES = 10
_MOST_FAULTS = 50


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
    return _load(path, overrides)[0]


@dataclass(frozen=True)
class Setting:
    """One value of a configuration, and where it comes from.

    Attributes:
        path: ``"train.max_steps"``.
        value: In plain YAML/JSON types.
        source: ``"line 3"`` of the file, ``"override train.max_steps=50"``, ``"preset base"`` or
            ``"default"``.
    """

    path: str
    value: Any
    source: str


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> list[Setting]:
    """Every value of a configuration, in the order of the sections.

    Raises:
        ConfigError: As `load_config` does.
    """
    config, source = _load(path, overrides)
    preset = {} if config.model.preset is None else PRESETS[config.model.preset]

    def told(path: str) -> str:
        names = path.split(".")
        prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
        # A section's own line says nothing of a value in it, unless an override set all of it.
        for prefix in prefixes:
            place = source.places.get(prefix)
            if place and (prefix == path or place.startswith("override")):
                return place
        is_of_preset = path.removeprefix("model.") in preset
        return f"preset {config.model.preset}" if is_of_preset else "default"

    return [Setting(name, value, told(name)) for name, value in config.settings().items()]


def _load(path: str | Path, overrides: Sequence[str]) -> tuple[Config, _ReadFile]:
    source = _read(Path(path))
    faults = [_apply(source, override) for override in overrides]
    messages = [message for message in faults if message]
    try:
        config = Config.model_validate(source.tree)
    except ValidationError as error:
        messages += _messages(error, source)
    else:
        if not messages:
            return config, source
    if len(messages) > _MOST_FAULTS:
        more = len(messages) - _MOST_FAULTS
        messages = [*messages[:_MOST_FAULTS], f"and {more} more"]
    count = "1 fault" if len(messages) == 1 else f"{len(messages)} faults"
    raise ConfigError("\n  - ".join([f"{path} has {count}:", *messages]))


@dataclass
class _ReadFile:
    """The tree as given, and where each of its values stands."""

    tree: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)  # dotted path -> "line 3"


def _read(path: Path) -> _ReadFile:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LARGEST + 1)
    except FileNotFoundError:
        near = sorted(str(other) for other in path.parent.glob("*.y*ml"))
        there = f"; the folder has {', '.join(near)}" if near else ""
        raise ConfigError(f"{path}: no such configuration file{there}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text ({error.reason})") from error
    except ValueError as error:
        raise ConfigError(f"{str(path)!r}: is no name of a file ({error})") from error
    tree, places = parse(text, str(path))
    if not isinstance(tree, dict):
        received = "nothing" if tree is None else f"only a {type(tree).__name__}"
        raise ConfigError(
            f"{path}: must hold a YAML mapping (key: value lines), it holds {received}"
        )
    return _ReadFile(tree, places)


def _apply(source: _ReadFile, override: str) -> str | None:
    """Put one override into the tree; returns what is wrong with it, if anything is."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    named = f"override {_shown(override)}"
    if not equals or not all(names) or len(names) > _MOST_NAMES:
        return f"{named}: must be written dotted.key=value, as in train.max_steps=50"
    try:
        value, _ = parse(text, f"{named}: the value", has_lines=False)
    except ConfigError as error:
        return str(error)
    section = source.tree
    for depth, name in enumerate(names[:-1], start=1):
        if section.get(name) is None:
            section[name] = {}
        if not isinstance(section[name], dict):
            above = ".".join(names[:depth])
            return f"{named}: {above} is a value ({_shown(section[name])}), not a section"
        section = section[name]
    section[names[-1]] = value
    shown = override if len(override) <= _SHOWN else f"{override[:_SHOWN]}..."
    name = ".".join(names)
    for place in [place for place in source.places if place.startswith(f"{name}.")]:
        del source.places[place]  # the override replaces the whole section
    source.places[name] = f"override {shown}"
    return None


def _messages(error: ValidationError, source: _ReadFile) -> list[str]:
    """One line per fault: dotted path, where it stands, the value received, what is allowed."""
    messages = []
    for details in error.errors(include_url=False):
        path = ".".join(str(part) for part in details["loc"])
        named = path if len(path) <= 3 * _SHOWN else f"{path[: 3 * _SHOWN]}..."
        place = f" ({source.places[path]})" if path in source.places else ""
        wording = allowed(details["msg"])
        absent = details["type"] == MISSING or wording.startswith("required ")
        received = "" if absent else f"received {_shown(details['input'])}; "
        messages.append(f"{named}{place}: {received}{wording}")
    return messages


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python shows no integer of more than 4300 digits
        text = "an integer of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({type(value).__name__})"
