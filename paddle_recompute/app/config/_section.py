"""The base of every section of the configuration: it finds all faults, not only the first.

Pydantic checks each field alone and runs a check of *several* fields only once every one of them
is sound. `Section` runs such checks (`rules`) on the values that are sound. So one message can
report both a wrong type and an impossible batch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import (
    CoreSchema,
    no_info_plain_validator_function,
    plain_serializer_function_ser_schema,
)

from paddle_recompute.app.config._types import Count
from paddle_recompute.options import Options, Rule

MISSING = "missing"  # pydantic's error type for a required field that is not given
FAULT = "fault"  # error type of everything else that is worded here
_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "list": "a list, as in [a, b]",
}
_LIMITS = {"above": "gt", "below": "lt"}

Broken = Iterator[tuple[str, str]]
"""What a rule yields: the dotted path of the value to blame, and what to do about it."""
Completion = Callable[[dict[str, Any]], dict[str, Any]]


class Values:
    """The values without a fault of one section, by dotted path; rules read them.

    Reading a value that is faulty, or missing, ends the rule that asked (it was reported already).
    """

    def __init__(self, section: type[Section], sound: dict[str, Any]) -> None:
        self._section = section
        self._sound = sound

    def __getitem__(self, path: str) -> Any:
        self.default(path)  # whether there is such a field, whatever is sound
        value: Any = self._sound
        for name in path.split("."):
            if name not in value:
                raise FaultyValue(path)
            value = value[name]
        return value

    def default(self, path: str) -> Any:
        """What the value is where the file does not give it."""
        *sections, name = path.split(".")
        section: type[Section] | None = self._section
        for key in sections:
            section = subsection(section, key) if section else None
        if section is None or name not in section.model_fields:
            raise AssertionError(f"{self._section.__name__} has no field {path!r}")
        inner = subsection(section, name)
        return sound_values(inner, {}, ()) if inner else default_of(section, name)


class FaultyValue(Exception):
    """A rule asked for a value that is itself at fault."""


class Section(BaseModel):
    """One mapping of the configuration file: typed, frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    unknown_key: ClassVar[str] = "unknown key"
    # Keys that a reader may well expect here, with the words that say why they are refused.
    refused_keys: ClassVar[Mapping[str, str]] = {}
    # The same for values: {field: {value: words}}.
    refused_values: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    # The field from which others follow: while it is faulty, no error says that those are missing.
    completed_by: ClassVar[str | None] = None

    @staticmethod
    def complete(given: dict[str, Any]) -> dict[str, Any]:
        """Fill in what follows from other values (a preset); the identity in most sections."""
        return given

    @model_validator(mode="wrap")
    @classmethod
    def _find_all_faults(cls, given: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if isinstance(given, Mapping):
            given = cls.complete(dict(given))
        faults: list[InitErrorDetails] = []
        section = None
        try:
            section = handler(given)
        except ValidationError as error:
            faults += [cls._reworded(details) for details in cls._one_per_union(error.errors())]
        if isinstance(given, Mapping):
            faulty = {details["loc"] for details in faults}
            if (cls.completed_by,) in faulty:
                faults = [details for details in faults if not _is_missing(details)]
            sound = section.model_dump() if section else sound_values(cls, given, faulty)
            faults += cls._broken_rules(Values(cls, sound))
        if faults:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return section

    @classmethod
    def _one_per_union(cls, errors: list[Any]) -> list[dict[str, Any]]:
        """Join what pydantic says of each member of ``int | Literal["auto"]`` into one error."""
        joined: dict[tuple[int | str, ...], dict[str, Any]] = {}
        for details in errors:
            location = details["loc"]
            of_member = len(location) == 2 and isinstance(location[1], str)
            if of_member and not subsection(cls, str(location[0])):
                location = location[:1]
            if location in joined:
                alternative = allowed(details["msg"]).removeprefix("must be ")
                joined[location]["msg"] += f" or {alternative}"
            else:
                joined[location] = {**details, "loc": location}
        return list(joined.values())

    @classmethod
    def _reworded(cls, details: Any) -> InitErrorDetails:
        location, kind, value = details["loc"], details["type"], details["input"]
        message = details["msg"]
        if len(location) == 1 and kind != FAULT:
            message = cls._words(str(location[0]), kind, value, message)
            kind = MISSING if kind == MISSING else FAULT
        # Pydantic fills "{name}" from a context; ours is empty, so braces in a value stay.
        return {"type": PydanticCustomError(kind, message), "loc": location, "input": value}

    @classmethod
    def _words(cls, name: str, kind: str, value: Any, message: str) -> str:
        """What is allowed for the field `name`, in place of pydantic's own sentence."""
        known = list(cls.model_fields)
        if name not in known:
            near = nearest(name, known) or f"; allowed here: {', '.join(known)}"
            return cls.refused_keys.get(name) or cls.unknown_key + near
        if kind == MISSING:
            return f"required, but not given: {cls.model_fields[name].description}"
        words = cls.refused_values.get(name, {})
        if isinstance(value, str | int) and value in words:
            return words[value]
        return allowed(message) + nearest(value, _literal_values(cls, name))

    @classmethod
    def _broken_rules(cls, values: Values) -> Iterator[InitErrorDetails]:
        for rule in cls.rules:
            try:
                broken = [(path, message, values[path]) for path, message in rule(values)]
            except FaultyValue:
                continue
            yield from (fault(*of_value) for of_value in broken)


def fault(path: str, message: str, value: Any) -> InitErrorDetails:
    """What is wrong with the value of a field."""
    return {
        "type": PydanticCustomError(FAULT, message),
        "loc": tuple(path.split(".")),
        "input": str(value) if isinstance(value, Path) else value,
    }


def section_of(
    options: type[Options], complete: Completion = Section.complete, **kinds: Any
) -> type[Section]:
    """What YAML may hold for options of the library: the same names, defaults, limits and rules.

    Args:
        options: The dataclass.
        complete: As `Section.complete`.
        **kinds: The type of a field, where YAML may hold more or less than the dataclass.
    """
    hints = typing.get_type_hints(options)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        limits = {_LIMITS[name]: value for name, value in field.metadata.items() if name in _LIMITS}
        kind = Count if hints[field.name] is int else Annotated[hints[field.name], Field(**limits)]
        default = field.default
        if default is dataclasses.MISSING:
            default = Field(default_factory=field.default_factory)  # type: ignore[arg-type]
        fields[field.name] = (kinds.get(field.name, kind), default)
    section = create_model(options.__name__, __base__=Section, __doc__=options.__doc__, **fields)
    section.rules = options.rules
    section.complete = staticmethod(complete)  # type: ignore[assignment, method-assign]
    return section


class Holds:
    """Annotates a field that holds options of the library: YAML's values are checked as `section`.

    Args:
        section: As from `section_of`.
    """

    def __init__(self, section: type[Section]) -> None:
        self.section = section

    def __get_pydantic_core_schema__(self, options: type[Options], handler: Any) -> CoreSchema:
        """Pydantic's hook: how a value of the field is read."""

        def read(given: Any) -> Options:
            if isinstance(given, options):
                return given
            found = self.section.model_validate(given)
            return options(**{name: getattr(found, name) for name in self.section.model_fields})

        return no_info_plain_validator_function(
            read, serialization=plain_serializer_function_ser_schema(dataclasses.asdict)
        )


def subsection(section: type[Section], name: str) -> type[Section] | None:
    """The section that the field `name` is, or is read as."""
    field = section.model_fields.get(name)
    if field is None:
        return None
    kind = next(
        (annotation.section for annotation in field.metadata if isinstance(annotation, Holds)),
        field.annotation,
    )
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def setting_names(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted path of every setting, in the order of the sections."""
    for name in section.model_fields:
        inner = subsection(section, name)
        if inner is None:
            yield prefix + name
        else:
            yield from setting_names(inner, f"{prefix}{name}.")


def default_of(section: type[Section], name: str) -> Any:
    """The default of the field `name`."""
    return section.model_fields[name].get_default(call_default_factory=True)


def sound_values(
    section: type[Section], given: Any, faulty: Iterable[tuple[int | str, ...]]
) -> dict[str, Any]:
    """Every value of `given` that no fault points into; defaults stand for what is not given."""
    if isinstance(given, Section):
        return given.model_dump()
    if isinstance(given, Options):
        return dataclasses.asdict(given)
    given = dict(given) if isinstance(given, Mapping) else {}
    with suppress(ValidationError):  # it was reported
        given = section.complete(given)
    sound: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inside = [location[1:] for location in faulty if location[:1] == (name,)]
        inner = subsection(section, name)
        value = given.get(name, {} if inner else default_of(section, name))
        if () in inside or (inside and not inner) or (name not in given and field.is_required()):
            continue
        sound[name] = sound_values(inner, value, inside) if inner else value
    return sound


def _literal_values(section: type[Section], name: str) -> list[str]:
    """The words that the field `name` accepts, if it accepts only certain words."""
    annotation = section.model_fields[name].annotation
    options = [annotation, *typing.get_args(annotation)]
    literals = [option for option in options if typing.get_origin(option) is Literal]
    words = [word for literal in literals for word in typing.get_args(literal)]
    return [word for word in words if isinstance(word, str)]


def _is_missing(details: InitErrorDetails) -> bool:
    kind = details["type"]
    return isinstance(kind, PydanticCustomError) and kind.type == MISSING


def allowed(message: str) -> str:
    """Pydantic's sentence about a value, turned into what is allowed."""
    message = re.sub(r" after validation, not \d+$", "", message)
    settings = "a mapping of settings; remove it for the defaults"
    message = re.sub(r"a valid dictionary( or instance of \w+)?$", settings, message)
    for kind, words in _KINDS.items():
        message = message.replace(f"a valid {kind}", words)
    return re.sub(r"^(Value error, )?\w+ should (?=be|have)", "must ", message)


def nearest(word: Any, known: list[str]) -> str:
    """``; did you mean ...?`` with the nearest known word, and a second if about as near."""
    text = str(word)
    found = difflib.get_close_matches(text, known, n=2, cutoff=0.6)
    ratios = [difflib.SequenceMatcher(None, name, text).ratio() for name in found]
    found = [name for name, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - 0.1]
    return f"; did you mean {' or '.join(found)}?" if found else ""
