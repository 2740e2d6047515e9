"""Which sublayers of a model are recomputed: name patterns, then a policy; `apply_recompute`."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import paddle

from paddle_recompute.config import RecomputeConfig
from paddle_recompute.errors import SelectionError
from paddle_recompute.recompute.layer import RecomputeLayer, recompute_wrapper


@dataclass(frozen=True)
class RecomputeReport:
    """What `apply_recompute` did; printed, it is a readable table.

    Attributes:
        wrapped: Names of the sublayers that are recomputed now, in the model's order.
        left_out: Names that the patterns match but that are not wrapped, each with the reason.
    """

    wrapped: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"recompute: {len(self.wrapped)} sublayers"]
        lines += [f"  {name}" for name in self.wrapped]
        lines += [f"  {name}: left out, {reason}" for name, reason in self.left_out.items()]
        return "\n".join(lines)


def apply_recompute(model: paddle.nn.Layer, config: RecomputeConfig) -> RecomputeReport:
    """Recompute the sublayers of `model` that `config` selects.

    Patterns are globs over the names of ``model.named_sublayers()``: ``*`` stays within one name
    between dots and ``**`` crosses them, so ``blocks.*`` are the blocks and not their insides.
    Where a pattern matches a sublayer and one inside it, the outer one is wrapped alone.

    Args:
        model: Any Layer. Its selected sublayers are changed in place (`recompute_wrapper`).
        config: Patterns and policy; with ``enable: false`` the model is left as it is.

    Returns:
        What was wrapped, and what matched but was not, with the reason.

    Raises:
        SelectionError: A pattern matches nothing (the message names similar sublayers), or a
            sublayer is wrapped already. The model is unchanged then.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import RecomputeConfig, apply_recompute
        >>> model = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4))
        >>> apply_recompute(model, RecomputeConfig(checkpoints=["*"])).wrapped
        ('0', '1')
    """
    if not config.enable:
        return RecomputeReport()
    sublayers = dict(model.named_sublayers())
    matches = _matches(sublayers, config.checkpoints)
    left_out = _inside_another(matches)
    candidates = [name for name in matches if name not in left_out]
    for name in candidates:
        if isinstance(sublayers[name], RecomputeLayer):
            raise SelectionError(
                f"recompute.checkpoints selects '{name}', which is wrapped already; call its "
                "unwrap() first, or apply_recompute only once"
            )
    chosen = _POLICIES[config.policy](candidates, config)
    left_out.update({name: f"policy {config.policy}" for name in candidates if name not in chosen})
    for name in chosen:
        recompute_wrapper(
            sublayers[name], preserve_rng_state=config.preserve_rng_state, name=name
        )
    return RecomputeReport(tuple(chosen), left_out)


def _every(candidates: list[str], config: RecomputeConfig) -> list[str]:
    return candidates


def _every_n(candidates: list[str], config: RecomputeConfig) -> list[str]:
    return candidates[:: config.every_n]


_POLICIES: dict[str, Callable[[list[str], RecomputeConfig], list[str]]] = {
    "all": _every,
    "every_n": _every_n,
}


def _matches(sublayers: dict[str, paddle.nn.Layer], patterns: list[str]) -> list[str]:
    """The names that some pattern matches, in the model's order."""
    matched: set[str] = set()
    for pattern in patterns:
        expression = _glob(pattern)
        names = {name for name in sublayers if expression.fullmatch(name)}
        if not names:
            raise SelectionError(_no_match(pattern, list(sublayers)))
        matched |= names
    return [name for name in sublayers if name in matched]


@functools.cache
def _glob(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    meaning = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts))


def _no_match(pattern: str, names: list[str]) -> str:
    # Names of the same depth read most like the pattern; digits say nothing about a likeness.
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    listed = ", ".join(f"'{name}'" for name in near)
    return (
        f"recompute.checkpoints: the pattern '{pattern}' matches no sublayer of the model. "
        + (f"Sublayers with near names: {listed}. " if near else "The model has no sublayers. ")
        + "'*' stays within one name between dots, '**' crosses them; "
        "model.named_sublayers() lists all names."
    )


def _inside_another(names: list[str]) -> dict[str, str]:
    left_out = {}
    for name in names:
        outer = next((other for other in names if name.startswith(f"{other}.")), None)
        if outer is not None:
            left_out[name] = f"inside '{outer}', which is recomputed as a whole"
    return left_out
