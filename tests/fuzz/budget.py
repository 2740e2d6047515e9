"""How many programs a fuzzer makes, and from which seed on: ``FUZZ_PROGRAMS``, ``FUZZ_SEED``."""

from __future__ import annotations

import os


def examples(default: int) -> int:
    """Programs to make: ``FUZZ_PROGRAMS``, or `default`."""
    return int(os.environ.get("FUZZ_PROGRAMS", default))


def seed() -> int:
    """The first seed: ``FUZZ_SEED``, or 0."""
    return int(os.environ.get("FUZZ_SEED", 0))
