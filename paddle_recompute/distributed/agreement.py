"""Whether all ranks have the same: parameters, options, contents of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_recompute.distributed.connection import peers
from paddle_recompute.distributed.digest import Digests
from paddle_recompute.distributed.peer_state import RankValue, Scope
from paddle_recompute.errors import SyncError


def agree_on_options(
    options: Mapping[str, Any], scope: Scope, *, of: str = "GradientSync was made"
) -> None:
    """Check that `options` are the same on all ranks.

    Args:
        options: By name.
        scope: The ranks.
        of: Who has them, for the message.

    Raises:
        SyncError: They are not; names the first that differs, and the ranks.
    """
    said = peers().compare("the options of GradientSync", scope, dict(options))
    for difference in differences(said or ()):
        raise SyncError(f"{of} with different options: {difference}. Give it the same everywhere.")


def differences(said: Sequence[RankValue]) -> list[str]:
    """What ranks say differently, each as ``name is a on rank 0, b on rank 1``.

    Args:
        said: Values by name; those without a name that others have are "missing" there.
    """
    names = dict.fromkeys(name for rank_value in said for name in rank_value.content)
    found = []
    for name in names:
        values = [
            repr(rank_value.content[name]) if name in rank_value.content else "missing"
            for rank_value in said
        ]
        if len({*values}) > 1:
            found.append(f"{name} is {_by_rank(said, values)}")
    return found


def agree_on_parameters(
    names: Sequence[str], parameters: Sequence[paddle.Tensor], *, structured: bool, scope: Scope
) -> None:
    """Check that all ranks list the same parameters in the same order.

    Args:
        names: Of the parameters.
        parameters: Those that are synchronized.
        structured: Whether `names` are places in a Layer, which must then be the same. The names
            that Paddle gives by itself count what a process has made, which may differ; they tell
            something only where all ranks have the same ones in another order.
        scope: The ranks.

    Raises:
        SyncError: They do not; names the first parameter that differs, and the ranks.
    """
    shapes = [f"{list(parameter.shape)} {parameter.dtype}" for parameter in parameters]
    described = [f"'{name}' {shape}" for name, shape in zip(names, shapes, strict=True)]
    said = peers().compare("the parameters of GradientSync", scope, described)
    if said is None:
        return
    theirs: list[list[str]] = [rank_value.content for rank_value in said]
    compared = theirs
    if not structured and len({tuple(sorted(entries)) for entries in theirs}) > 1:
        compared = [[entry.rpartition("' ")[2] for entry in entries] for entries in theirs]
    for index in range(max(map(len, compared))):
        found = {entries[index] if index < len(entries) else "missing" for entries in compared}
        if len(found) > 1:
            shown = [entries[index] if index < len(entries) else "missing" for entries in theirs]
            raise SyncError(
                "the ranks do not synchronize the same parameters: number "
                f"{index} (from 0) is {_by_rank(said, shown)}. Build the model in the same way, "
                "and freeze the same of it, on every rank."
            )


def first_that_differs(
    tensors: Sequence[paddle.Tensor], scope: Scope
) -> tuple[int, list[int]] | None:
    """The index of the first tensor that is not equal, bit for bit, on all ranks, and the ranks
    whose differs from that of most ranks (of the first ones, where there is no majority).

    Compares digests: about 1 s per GB on a CPU.
    """
    own = Digests(tensors).values
    return _first_unequal(peers().compare("the digests of the tensors", scope, own) or [], scope)


def agree_on_start(
    names: Sequence[str], values: Sequence[object], scope: Scope, remedy: str
) -> bool:
    """Check that all ranks start from the same `values`.

    Args:
        names: Of what has them.
        values: One for each of `names`; another rank may have fewer. An empty one (a buffer that a
            forward of this rank has written) goes with any other.
        scope: The ranks.
        remedy: What to do otherwise, a sentence.

    Returns:
        Whether a rank has an empty value where another has not.

    Raises:
        SyncError: They do not; names the first that differs, and the ranks.
    """
    said = peers().compare("the start values", scope, values) or []
    difference = _first_unequal(said, scope)
    if difference is not None:
        index, ranks = difference
        raise SyncError(
            f"'{names[index] if index < len(names) else 'a buffer'}' differs between the ranks "
            f"before the first step: on rank {', '.join(map(str, ranks))} it is not what the "
            f"others have. Ranks that start from different values train different models. {remedy}"
        )
    return len({tuple(value == "" for value in rank_value.content) for rank_value in said}) > 1


def _first_unequal(said: Sequence[RankValue], scope: Scope) -> tuple[int, list[int]] | None:
    for index in range(max((len(rank_value.content) for rank_value in said), default=0)):
        ranks_with: dict[object, list[int]] = {}
        for rank_value in said:
            value = rank_value.content[index] if index < len(rank_value.content) else None
            ranks_with.setdefault(value, []).extend(rank_value.ranks)
        written = ranks_with.pop("", [])
        if len(ranks_with) > 1:
            usual = max(ranks_with, key=lambda value: len(ranks_with[value]))
            return index, sorted({*scope.ranks} - {*ranks_with[usual], *written})
    return None


def _by_rank(said: Sequence[RankValue], values: Sequence[str]) -> str:
    """``a on rank 0, 1, b on rank 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank_value, value in zip(said, values, strict=True):
        ranks_of.setdefault(value, []).extend(rank_value.ranks)
    return ", ".join(
        f"{value} on rank {', '.join(map(str, sorted(ranks)))}" for value, ranks in ranks_of.items()
    )
