"""Recompute and gradient caches of others in one table: cases right, memory, time, lines changed.

Recompute: 6 Transformer blocks, hidden 256, batch 8, length 64, dropout 0.1, AdamW, one thread.
Gradient cache: 4 blocks, hidden 64, 128 pairs of 32 tokens, chunks of 16. Memory is the growth of
resident memory in one step, in a process of its own, beside that of a plain step. Time is
the median of seven steps, each divided by a plain step beside it. "Lines" are those of a training
script that change. Cases: ok, wrong (silently), none (the library has no way to say it), an error,
or crash (the process dies). GradCache is that of its authors, gradcache 0.0.1; it imports itself
under a name that it does not install, which the benchmark supplies.

    make bench-peers
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from benchmarks.harness.record import in_own_process, table, torch_python, write_record

MIB = 2**20
# The side, the name of the library, and the lines: an import, and what stands for the call.
RECOMPUTE = {
    "fleet, reentrant": ("paddle", "fleet.utils.recompute, reentrant", 2),
    "fleet, not reentrant": ("paddle", "fleet.utils.recompute, not reentrant", 2),
    "torch, reentrant": ("torch", "torch.utils.checkpoint, reentrant", 2),
    "torch, not reentrant": ("torch", "torch.utils.checkpoint, not reentrant", 2),
    "FairScale": ("torch", "FairScale checkpoint_wrapper", 2),
    "paddle_recompute": ("paddle", "paddle_recompute", 2),
}
CACHES = {
    "GradCache": ("torch", "GradCache (gradcache 0.0.1)", 3),
    "sentence-transformers": ("torch", "sentence-transformers Cached...RankingLoss", 2),
    "paddle_recompute GradCache": ("paddle", "paddle_recompute GradCache", 3),
}


def ask(side: str) -> dict[str, Any]:
    """What a side says, in a process of its own."""
    python = torch_python() if side == "torch" else sys.executable
    module = f"benchmarks.speed._peers_{side}"
    return dict(in_own_process(module, python=python, timeout=900, OMP_NUM_THREADS="1"))


def compare(
    ways: dict[str, tuple[str, str, int]], found: dict[str, Any], topic: str
) -> tuple[list[tuple[object, ...]], dict[str, dict[str, str]]]:
    """The rows of a table, and the verdict of each case by way."""
    rows: list[tuple[object, ...]] = []
    verdicts = {}
    for way, (side, name, lines) in ways.items():
        one, plain = found[side][topic][way], found[side][topic]["plain"]["measured"]["bytes"]
        verdicts[way] = one["cases"]
        counts = Counter(
            verdict if verdict in ("ok", "wrong", "none", "crash") else "error"
            for verdict in verdicts[way].values()
        )
        num_bytes = one["measured"]["bytes"]
        rows.append(
            (
                name,
                f"{counts['ok']} of {len(verdicts[way])}",
                *(counts[kind] for kind in ("wrong", "error", "crash", "none")),
                f"{num_bytes / MIB:.1f} of {plain / MIB:.1f}",
                f"{num_bytes / plain:.2f}",
                f"{one['measured']['time']:.2f}",
                lines,
            )
        )
    return rows, verdicts


def by_case(verdicts: dict[str, dict[str, str]]) -> list[str]:
    """A row for each case."""
    names = next(iter(verdicts.values()))
    return table(
        ("case", *verdicts), [(name, *(one[name] for one in verdicts.values())) for name in names]
    )


def main() -> None:
    """Ask every side, and write the record."""
    header = (
        "right", "silently wrong", "error", "crash", "none", "MiB, of plain", "memory / plain",
        "time / plain", "lines",
    )  # fmt: skip
    found = {side: ask(side) for side in ("paddle", "torch")}
    recompute, recompute_cases = compare(RECOMPUTE, found, "recompute")
    caches, cache_cases = compare(CACHES, found, "caches")
    write_record(
        "peers",
        "Peers",
        "make bench-peers",
        [
            *(__doc__ or "").strip().splitlines()[2:10],
            "",
            *table(("recompute", *header), recompute),
            "",
            *table(("gradient cache", *header), caches),
            "",
            *by_case(recompute_cases),
            "",
            *by_case(cache_cases),
        ],
    )


if __name__ == "__main__":
    main()
