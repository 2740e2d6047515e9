"""Recompute and gradient caches of others in one table: cases right, memory, time, lines changed.

Recompute: 6 Transformer blocks, hidden 256, batch 8, length 64, dropout 0.1, AdamW, one thread.
Gradient cache: 4 blocks, hidden 64, 128 pairs of 32 tokens, chunks of 16. Memory is the growth of
resident memory in one step, and time the median of three steps; each is divided by that of a plain
step of the same framework, measured in the same way. "Lines" are those that a training script
changes. Cases: ok, silently wrong, or an error. The GradCache of its authors is not on the public
registry.

    make bench-peers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks._record import table, write_record

ROOT = Path(__file__).parent.parent
TORCH = ROOT / ".venv-torch" / "bin" / "python"
LINES = {  # an import, and what stands for the call
    "fleet, reentrant": 2,
    "fleet, not reentrant": 2,
    "paddle_recompute": 2,
    "torch.utils.checkpoint, reentrant": 2,
    "torch.utils.checkpoint, not reentrant": 2,
    "FairScale checkpoint_wrapper": 2,
    "sentence-transformers, cached": 2,
    "paddle_recompute, GradCache": 3,
}
RECOMPUTE = [
    ("_peers_paddle", "fleet, reentrant"),
    ("_peers_paddle", "fleet, not reentrant"),
    ("_peers_torch", "torch.utils.checkpoint, reentrant"),
    ("_peers_torch", "torch.utils.checkpoint, not reentrant"),
    ("_peers_torch", "FairScale checkpoint_wrapper"),
    ("_peers_paddle", "paddle_recompute"),
]
CACHES = [
    ("_peers_torch", "sentence-transformers, cached", "sentence-transformers"),
    ("_peers_paddle", "paddle_recompute, GradCache", "ours"),
]


def ask(module: str, what: str, way: str) -> dict[str, Any]:
    """What a side says, in a process of its own."""
    python = str(TORCH) if module == "_peers_torch" else sys.executable
    run = subprocess.run(
        [python, "-m", f"benchmarks.{module}", what, way],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    if run.returncode != 0:
        words = run.stderr.strip().splitlines()[-1:] or [f"exit code {run.returncode}"]
        print(f"{module} {what} {way}: {words[0]}", file=sys.stderr)
        return {"error": words[0][:80]}
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


def shares(found: dict[str, Any], base: dict[str, Any]) -> tuple[str, str]:
    """Memory and time divided by those of the plain step."""
    if "error" in found:
        return "error", "error"
    return f"{found['mib'] / base['mib']:.2f}", f"{found['seconds'] / base['seconds']:.2f}"


def main() -> None:
    """Ask every side, and write the record."""
    bases = {
        (module, what): ask(module, what, "plain")
        for module in ("_peers_paddle", "_peers_torch")
        for what in ("encoder", "contrastive")
    }
    cases, rows = {}, []
    for module, way in RECOMPUTE:
        cases[way] = ask(module, "cases", way)
        right = sum(value == "ok" for value in cases[way].values())
        wrong = sum(value == "wrong" for value in cases[way].values())
        memory, seconds = shares(ask(module, "encoder", way), bases[module, "encoder"])
        count = f"{right} of {len(cases[way])}"
        rows.append((way, count, wrong, memory, seconds, LINES[way]))
    caches = []
    for module, name, way in CACHES:
        found = ask(module, "contrastive", way)
        caches.append((name, *shares(found, bases[module, "contrastive"]), LINES[name]))
    names = list(cases["paddle_recompute"])
    path = write_record(
        "peers",
        "Peers",
        "make bench-peers",
        [
            *(__doc__ or "").strip().splitlines()[2:9],
            "",
            *table(("recompute", "right", "silently wrong", "memory / plain", "time / plain",
                    "lines"), rows),
            "",
            *table(("gradient cache", "memory / plain", "time / plain", "lines"), caches),
            "",
            *table(
                ("case", *cases), [(n, *(c.get(n, "-") for c in cases.values())) for n in names]
            ),
        ],
    )  # fmt: skip
    print(path.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
