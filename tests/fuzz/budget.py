"""How much the fuzzers try: little in CI, as much as one likes with `make fuzz`."""

from __future__ import annotations

import os


def examples(default: int) -> int:
    """How many programs to try: the environment's FUZZ_PROGRAMS, or `default`."""
    return int(os.environ.get("FUZZ_PROGRAMS", default))


def seed() -> int:
    """The seed of all programs: the environment's FUZZ_SEED, or 0."""
    return int(os.environ.get("FUZZ_SEED", 0))
