"""The options of several rooms: frozen dataclasses that check themselves when they are made.

They work without Paddle, so that a configuration can be read and checked where there is none.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal

from paddle_recompute.errors import ConfigError

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST_DIGITS = 20
_AMOUNT = re.compile(rf"(\d+(?:\.\d+(?!$))?) ?({'|'.join(_UNITS)})")


# Of AmpConfigs: the dtype that each of Paddle's switches stands for; what belongs to the loss
# scale, and of that, to its changes.
PURE = {"use_pure_fp16": "float16", "use_pure_bf16": "bfloat16"}
_DYNAMIC_SCALE = ("incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio", "decr_ratio")
_SCALE = ("init_loss_scaling", "use_dynamic_loss_scaling", *_DYNAMIC_SCALE)

_FORMERS_PARTS = {"": "", "full_attn": ".self_attn", "mlp": ".mlp"}
"""A block, and names of ``recompute_modules`` of PaddleFormers that are sublayers of a block."""

AUTO: Final = "auto"
"""``checkpoints: auto``, which is kept as the list of this one word."""


class Given(typing.Protocol):
    """Options as they are given: ``given["offload"]``, or by a dotted path."""

    def __getitem__(self, path: str) -> Any:
        """The value."""

    def default(self, path: str) -> Any:
        """What it is where it is not given."""


Rule = Callable[[Any], Iterable[tuple[str, str]]]
"""Reads what is `Given`, and yields the path of a value to blame and what to do about it."""


def apart(condition: str, *others: str, because: str = "") -> tuple[Rule, ...]:
    """A rule for each of `others`: it and `condition` do not go together.

    Args:
        condition: ``"policy=budget"``; or ``"policy"``, any value but the default. Several that
            hold together are joined by ``" & "``; the first is the one that is reported.
        *others: Conditions; their option is to blame.
        because: The reason, and behind a semicolon what to do; else one is to be removed.
    """

    def refuse(given: Given, other: str) -> Iterator[tuple[str, str]]:
        if all([_holds(given, part) for part in (*condition.split(" & "), other)]):
            path = condition.partition(" & ")[0].partition("=")[0]
            reason = f": {because}" if because else ""
            advice = "" if "; " in because else "; remove one of them"
            words = f"does not go with {path}: {in_yaml(given[path])}{reason}{advice}"
            yield other.partition("=")[0], words

    return tuple(partial(refuse, other=other) for other in others)


def needs(other: str, *conditions: str) -> tuple[Rule, ...]:
    """A rule for each of `conditions`, as `apart` takes them: it needs that `other` holds."""
    path, _, value = other.partition("=")

    def refuse(given: Given, condition: str) -> Iterator[tuple[str, str]]:
        is_given, is_met = _holds(given, condition), _holds(given, other)
        if is_given and not is_met:
            words = f"has no effect without {path}; set it"
            if value:
                words = f"has no effect with {path}: {in_yaml(given[path])}; set {path}: {value}"
            yield condition.partition("=")[0], f"{words}, or remove this"

    return tuple(partial(refuse, condition=condition) for condition in conditions)


def _holds(given: Given, condition: str) -> bool:
    path, equals, value = condition.partition("=")
    if equals:
        return in_yaml(given[path]) == value
    return bool(given[path] != given.default(path))


def in_yaml(value: Any) -> str:
    """A plain value as a configuration has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Options:
    """Base of a frozen dataclass of options.

    A field may have limits in its metadata: ``at_least``, ``above``, ``below``.

    Raises:
        ConfigError: A value has another type or is not allowed, or two contradict each other. The
            message lists all faults.
    """

    rules: ClassVar[tuple[Rule, ...]] = ()

    def __post_init__(self) -> None:
        faults = list(self._wrong_values())
        if not faults:
            faults = [fault for rule in self.rules for fault in rule(self)]
        if faults:
            told = [f"{name}: received {self[name]!r}; {words}" for name, words in faults]
            raise ConfigError("\n  - ".join([f"{type(self).__name__}:", *told]))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def default(self, name: str) -> Any:
        """The default of an option."""
        [one] = [spec for spec in dataclasses.fields(self) if spec.name == name]
        made = one.default_factory
        return one.default if made is dataclasses.MISSING else made()

    def _wrong_values(self) -> Iterator[tuple[str, str]]:
        hints = typing.get_type_hints(type(self))
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            words = _allowed(hints[spec.name], value) or _within(spec.metadata, value)
            if words is not None:
                yield spec.name, f"must be {words}"


