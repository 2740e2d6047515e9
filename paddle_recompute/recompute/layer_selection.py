"""Layer patterns: which parts of a model are recomputed, by name patterns and a policy."""

from __future__ import annotations

import difflib
import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle

from paddle_recompute._paddle.layers import children_of
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.errors import RecomputeError, SelectionError, listed
from paddle_recompute.options import AUTO, RecomputeConfig
from paddle_recompute.recompute._auto import find_blocks, is_container
from paddle_recompute.recompute._first_step_checks import FirstStepChecks
from paddle_recompute.recompute._fleet import wrap_with_fleet
from paddle_recompute.recompute._parts import is_cheap, join, named_parts
from paddle_recompute.recompute.function import RecomputeOptions
from paddle_recompute.recompute.program.marked_call import Mark
from paddle_recompute.recompute.wrapping import WRAPPED, is_kept, keep_part, wrap_part

_logger = logging.getLogger("paddle_recompute")


@dataclass(frozen=True)
class RecomputeReport:
    """What `apply_recompute` wrapped and left out; ``str(report)`` is a readable table.

    Attributes:
        wrapped: Names of the recomputed parts, in the model's order.
        segments: The same names, grouped: a Program recomputes the parts of a group together.
        left_out: Names that match a pattern but are not wrapped, each with the reason.
        discard_outputs: Names of the cheap parts whose outputs a Program recomputes too.
        chosen: What ``checkpoints: auto`` found, as ``"encoder.layers.* (12 x EncoderLayer)"``.
        kept: Names of the parts inside the wrapped ones that the second forward does not run.

    The first step checks the selection: a part that no forward has called, or that the model
    recomputes as well, is named in the log when the step is over, that is when the forward after
    the first update begins. `verify` raises for it, and can be called after a backward.
    """

    wrapped: tuple[str, ...] = ()
    segments: tuple[tuple[str, ...], ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    discard_outputs: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    _first_step_checks: FirstStepChecks | None = field(default=None, repr=False, compare=False)

    def verify(self) -> None:
        """Check, after a step, that what was wrapped is called, and recomputed once.

        Raises:
            SelectionError: A part was not called in the first step, or is recomputed by the model
                as well (three forwards). The message names the parts.
            RecomputeError: No backward of the model has ended yet.
        """
        if self._first_step_checks is None:
            return
        if not self._first_step_checks.has_gradients:
            raise RecomputeError(
                "RecomputeReport.verify() tells what the first step did, and no backward has given "
                "a gradient to a parameter of the model yet; call it after one"
            )
        faults = self._first_step_checks.faults()
        if faults:
            raise SelectionError("; ".join(faults))

    def stop_watching(self) -> None:
        """Do not check the first step."""
        if self._first_step_checks is not None:
            self._first_step_checks.stop()

    def __str__(self) -> str:
        lines = [f"recompute: {len(self.wrapped)} parts in {len(self.segments)} segments"]
        lines += [f"  checkpoints: auto chose {names}" for names in self.chosen]
        for segment in self.segments:
            note = (
                "" if segment[0] not in self.discard_outputs else " (in a Program, its output too)"
            )
            lines.append(f"  {' + '.join(segment)}{note}")
        lines += [f"  {name}: kept" for name in self.kept]
        lines += [f"  {name}: left out, {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)


def apply_recompute(model: paddle.nn.Layer, config: RecomputeConfig) -> RecomputeReport:
    """Recompute the parts of `model` that `config` selects.

    With ``checkpoints: auto``, the default, the repeated blocks of the model are found by its
    structure. Patterns are globs over the names of ``model.named_sublayers()``, and over the names
    of attributes of Layers that hold a function (``encoder.layers.*.activation``). ``*`` matches
    within one name between dots, ``**`` crosses dots: ``blocks.*`` selects the blocks and not their
    sublayers. If the patterns match a Layer and a part inside it, only the outer Layer is wrapped.
    A container without a forward of its own (LayerList, LayerDict) stands for its members.

    A part without a weight matrix (a function, Dropout, LayerNorm) is cheap to compute. In a
    Program its output is not kept either: it is recomputed for the later operators that need it. To
    name only such parts is selective recompute: matrix products run once, large cheap tensors are
    computed twice. In dygraph such a part keeps its input, which may cost more than it saves: a
    warning names it.

    Args:
        model: Any Layer. Its selected parts are wrapped in place (`recompute_wrapper`).
        config: Patterns and policy. With ``enable: false`` the model does not change.

    Returns:
        The parts that were wrapped, and those that were left out, with the reason.

    Of parts that ``config.keep`` selects inside of the wrapped ones, every call is a `keep`. Its
    patterns may name methods of Layers, too (``encoder.layers.*.self_attn.attend``).

    Raises:
        SelectionError: A pattern matches nothing (the message names similar parts), a part is
            already wrapped, or one to keep is in none that is recomputed. The model is then
            unchanged.
        ConfigError: Raised by the first forward in dygraph: ``policy: segments`` joins parts of a
            Program only.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import RecomputeConfig, apply_recompute
        >>> model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
        >>> apply_recompute(model, RecomputeConfig(checkpoints=["*"])).wrapped
        ('0', '1')
    """
    if not config.enable:
        return RecomputeReport()
    if config.policy == "budget":
        raise SelectionError(
            "policy: budget is made from measurements, which apply_recompute does not "
            "have; use paddle_recompute.plan(model, batch, loss_fn, memory_budget=...).apply(model)"
        )
    parts, aliases = named_parts(model)
    found: tuple[str, ...] = ()
    if config.checkpoints == [AUTO]:
        blocks = find_blocks(model)
        found = tuple(str(block) for block in blocks)
        matches = [name for block in blocks for name in block.names]
        _logger.info("checkpoints: auto chose %s", ", ".join(found))
    else:
        matches = _matches(parts, aliases, config.checkpoints)
    left_out = _inside_another(matches)
    candidates = [name for name in matches if name not in left_out]
    for name in candidates:
        if isinstance(parts[name], WRAPPED):
            raise SelectionError(
                f"checkpoints selects '{name}', which is wrapped already; call its "
                "unwrap() first, or call apply_recompute only once"
            )
    segments = grouped(candidates, config)
    chosen = {name for segment in segments for name in segment}
    left_out.update({name: f"policy {config.policy}" for name in candidates if name not in chosen})
    wrapped = tuple(name for name in candidates if name in chosen)
    cheap = tuple(name for name in wrapped if is_cheap(parts[name]))
    kept = _kept(parts, aliases, config.keep, wrapped)  # before anything is wrapped
    wrapping: object = model
    if config.engine == "fleet":
        cheap = ()
        wrap_with_fleet({name: parts[name] for name in wrapped}, config.preserve_rng_state)
    else:
        if cheap and is_dygraph():
            _logger.warning(
                "recompute: %s: no weight matrix, so recompute may keep more (the input) than it "
                "saves; in dygraph, name the blocks around such parts. A Program recomputes their "
                "outputs too, and saves memory",
                listed(cheap),
            )
        options = RecomputeOptions(config.preserve_rng_state, offload=config.offload)
        wrapping = options if wrapped else model  # the parts alone have the options
        owners = dict(model.named_sublayers(include_self=True))
        for names in segments:
            segment = names[-1] if len(names) > 1 else ""
            for position, name in enumerate(names):
                mark = Mark(segment, continues=position > 0, discard_outputs=name in cheap)
                wrap_part(owners, name, parts[name], options, mark)
        keep_parts(model, config.keep, wrapped)
    now = named_parts(model)[0]  # functions have become `RecomputedFunction`s
    watched = {name: now[name] for name in wrapped}
    first_step = FirstStepChecks(model, watched, wrapping, is_ours=config.engine != "fleet")
    return RecomputeReport(wrapped, segments, left_out, cheap, found, kept, first_step)


def check_patterns(model: paddle.nn.Layer, config: RecomputeConfig) -> None:
    """Check that every pattern of `config` matches a part of `model`; nothing is changed.

    Raises:
        SelectionError: A pattern matches nothing.
    """
    if config.checkpoints != [AUTO]:
        parts, aliases = named_parts(model)
        _matches(parts, aliases, config.checkpoints)


def keep_parts(model: paddle.nn.Layer, patterns: Sequence[str], wrapped: Collection[str]) -> None:
    """Keep what `patterns` of ``keep`` select inside of the `wrapped` parts of `model`.

    Raises:
        SelectionError: A pattern matches nothing, or something else.
    """
    kept = kept_parts(model, patterns, wrapped)
    owners = dict(model.named_sublayers(include_self=True))
    for name in kept:
        keep_part(owners, name)


def kept_parts(
    model: paddle.nn.Layer, patterns: Sequence[str], wrapped: Collection[str]
) -> tuple[str, ...]:
    """The names of what `keep_parts` keeps."""
    return _kept(*named_parts(model), patterns, wrapped)


def _kept(
    parts: dict[str, Any],
    aliases: dict[str, str],
    patterns: Sequence[str],
    wrapped: Collection[str],
) -> tuple[str, ...]:
    """The parts, and methods of parts, that `patterns` of ``keep`` select inside of the `wrapped`.

    Raises:
        SelectionError: A pattern matches nothing, or something else.
    """
    methods: dict[str, Any] = {}
    for pattern in patterns:
        owner, _, method = pattern.rpartition(".")
        for name, part in parts.items():
            if _glob(owner).fullmatch(name) and callable(getattr(type(part), method, None)):
                methods[f"{name}.{method}"] = None
    found = _matches({**parts, **methods}, aliases, patterns, "keep") if patterns else []
    for name in found:
        if not name.startswith(tuple(f"{outer}." for outer in wrapped)):
            why = f"in no recomputed part ({listed([*wrapped])})"
            if name in wrapped:
                why = "a recomputed part itself; name parts inside of it"
            raise SelectionError(f"keep selects '{name}', which is {why}")
        if is_kept(parts, name):
            raise SelectionError(
                f"keep selects '{name}', which is kept already; leave it out, or call "
                "apply_recompute only once"
            )
    inside = _inside_another(found)
    return tuple(name for name in found if name not in inside)


def layers_matching(model: paddle.nn.Layer, patterns: list[str]) -> list[str]:
    """The names of the outermost Layers of `model` that `patterns` select, in its order.

    Raises:
        SelectionError: A pattern matches nothing, or ``auto`` finds no repeated blocks.
    """
    if patterns == [AUTO]:
        return [name for block in find_blocks(model) for name in block.names]
    parts, aliases = named_parts(model)
    matches = _matches(parts, aliases, patterns)
    inside = _inside_another(matches)
    return [
        name for name in matches if name not in inside and isinstance(parts[name], paddle.nn.Layer)
    ]


# ------------------------------------------------------------------------------------ policies

Segments = tuple[tuple[str, ...], ...]


def grouped(candidates: list[str], config: RecomputeConfig) -> Segments:
    """Those of `candidates` that the policy chooses; the parts of a group are recomputed together.

    Raises:
        SelectionError: It asks for more segments than there are candidates.
    """
    return _POLICIES[config.policy](candidates, config)


def _joined(candidates: list[str], config: RecomputeConfig) -> Segments:
    """`config.segments` runs of nearly equal length; sqrt(n) runs minimize the sum of what is kept
    and what one segment needs while it is recomputed (Chen et al. 2016, section 4.1).
    """
    wanted = config.segments
    count = round(math.sqrt(len(candidates))) if wanted == "auto" else wanted
    if count > len(candidates):
        raise SelectionError(
            f"recompute.segments is {count}, but the patterns select only {len(candidates)} parts"
        )
    bounds = [round(i * len(candidates) / count) for i in range(count + 1)]
    return tuple(tuple(candidates[a:b]) for a, b in itertools.pairwise(bounds))


_POLICIES: dict[str, Callable[[list[str], RecomputeConfig], Segments]] = {
    "all": lambda candidates, config: tuple((name,) for name in candidates),
    "every_n": lambda candidates, config: tuple((name,) for name in candidates[:: config.every_n]),
    "segments": _joined,
}


# ------------------------------------------------------------------------------------ patterns


def _matches(
    parts: dict[str, Any],
    aliases: dict[str, str],
    patterns: Sequence[str],
    option: str = "checkpoints",
) -> list[str]:
    """The names that some pattern of `option` matches, in the model's order."""
    matched: set[str] = set()
    for pattern in patterns:
        expression = _glob(pattern)
        names = {name for name in (*parts, *aliases) if expression.fullmatch(name)}
        if not names:
            raise SelectionError(_no_match(option, pattern, list(parts)))
        matched |= {aliases.get(name, name) for name in names}
    for name in list(matched):
        if is_container(parts[name]):
            matched.remove(name)
            matched |= {aliases.get(member, member) for member in _members(parts[name], name)}
    if not matched:
        raise SelectionError(
            f"{option}: {', '.join(map(repr, patterns))} selects only containers "
            "without members, which are never called; name Layers that the model calls"
        )
    return [name for name in parts if name in matched]


def _members(container: paddle.nn.Layer, name: str) -> Iterator[str]:
    """The names of the Layers in `container` that can be called."""
    for child_name, child in children_of(container):
        if is_container(child):
            yield from _members(child, join(name, child_name))
        else:
            yield join(name, child_name)


@functools.cache
def _glob(pattern: str) -> re.Pattern[str]:
    pieces = re.split(r"(\*\*|\*|\?)", pattern)
    meaning = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return re.compile("".join(meaning.get(piece, re.escape(piece)) for piece in pieces))


def _no_match(option: str, pattern: str, names: list[str]) -> str:
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    listed = ", ".join(f"'{name}'" for name in near)
    return (
        f"{option}: the pattern '{pattern}' matches no sublayer of the model. "
        + (f"Sublayers with similar names: {listed}. " if near else "The model has no sublayers. ")
        + "'*' matches within one name between dots, '**' crosses dots; "
        "model.named_sublayers() lists all names."
    )


def _inside_another(names: list[str]) -> dict[str, str]:
    left_out = {}
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            left_out[name] = f"inside '{outer}', which is recomputed as a whole"
    return left_out
