"""Whether all ranks have the same: parameters, options, contents of tensors."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import paddle

from paddle_recompute.distributed.control_client import peers
from paddle_recompute.distributed.peer_state import Scope
from paddle_recompute.errors import SyncError


def exchange_long(content: Any, label: str, scope: Scope) -> list[Any]:
    """As ``peers().exchange``, for long contents that are mostly the same on all ranks.

    Checksums travel first, and the contents only where they differ.
    """
    digest = zlib.crc32(json.dumps(content).encode())
    if len(set(peers().exchange(digest, label, scope))) == 1:
        return [content] * len(scope.ranks)
    return peers().exchange(content, label, scope)


def agree_on_options(options: Mapping[str, Any], scope: Scope) -> None:
    """Check that `options` are the same on all ranks.

    Raises:
        SyncError: They are not; names the first that differs, and the ranks.
    """
    everywhere = exchange_long(dict(options), "the options of GradientSync", scope)
    for name in options:
        values = [theirs[name] for theirs in everywhere]
        if any(value != values[0] for value in values):
            raise SyncError(
                f"GradientSync was made with different options: {name} is "
                f"{_by_rank([repr(value) for value in values], scope)}. Give it the same "
                "everywhere."
            )


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
    theirs = exchange_long(described, "the parameters of GradientSync", scope)
    if all(one == theirs[0] for one in theirs):
        return
    compared = theirs
    if not structured and len({tuple(sorted(one)) for one in theirs}) > 1:
        compared = [[entry.rpartition("' ")[2] for entry in one] for one in theirs]
    for index in range(max(map(len, compared))):
        found = {one[index] if index < len(one) else "missing" for one in compared}
        if len(found) > 1:
            shown = [one[index] if index < len(one) else "missing" for one in theirs]
            raise SyncError(
                "the ranks do not synchronize the same parameters: number "
                f"{index} (from 0) is {_by_rank(shown, scope)}. Build the model in the same way, "
                "and freeze the same of it, on every rank."
            )


def first_that_differs(
    tensors: Sequence[paddle.Tensor], scope: Scope
) -> tuple[int, list[int]] | None:
    """The index of the first tensor that is not equal, bit for bit, on all ranks, and the ranks
    whose differs from that of most ranks (of the first ones, where there is no majority).

    Copies every tensor to the host and computes its checksum: about 1 s per GB.
    """
    own = [zlib.crc32(tensor.numpy().tobytes()) for tensor in tensors]
    theirs = exchange_long(own, "the checksums of the tensors", scope)
    for index in range(len(tensors)):
        sums = [one[index] for one in theirs]
        usual = max(sums, key=sums.count)
        others = [rank for rank, one in zip(scope.ranks, sums, strict=True) if one != usual]
        if others:
            return index, others
    return None


def _by_rank(values: Sequence[str], scope: Scope) -> str:
    """``a on rank 0, 1, b on rank 2``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(scope.ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_of.items()
    )