def _allowed(hint: Any, value: Any) -> str | None:
    """What a value of the type `hint` is, in words; None if `value` is one."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        found = [_allowed(allowed_type, value) for allowed_type in inner]
        return None if None in found else " or ".join(words for words in found if words)
    if origin is Literal:
        is_one = any(
            type(value) is type(allowed_value) and value == allowed_value for allowed_value in inner
        )
        return None if is_one else " or ".join(repr(allowed_value) for allowed_value in inner)
    if origin in (list, tuple):
        is_list = isinstance(value, list | tuple)
        if is_list and not any(_allowed(inner[0], element) for element in value):
            return None
        return f"a list, each of it {_allowed(inner[0], object())}"
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return None if is_number and math.isfinite(value) else "a finite number"
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return None
    names = {int: "a whole number", bool: "True or False", str: "text", type(None): "None"}
    return names.get(hint, f"of type {hint.__name__}")


def _within(limits: typing.Mapping[str, Any], value: Any) -> str | None:
    if not isinstance(value, int | float):
        return None
    if "at_least" in limits and value < limits["at_least"]:
        return f"at least {limits['at_least']}"
    if "above" in limits and value <= limits["above"]:
        return f"greater than {limits['above']}"
    if "below" in limits and value >= limits["below"]:
        return f"less than {limits['below']}"
    return None


def byte_count(text: str) -> int:
    """The number of bytes that ``"1.5GiB"`` stands for.

    Raises:
        ConfigError: It stands for none.
    """
    amount = _AMOUNT.fullmatch(text.strip())
    if amount is None or not float(amount[1]):
        raise ConfigError(
            f"{text!r} is no number of bytes: give a number above 0, or one with a unit (B, KiB, "
            "MiB, GiB, TiB) as in 2GiB"
        )
    if len(amount[1]) > _MOST_DIGITS:
        raise ConfigError(f"{text!r} is no number of bytes: give at most {_MOST_DIGITS} digits")
    return int(float(amount[1]) * _UNITS[amount[2]])


NOT_IN_A_PROGRAM: Final = {
    "engine": "Paddle's own recompute loses gradients in a Program",
    "offload": "a Program keeps all its tensors on the device",
    "preserve_rng_state": "a Program always reuses the dropout masks of the first forward",
}
"""Of `RecomputeConfig`: what a static graph can honour at its default only, and why."""


@dataclass(frozen=True)
class RecomputeConfig(Options):
    """Which sublayers drop their activations and compute them again in the backward.

    Attributes:
        enable: False: the model is left as it is.
        engine: ``"fleet"``: Paddle's own recompute around each sublayer, as a reference. Cases that
            it computes wrong without an error are refused.
        checkpoints: Glob patterns over sublayer names; ``*`` stays within one name, ``**`` crosses
            dots. ``"auto"``, which is kept as ``["auto"]``: the repeated blocks of the model, found
            by its structure.
        policy: ``"all"``: each selected sublayer on its own; ``"every_n"``: the 1st, (n+1)th, ...;
            ``"segments"``: a Program joins consecutive ones, and dygraph refuses it; ``"budget"``:
            what is fastest within `memory_budget`, by measurement.
        memory_budget: With policy ``"budget"``: the most bytes on the device, all in all.
        every_n: The n of policy ``"every_n"``, in selected sublayers.
        segments: Their number; ``"auto"``: the square root of the number of selected sublayers.
        keep: Glob patterns over the names of sublayers, methods and functions inside of recomputed
            parts: the second forward does not run these, and what they save is kept.
        offload: Where the inputs of recomputed parts, and what `keep` keeps, wait for the backward;
            not with policy ``"budget"``, whose plans keep them on the device.
        offload_parameters: Where parameters, gradients and optimizer state of the selected
            sublayers are while others compute; ``"ranks"``: each part on one rank.
        num_shards: With `offload_parameters`: one of so many parts is on the device at a time.
        preserve_rng_state: The second forward draws the random numbers of the first. False is only
            correct if the recomputed parts draw none.

    Raises:
        ConfigError: A value is not allowed, or two contradict each other.
    """

    rules = (
        *needs("policy=every_n", "every_n"),
        *needs("policy=segments", "segments"),
        *needs("policy=budget", "memory_budget"),
        *needs("memory_budget", "policy=budget"),
        *needs("offload_parameters", "num_shards"),
        *apart(
            "policy=budget",
            "offload",
            because="a plan keeps inputs on the device; policy: all does not",
        ),
        *apart("engine=fleet", "policy=segments", "policy=budget", "offload", "keep"),
        *apart(
            "offload_parameters",
            *("enable", "engine", "policy", "offload", "keep", "preserve_rng_state"),
            because="every offloaded sublayer is recomputed, by the library and from its inputs on "
            "the device",
        ),
    )

    enable: bool = True
    engine: Literal["paddle_recompute", "fleet"] = "paddle_recompute"
    checkpoints: list[str] = field(default_factory=lambda: [AUTO])
    policy: Literal["all", "every_n", "segments", "budget"] = "all"
    memory_budget: int | None = field(default=None, metadata={"at_least": 1})
    every_n: int = field(default=2, metadata={"at_least": 1})
    segments: int | Literal["auto"] = field(default=AUTO, metadata={"at_least": 1})
    keep: list[str] = field(default_factory=list)
    offload: Literal["none", "host", "disk"] = "none"
    offload_parameters: Literal["none", "host", "disk", "ranks"] = "none"
    num_shards: int = field(default=1, metadata={"at_least": 1})
    preserve_rng_state: bool = True

    def __post_init__(self) -> None:
        given: Any = self.checkpoints
        if given == AUTO:
            object.__setattr__(self, "checkpoints", [AUTO])
        super().__post_init__()

    @classmethod
    def from_paddleformers(cls, args: Any) -> RecomputeConfig:
        """The Layers that the arguments of PaddleFormers (1.2) recompute, as patterns.

        - ``recompute_granularity`` None: none. ``"full"``: blocks, as ``recompute_method`` says:
          ``uniform`` with 1 layer: each; ``block`` or ``first_n``: the first
          ``recompute_num_layers``.
        - ``"selective"``: of ``recompute_modules`` ``full_attn`` and ``mlp``, the sublayers
          ``self_attn`` and ``mlp`` of blocks. A value chooses blocks: ``"all"``, None or -1: each;
          a list: their numbers; n: the first n, with ``block`` or ``first_n``. In a list of names
          each has the value ``recompute_num_layers``.
        - ``no_recompute_layers``: numbers of blocks that are left out.

        So PaddleFleet, the engine of PaddleFormers, reads them without pipelines. Models with a
        forward of PaddleFormers' own recompute nothing for ``block`` and ``first_n``, and do not
        look at the values. Afterwards set ``recompute_granularity`` to None, in the arguments and
        in ``model.config``: a block that both recompute has three forwards.

        Args:
            args: Its ``TrainingArguments`` or the configuration of its model. Only the latter has
                ``num_hidden_layers``, which ``no_recompute_layers`` needs. The blocks of the model
                are in a LayerList ``layers``.

        Raises:
            ConfigError: A setting does not name the same Layers here; the message names it.
        """

        def read(name: str) -> Any:
            return getattr(args, name, None)

        def refuse(name: str, words: str) -> typing.NoReturn:
            raise ConfigError(f"from_paddleformers: {name}={read(name)!r}: {words}")

        granularity, method = read("recompute_granularity"), read("recompute_method")
        count, modules = read("recompute_num_layers"), read("recompute_modules")
        left_out, stages = read("no_recompute_layers") or (), read("pipeline_model_parallel_size")
        if granularity is None:
            return cls(enable=False)
        if read("recompute_mtp_granularity") is not None:
            refuse("recompute_mtp_granularity", "name the MTP layers in checkpoints instead")
        if stages is not None and stages > 1:
            refuse("pipeline_model_parallel_size", "it recomputes blocks of each stage; use 1")
        if granularity == "full":
            if modules:
                refuse(
                    "recompute_modules",
                    "with full it names operators; name the Layers around them in keep",
                )
            if method not in ("uniform", "block", "first_n"):
                refuse("recompute_method", "with full it is uniform, block or first_n")
            is_number = isinstance(count, int) and count >= (-1 if method == "block" else 0)
            if not is_number or (method == "uniform" and count != 1):
                refuse("recompute_num_layers", f"{method} takes a number, and uniform only 1")
            chosen = {"": "all" if method == "uniform" else count}
        elif granularity == "selective":
            chosen = modules if isinstance(modules, dict) else dict.fromkeys(modules or (), count)
        else:
            refuse("recompute_granularity", "it is full, selective or None")
        patterns = []
        for name, value in chosen.items():
            if name not in _FORMERS_PARTS:
                refuse(
                    "recompute_modules",
                    f"{name} is no sublayer of a block, as full_attn and mlp are; name the Layer "
                    "around it in checkpoints",
                )
            blocks = _blocks(value)
            if blocks is None:
                refuse("recompute_modules", f"{value!r} is not a number, a list or 'all'")
            if isinstance(value, int) and value >= 0 and method not in ("block", "first_n"):
                refuse("recompute_method", f"{value} blocks need block or first_n")
            if left_out and blocks == "*":
                if read("num_hidden_layers") is None:
                    refuse("no_recompute_layers", "give the model's configuration instead of args")
                blocks = range(args.num_hidden_layers)
            patterns += [
                f"**layers.{number}{_FORMERS_PARTS[name]}"
                for number in blocks
                if number not in left_out
            ]
        return cls(enable=bool(patterns), checkpoints=patterns)


def _blocks(value: Any) -> Iterable[Any] | None:
    """The numbers of the blocks that a value of ``recompute_modules`` means; "*": each."""
    if isinstance(value, list | tuple | set):
        return sorted(value)
    if isinstance(value, int) and value >= 0:
        return range(value)
    return "*" if value in (None, "all") or isinstance(value, int) else None


def _pure_is_level_o2(v: Any) -> Iterator[tuple[str, str]]:
    for name, dtype in PURE.items():
        if v[name] and (v["dtype"], v["level"]) != (dtype, "O2"):
            yield (
                name,
                f"means dtype: {dtype} and level: O2, which contradicts dtype: {v['dtype']} and "
                f"level: {v['level']}; remove one of the two",
            )


def _lists_are_apart(v: Any) -> Iterator[tuple[str, str]]:
    both = ", ".join(sorted({*v["custom_white_list"]} & {*v["custom_black_list"]}))
    if both:
        yield "custom_black_list", f"contains {both}, as does custom_white_list; remove either"


@dataclass(frozen=True)
class AmpConfigs(Options):
    """``DistributedStrategy.amp_configs`` of Paddle, with its defaults.

    Paddle's class has no field for bfloat16 at level O1. The fields `dtype` and `level`, named as
    the arguments of ``paddle.amp.auto_cast``, are added for it.

    Attributes:
        dtype: ``"bfloat16"`` has the range of float32 and needs no loss scale.
        level: ``"O1"``: operators on Paddle's white list compute in half precision; ``"O2"``: the
            parameters are in half precision too, with float32 master weights in the optimizer.
        init_loss_scaling: The first loss scale, a factor.
        incr_every_n_steps: Steps without overflow before the loss scale grows.
        decr_every_n_nan_or_inf: Steps with overflow before it shrinks.
        incr_ratio: By which it grows.
        decr_ratio: By which it shrinks. The defaults of the loss scale are those of fleet's
            ``DistributedStrategy.amp_configs``; `paddle.amp.GradScaler` has 0.5 here.
        use_dynamic_loss_scaling: False: the loss scale is constant.
        custom_white_list: More operators in half precision.
        custom_black_list: More operators in float32.
        custom_black_varnames: Static graph: variables that are kept in float32.
        use_pure_fp16: Stands for level O2 in float16.
        use_fp16_guard: Static graph: only guarded operators in float16.
        use_optimizer_fp16: Static graph: optimizer state in float16.
        use_pure_bf16: Stands for level O2 in bfloat16.

    Raises:
        ConfigError: A value is not allowed, or two contradict each other.
    """

    rules = (
        _pure_is_level_o2,
        _lists_are_apart,
        *needs("use_dynamic_loss_scaling=true", *_DYNAMIC_SCALE),
        *apart("dtype=bfloat16", *_SCALE, because="it has the range of float32, and no loss scale"),
        *apart(
            "dtype=bfloat16",
            *("use_fp16_guard", "use_optimizer_fp16"),
            because="it is a setting of float16",
        ),
    )

    dtype: Literal["float16", "bfloat16"] = "float16"
    level: Literal["O1", "O2"] = "O1"
    init_loss_scaling: float = field(default=32768.0, metadata={"above": 0})
    incr_every_n_steps: int = field(default=1000, metadata={"at_least": 1})
    decr_every_n_nan_or_inf: int = field(default=2, metadata={"at_least": 1})
    incr_ratio: float = field(default=2.0, metadata={"above": 1})
    decr_ratio: float = field(default=0.8, metadata={"above": 0, "below": 1})
    use_dynamic_loss_scaling: bool = True
    custom_white_list: list[str] = field(default_factory=list)
    custom_black_list: list[str] = field(default_factory=list)
    custom_black_varnames: list[str] = field(default_factory=list)
    use_pure_fp16: bool = False
    use_fp16_guard: bool = True
    use_optimizer_fp16: bool = False
    use_pure_bf16: bool = False

    def __post_init__(self) -> None:
        for name, dtype in PURE.items():
            if getattr(self, name) is True and (self.dtype, self.level) == ("float16", "O1"):
                object.__setattr__(self, "dtype", dtype)
                object.__setattr__(self, "level", "O2")
        super().__post_init__()
