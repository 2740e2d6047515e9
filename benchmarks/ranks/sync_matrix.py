"""Parameters after five steps, bit by bit, whichever way gradients were synchronized.

Every combination of: no recompute, hook form, PyLayer form; one or two towers over the same blocks;
an output weight tied to the embedding or not; one or three micro-batches; on 2 and 4 real ranks,
with dropout. In each: GradientSync fused against overlap, both in buckets of several parameters;
and GradientSync against Paddle's DataParallel, and on 2 ranks against no_sync +
fused_allreduce_gradients, where these run.

The sum of four numbers depends on the order in which they are added, and in a ring that depends on
the place in the buffer. So for the comparison with DataParallel each parameter has a buffer of its
own, here and there; fleet's buffers cannot be chosen, and are compared on 2 ranks only, where a sum
has no order.

    python -m benchmarks.ranks.sync_matrix   # about 3 minutes; with either Paddle
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils import recompute as fleet_recompute
from tqdm import tqdm

from benchmarks.harness.network import loopback
from benchmarks.harness.ranks import run_ranks_patiently
from benchmarks.harness.record import table, write_record
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.recompute import recompute

STEPS, RANKS, ATTEMPTS, TIMEOUT = 5, (2, 4), 8, 600.0
WORDS, WIDTH, BATCH, LENGTH = 50, 64, 4, 6
SEVERAL = {"bucket_bytes": 40_000, "first_bucket_bytes": 10_000}
ONE_EACH = {"bucket_bytes": 1, "first_bucket_bytes": 1}


@dataclass(frozen=True)
class Combination:
    """One row of the matrix."""

    form: str
    num_towers: int
    tied: bool
    num_micro: int

    def __str__(self) -> str:
        tied = "tied" if self.tied else "not tied"
        towers = "one tower" if self.num_towers == 1 else "two towers"
        return f"{self.form}, {towers}, {tied}, K={self.num_micro}"


COMBINATIONS = [
    Combination(*chosen)
    for chosen in itertools.product(("none", "hooks", "fleet"), (1, 2), (False, True), (1, 3))
]


class Towers(paddle.nn.Layer):
    """Words to scores of words, by one or two towers over the same blocks."""

    def __init__(self, combination: Combination) -> None:
        super().__init__()
        self._combination = combination
        self.embedding = paddle.nn.Embedding(WORDS, WIDTH)
        self.blocks = paddle.nn.LayerList(
            [
                paddle.nn.Sequential(
                    paddle.nn.Linear(WIDTH, WIDTH),
                    paddle.nn.LayerNorm(WIDTH),
                    paddle.nn.GELU(),
                    paddle.nn.Dropout(0.2),
                )
                for _ in range(4)
            ]
        )
        if not combination.tied:
            self.scores = paddle.nn.Linear(WIDTH, WORDS)

    def tower(self, words: paddle.Tensor) -> paddle.Tensor:
        """``[batch, length]``, int64, to ``[batch, length, WORDS]``."""
        hidden = self.embedding(words)
        for block in self.blocks:
            if self._combination.form == "none":
                hidden = block(hidden)
            elif self._combination.form == "fleet":
                hidden = fleet_recompute(block, hidden)
            else:
                hidden = recompute(block, hidden)
        if self._combination.tied:
            return paddle.matmul(hidden, self.embedding.weight, transpose_y=True)
        return self.scores(hidden)

    def forward(self, words: paddle.Tensor) -> paddle.Tensor:
        """The loss, a scalar."""
        towers = range(self._combination.num_towers)
        scores = sum(self.tower((words + tower) % WORDS) for tower in towers)
        return scores.square().mean()


def texts(step: int, micro: int) -> paddle.Tensor:
    """This rank's micro-batch, ``[batch, length]``, int64."""
    rng = np.random.default_rng([dist.get_rank(), step, micro])
    return paddle.to_tensor(rng.integers(0, WORDS, (BATCH, LENGTH)))


Backwards = Callable[[Towers, int], None]


def train(combination: Combination, make: Callable[[Towers], Backwards]) -> str:
    """A checksum of the parameters after `STEPS` steps."""
    paddle.seed(5)
    model = Towers(combination)
    optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
    backwards = make(model)
    paddle.seed(100 + dist.get_rank())
    for step in range(STEPS):
        backwards(model, step)
        optimizer.step()
        optimizer.clear_grad()
    return hashlib.sha256(b"".join(p.numpy().tobytes() for p in model.parameters())).hexdigest()


def ours(combination: Combination, mode: str, sizes: dict[str, int], early: list[int]) -> str:
    """With GradientSync; puts the number of buckets that were sent early into `early`."""

    def make(model: Towers) -> Backwards:
        sync = GradientSync(model, mode=mode, **sizes)  # type: ignore[arg-type]

        def backwards(model: Towers, step: int) -> None:
            for micro in range(combination.num_micro - 1):
                with sync.no_sync():
                    model(texts(step, micro)).backward()
            with sync.last_backward():
                model(texts(step, combination.num_micro - 1)).backward()
            early[:] = [sync.num_early_buckets]

        return backwards

    return train(combination, make)


