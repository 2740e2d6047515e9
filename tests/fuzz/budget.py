"""How many random programs to try, and from which seed on."""

from __future__ import annotations

import os


def examples(default: int) -> int:
    """``FUZZ_PROGRAMS``, or `default`."""
    return int(os.environ.get("FUZZ_PROGRAMS", default))


def seed() -> int:
    """``FUZZ_SEED``, or 0."""
    return int(os.environ.get("FUZZ_SEED", 0))
