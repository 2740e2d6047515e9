"""How many programs a fuzzer tries, and from which seed: a few in CI, hours of them by hand."""

from __future__ import annotations

import os


def examples(default: int) -> int:
    """The number of programs: ``FUZZ_PROGRAMS``, or `default`."""
    return int(os.environ.get("FUZZ_PROGRAMS") or default)


def seed() -> int:
    """Where the choice of programs begins: ``FUZZ_SEED``, or 0."""
    return int(os.environ.get("FUZZ_SEED") or 0)
