"""How much the fuzzers try: little in CI, as much as one likes with `make fuzz`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis
import paddle
from hypothesis import strategies as st


def examples(default: int) -> int:
    """How many programs to try: the environment's FUZZ_PROGRAMS, or `default`.

    On 2.6 fewer: 3.3 runs the same seeds.
    """
    fewer = -(-7 * default // 10) if paddle.__version__.startswith("2.6") else default
    return int(os.environ.get("FUZZ_PROGRAMS", fewer))


def seed() -> int:
    """The seed of all programs: the environment's FUZZ_SEED, or 0."""
    return int(os.environ.get("FUZZ_SEED", 0))


def fuzz(
    programs: st.SearchStrategy[Any], check: Callable[[Any], None], default: int, **options: Any
) -> None:
    """Call `check` with `examples` of `programs`; a failure is shrunk and printed."""

    @hypothesis.seed(seed())
    @hypothesis.settings(
        max_examples=examples(default),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        **options,
    )
    @hypothesis.given(programs)
    def each(program: Any) -> None:
        check(program)

    print(f"FUZZ_SEED={seed()} FUZZ_PROGRAMS={examples(default)}", flush=True)
    each()


def every_number(
    check: Callable[[int], tuple[str, str | None]], default: int, *, tell_every: int = 50
) -> Counter[str]:
    """What became of the programs of each seed, in words; fails with the faults that were found.

    Args:
        check: From a seed to what became of its program, and the fault if there is one.
        default: As in `examples`.
        tell_every: Programs after which the numbers so far are printed.
    """
    found: Counter[str] = Counter()
    wrong = []
    last = seed() + examples(default) - 1
    for number in range(seed(), last + 1):
        word, fault = check(number)
        found[word] += 1
        if fault is not None:
            wrong.append(f"seed {number}: {word}: {fault}")
            print(wrong[-1], flush=True)
        if (number - seed() + 1) % tell_every == 0 or number == last:
            print(f"seeds {seed()} to {number}: {dict(found)}", flush=True)
    assert not wrong, "\n".join(wrong)
    return found


def each_program(
    draw: Callable[[int], Any], run: Callable[[Any], None], first: int, count: int, tell_every: int
) -> int:
    """Run the programs of `count` seeds from `first` on, on a rank; returns `count`.

    A program that fails is printed, with its seed.
    """
    for number in range(first, first + count):
        program = draw(number)
        try:
            run(program)
        except BaseException:
            print(f"FUZZ_SEED={number} FUZZ_PROGRAMS=1\n{program}", flush=True)
            raise
        if (number + 1) % tell_every == 0:
            print(f"{number + 1 - first} programs", flush=True)
    return count