def paddles(combination: Combination, *, overlapped: bool) -> str:
    """With DataParallel, which synchronizes in the last backward, or with fleet after it."""
    from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

    def make(model: Towers) -> Backwards:
        # In MiB; below the size of any parameter, so each has a buffer of its own.
        parallel = paddle.DataParallel(model, comm_buffer_size=1e-6, last_comm_buffer_size=1e-6)

        def backwards(model: Towers, step: int) -> None:
            for micro in range(combination.num_micro - overlapped):
                with parallel.no_sync():
                    parallel(texts(step, micro)).backward()
            if overlapped:
                parallel(texts(step, combination.num_micro - 1)).backward()
            else:
                fused_allreduce_gradients(model.parameters(), None)

        return backwards

    return train(combination, make)


def or_error(run: Callable[[], str]) -> str:
    """The checksum, or why there is none."""
    try:
        return run()
    except Exception as error:  # the record tells which
        return f"raises {type(error).__name__}: {_telling_line(str(error))}"


def _telling_line(message: str) -> str:
    """The first sentence that says something, without numbers and names of parameters."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = next((line for line in lines if "Error: " in line), lines[0] if lines else "")
    sentence = telling.rpartition("Error: ")[2].partition(". ")[0]
    return re.sub(r"\[[^\]]*\]", "[...]", sentence)[:200]


def measure_rank(only: str) -> dict[str, dict[str, Any]]:
    """Every combination on this rank."""
    seen = {}
    for combination in COMBINATIONS:
        if only not in str(combination):
            continue
        early: list[int] = []
        digests = {
            "fused": ours(combination, "fused", SEVERAL, []),
            "overlap": ours(combination, "overlap", SEVERAL, early),
            "overlap, one each": ours(combination, "overlap", ONE_EACH, []),
        }
        if dist.get_world_size() == 2:
            digests["fleet"] = or_error(lambda c=combination: paddles(c, overlapped=False))  # type: ignore[misc]
        digests["DataParallel"] = or_error(lambda c=combination: paddles(c, overlapped=True))  # type: ignore[misc]
        seen[str(combination)] = {"digests": digests, "early": early[0]}
        if dist.get_rank() == 0:
            print(f"combination: {combination}", flush=True)
    return seen


def judge(by_rank: list[dict[str, Any]]) -> dict[str, str]:
    """Of one combination what the columns say."""
    digests = [seen["digests"] for seen in by_rank]

    def verdict(way: str, wanted: str) -> str:
        refused = [one[way] for one in digests if one[way].startswith("raises ")]
        if refused:
            return refused[0]
        same = {one[name] for one in digests for name in (way, wanted)}
        return "equal" if len(same) == 1 else "**differs**"

    found = {"overlap": verdict("overlap", "fused")}
    if found["overlap"] == "equal" and min(seen["early"] for seen in by_rank) < 2:
        found["overlap"] = "**not overlapped**"
    for way in ("DataParallel", "fleet"):
        if way in digests[0]:
            found[way] = verdict(way, "overlap, one each")
    return found


def main() -> None:
    """Run every combination at every world size and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="a part of a combination's name; no record")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="world sizes")
    options = parser.parse_args()
    chosen = [str(one) for one in COMBINATIONS if options.only in str(one)]
    found: dict[tuple[str, int], dict[str, str]] = {}
    attempts = []
    with tqdm(total=len(chosen) * len(options.ranks), file=sys.stderr, mininterval=5) as bar:
        for num_ranks in options.ranks:
            results, failures = run_ranks_patiently(
                measure_rank,
                loopback(num_ranks),
                attempts=ATTEMPTS,
                timeout=TIMEOUT,
                on_line=lambda line: line.startswith("combination:") and bar.update(),
                only=options.only,
            )
            attempts.append(f"{num_ranks} ranks: {len(failures) + 1}")
            for name in chosen:
                found[name, num_ranks] = judge([one[name] for one in results])
    columns = [(n, way) for n in options.ranks for way in ("overlap", "DataParallel", "fleet")]
    columns = [c for c in columns if c[1] in found[chosen[0], c[0]]]
    titles = {
        "overlap": "overlap = fused",
        "DataParallel": "= DataParallel",
        "fleet": "= no_sync + fused_allreduce_gradients",
    }
    reasons: list[str] = []
    rows = []
    for name in chosen:
        cells = [found[name, n][way] for n, way in columns]
        for cell in cells:
            if cell.startswith("raises ") and cell not in reasons:
                reasons.append(cell)
        shown = (f"({reasons.index(c) + 1})" if c in reasons else c for c in cells)
        rows.append((name, *shown))
    wrong = [f"{row[0]}" for row in rows if any("**" in cell for cell in row)]
    header = ["recompute, towers, output weight, micro-batches"]
    header += [f"{n} ranks: {titles[way]}" for n, way in columns]
    body = [
        *(__doc__ or "").strip().splitlines()[:13],
        "",
        f"{len(chosen)} combinations, {STEPS} steps of AdamW each. Attempts until the ranks were "
        f"connected: {', '.join(attempts)}.",
        "",
        *table(header, rows),
        "",
        *(f"- ({number}) {reason}" for number, reason in enumerate(reasons, start=1)),
    ]
    if options.only or tuple(options.ranks) != RANKS:
        print("\n".join(body))
    else:
        path = write_record(
            "sync_matrix",
            "Equal bits, whichever way gradients are synchronized",
            "python -m benchmarks.ranks.sync_matrix",
            body,
        )
        print(path.read_text(encoding="utf-8"))
    if wrong:
        raise SystemExit(f"not equal: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
