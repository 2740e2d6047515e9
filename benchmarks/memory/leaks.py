"""What loops keep: bytes and objects after 300 steps, in plain Paddle and with our recompute.

    python -m benchmarks.memory.leaks                  # all loops, about five minutes
    python -m benchmarks.memory.leaks "paddle.grad"    # those whose titles begin so; no record

Each loop runs plain first, then with ours. The bytes are those of Paddle's allocator, the objects
those that Python's garbage collector tracks, after it has run. Lists of names are left out: of each
``paddle.to_tensor``, Paddle 3.3 keeps one for ever.
"""

from __future__ import annotations

import argparse
import gc
import sys
from dataclasses import dataclass

import paddle

from benchmarks.harness.record import table, write_record
from benchmarks.memory._leak_loops import LOOPS, Step
from paddle_recompute._paddle import memory

WARM_UP, STEPS = 50, 300
FEW = 20
"""Steps of a loop that takes half a second a step: of the planner, which measures times."""
_NAMES = frozenset(
    ["value", "place", "persistable", "zero_copy", "name", "stop_gradient", "dtype", "dims", "type"]
)
MOST_OBJECTS = 0.5
"""Of a step; references to what is gone wait for the next look through them, not for ever."""


@dataclass(frozen=True)
class Kept:
    """What `STEPS` steps have added."""

    bytes: int
    objects: int

    @classmethod
    def by(cls, step: Step, *, warm_up: int = WARM_UP, steps: int = STEPS) -> Kept:
        """Run `step` so often."""
        for _ in range(warm_up):
            step()
        bytes_before, objects_before = _now()
        for _ in range(steps):
            step()
        bytes_after, objects_after = _now()
        return cls(bytes_after - bytes_before, objects_after - objects_before)

    def verdict(self, plain: Kept | None, steps: int) -> str:
        """What it is, beside what the plain loop has added."""
        most = plain or Kept(0, 0)
        if self.bytes > max(most.bytes, 0):
            return "**bytes grow**"
        if self.objects > max(most.objects, 0) + MOST_OBJECTS * steps:
            return "**objects grow**"
        if self.bytes > 0:
            return "grows as plain"
        return "flat; plain grows" if most.bytes > 0 else "flat"


def _now() -> tuple[int, int]:
    gc.collect()
    return memory.current_bytes(), sum(not _is_of_names(one) for one in gc.get_objects())


def _is_of_names(one: object) -> bool:
    return type(one) is list and all(type(name) is str for name in one)


def is_long(title: str) -> bool:
    """Whether `title` runs `FEW` steps."""
    return title.startswith(("estimate", "plan,"))


def measured(title: str) -> tuple[Kept | None, Kept | None]:
    """Of the plain loop and of ours; None: there is none."""
    results = []
    for ours in (False, True):
        paddle.seed(0)
        step = LOOPS[title](ours)
        few = {"warm_up": 2, "steps": FEW} if is_long(title) else {}
        results.append(None if step is None else Kept.by(step, **few))
        del step
    return results[0], results[1]


def main() -> None:
    """Run the loops and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("title", nargs="?", default="")
    wanted = parser.parse_args().title
    rows: list[list[object]] = []
    gc.collect()
    gc.freeze()  # or each look takes 0.1 s, for Paddle's own objects
    for title in LOOPS:
        if not title.startswith(wanted):
            continue
        plain, ours = measured(title)
        if ours is None:
            verdict = "not on this Paddle"
        else:
            verdict = ours.verdict(plain, FEW if is_long(title) else STEPS)
        figures: list[object] = []
        for one in (plain, ours):
            figures += ["", ""] if one is None else [f"{one.bytes:,}", f"{one.objects:,}"]
        rows.append([title, *figures, verdict])
        print(*rows[-1], sep=" | ", flush=True)
    verdicts = [str(row[-1]) for row in rows if row[-1] != "not on this Paddle"]
    num_loops, num_growing = len(verdicts), verdicts.count("**bytes grow**")
    num_flat = sum("**" not in verdict for verdict in verdicts)
    if not wanted:
        write_record(
            "leaks",
            f"What loops keep after {STEPS} steps",
            "python -m benchmarks.memory.leaks",
            [
                f"{num_flat} of {num_loops} loops keep no more than plain Paddle, "
                f"{num_loops - num_growing} no more bytes. Bytes of the allocator and objects of "
                f"the garbage collector that {STEPS} steps have added after {WARM_UP} others "
                f"({FEW} calls of `estimate` and `plan`); lists of names are left out.",
                "",
                *table(["loop", "plain: bytes", "objects", "ours: bytes", "objects", ""], rows),
            ],
        )
    if num_growing:
        sys.exit(f"the bytes of {num_growing} loops grow")


if __name__ == "__main__":
    main()
