"""Random programs of habits: ours leaves behind what plain Paddle does, bit by bit.

Each program ends in one of these ways: equal; refused by an error of ours, where the program does
what may be refused; different only in what the docstring of `recompute` lists under "Not detected";
or refused by Paddle, where the plain program fails too. Anything else is a fault, which is printed
with the smallest program that shows it::

    FUZZ_SEED=123 FUZZ_PROGRAMS=1 python -m pytest -s tests/fuzz/test_habits.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import PaddleRecomputeError
from tests.fuzz import budget, habit_states
from tests.fuzz.habit_programs import Program, draw, observe
from tests.fuzz.habits import HABITS
from tests.recompute.contract import Seen, differences, same

ROUNDING = 1e-4
"""Of the largest element, or of 1: float32 sums of a few terms in another order, in three steps."""
MOST_REFUSED = 0.2


def may_be_refused(program: Program) -> bool:
    """Whether the program does something that a page says is refused."""
    if any(one.phase in HABITS[one.name].refused for one in program.habits):
        return True
    if program.parts() & habit_states.REFUSED:
        return True
    in_eval_mode = "frozen batch norm" in program.parts() or program.does("eval")
    if program.door == "values" and in_eval_mode:  # Paddle saves memory there that no kernel fills
        return True
    copies = program.does("go on with a copy") or program.does("teacher")
    return program.is_chain() and (copies or program.finish != "backward")


def is_undetected(program: Program) -> bool:
    """Whether the docstring lists something that it does under "Not detected"."""
    parts = program.parts()
    if program.is_chain() and "auxiliary loss" in parts:
        return True  # docs/offload.md: a tensor that a Layer of a chain stores has no graph
    between = parts & habit_states.UNDETECTED_IN_BETWEEN
    changes = program.does("schedule", "between") or (
        ("class attribute" in parts and program.does("with a class attribute"))
        or ("thread local" in parts and program.does("with a thread local"))
    )
    return bool(parts & habit_states.UNDETECTED or (between and changes))


def is_exact(program: Program) -> bool:
    """Whether the pages promise the bits, not only the sums up to their order."""
    sums = (
        program.micro_batches > 1
        or program.is_shared
        or program.is_tied
        or program.finish != "backward"
        or program.does("train on another batch")
        or bool(program.parts() & habit_states.ANOTHER_ORDER)
    )
    return not (sums and (program.is_chain() or program.door == "cache"))


def is_close(one: Any, other: Any) -> bool:
    """Whether two values differ at most as sums in another order do."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return same(one, other)
    if one.shape != other.shape or one.dtype != other.dtype or one.dtype.kind != "f":
        return same(one, other)
    return bool(np.abs(one - other).max(initial=0) <= ROUNDING * np.abs(other).max(initial=1))


def lines_of(program: Program, found: Seen, wanted: Seen) -> list[str]:
    """What differs, without the places that change in both forwards."""
    if not is_exact(program):
        found = {
            place: wanted[place] if place in wanted and is_close(value, wanted[place]) else value
            for place, value in found.items()
        }
    return differences(found, wanted)


def judge(program: Program) -> tuple[str, str | None]:
    """What became of the program, and the fault if it is one."""
    try:
        wanted = observe(program, is_plain=True)
    except (RuntimeError, ValueError, OSError):
        return "refused by Paddle", None
    try:
        found = observe(program, is_plain=False)
    except PaddleRecomputeError as error:
        word = f"refused by {type(error).__name__}"
        is_right = may_be_refused(program) or is_undetected(program)
        return word, None if is_right else str(error)
    except Exception as error:  # whatever it is, plain Paddle does not raise it
        return f"fails with {type(error).__name__}", str(error).strip()[-500:]
    lines = lines_of(program, found, wanted)
    if not lines:
        return "equal", None
    if is_undetected(program) or all(".twice_" in line.partition(":")[0] for line in lines):
        return "not detected, as documented", None
    return "silently different", "\n".join(lines[:6])


def smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    replace = dataclasses.replace
    for index in range(len(program.habits)):
        yield replace(program, habits=(*program.habits[:index], *program.habits[index + 1 :]))
    for index, block in enumerate(program.blocks):
        rest = (*program.blocks[:index], *program.blocks[index + 1 :])
        if rest and not (program.is_chain() and len(rest) < 2):
            yield replace(program, blocks=rest)
        for place in range(len(block)):
            less = (*block[:place], *block[place + 1 :])
            if less:
                blocks = (*program.blocks[:index], less, *program.blocks[index + 1 :])
                yield replace(program, blocks=blocks)
    if program.steps > 1:
        yield replace(program, steps=program.steps - 1)
    if program.door != "layer":
        yield replace(program, door="layer")
    for name, plain in (("finish", "backward"), ("micro_batches", 1)):
        if getattr(program, name) != plain:
            yield replace(program, **{name: plain})
    for name in ("is_shared", "is_tied"):
        if getattr(program, name):
            yield replace(program, **{name: False})


def smallest(program: Program, word: str) -> Program:
    """The smallest program that becomes the same, by leaving out one thing after the other."""
    for less in smaller(program):
        now, fault = judge(less)
        if now == word and fault is not None:
            return smallest(less, word)
    return program


@pytest.mark.timeout(0)
def test_programs(tmp_path: Path) -> None:
    last = tmp_path / "last_program.txt"
    print(f"Paddle {paddle.__version__}, programs of habits")
    print(f"If the interpreter dies, the program is in {last}", flush=True)

    def check(number: int) -> tuple[str, str | None]:
        program = draw(number)
        last.write_text(f"seed {number}: {program}\n", encoding="utf-8")
        word, fault = judge(program)
        if fault is not None:
            least = smallest(program, word)
            fault = f"{fault}\n{least}\n{judge(least)[1]}"
        return word, fault

    found = budget.every_number(check, 18, tell_every=100)
    refused = sum(count for word, count in found.items() if word.startswith("refused"))
    assert refused <= max(3, MOST_REFUSED * found.total())
