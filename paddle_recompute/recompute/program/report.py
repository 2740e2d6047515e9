"""The report of `explain` on the segments of a Program."""

from __future__ import annotations

from dataclasses import dataclass, field

from paddle_recompute._paddle.memory import format_bytes


@dataclass(frozen=True)
class SegmentInfo:
    """A run of forward operators between two recompute boundaries.

    Attributes:
        name: The checkpoint at its end.
        num_ops: Number of its forward operators.
        num_recomputed: How many of them run again in the backward; None if the Program has no
            backward yet.
        kept_bytes: Bytes that it keeps from its forward to its backward, the checkpoint included;
            None if the Program has no backward yet.
        crossing: Number of its variables that later operators read.
        crossing_bytes: Their size in bytes.
        kept_ops: Names of operators whose outputs are kept besides the checkpoint, each with the
            reason.
    """

    name: str
    num_ops: int
    num_recomputed: int | None = None
    kept_bytes: int | None = None
    crossing: int = 1
    crossing_bytes: int = 0
    kept_ops: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentReport:
    """The segments of a Program, in its order; printed, a readable table.

    Attributes:
        segments: The segments that end at a checkpoint.
        num_ops_after: Forward operators after the last checkpoint; they are not recomputed.
        unknown_sizes: Whether some dimension is unknown until a batch is fed (-1). It counts as 1,
            so the bytes are those of such a batch.
    """

    segments: tuple[SegmentInfo, ...] = ()
    num_ops_after: int = 0
    unknown_sizes: bool = False

    def __str__(self) -> str:
        lines = [f"{len(self.segments)} segments"]
        if self.unknown_sizes:
            lines[0] += " (bytes: unknown dimensions count as 1)"
        for segment in self.segments:
            lines.append(f"  {segment.name}: {_sentence(segment)}")
            lines += [f"    {name} is kept: {why}" for name, why in segment.kept_ops.items()]
        lines.append(f"  {self.num_ops_after} operators after the last checkpoint, kept")
        return "\n".join(lines)


def _sentence(segment: SegmentInfo) -> str:
    text = f"{segment.num_ops} operators"
    if segment.num_recomputed is not None:
        text += f", {segment.num_recomputed} run again"
    if segment.kept_bytes is not None:
        text += f", {format_bytes(segment.kept_bytes)} kept"
    one = segment.crossing == 1
    crosses = f"{segment.crossing} {'variable crosses' if one else 'variables cross'} its end"
    return f"{text}; {crosses}, {format_bytes(segment.crossing_bytes)}"
