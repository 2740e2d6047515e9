"""How long the other rank goes on when one dies, stops, fails or is late, with the default limits.

    python -m benchmarks.faults.peers_that_die

Two gloo ranks on this machine train a small model; one is hurt in step 3. For a rank that is late
by more than gloo waits, Paddle's own ``fused_allreduce_gradients`` stands beside `GradientSync`.
Takes about three minutes, most of it waiting.
"""

from __future__ import annotations

import signal
import threading
import time

import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients

from benchmarks.harness.record import table, write_record
from paddle_recompute.grad_sync import GradientSync
from tests.distributed.mortal_ranks import MortalRanks

LATE_SECONDS = 45.0
"""More than the 30 s after which gloo gives up."""
PATIENCE = 120.0


def train(
    *, paddles_own: bool = False, late: float = 0.0, fails: bool = False, num_steps: int = 10**6
) -> None:
    """Small steps; in the third, rank 0 comes late or rank 1 raises, as asked."""
    paddle.seed(0)
    model = paddle.nn.Linear(64, 64)
    sync = None if paddles_own else GradientSync(model)
    for step in range(1, num_steps + 1):
        if step == 3 and dist.get_rank() == 0 and late:
            threading.Event().wait(late)  # an evaluation on rank 0 alone
        if sync is None:
            model(paddle.ones([1, 64])).sum().backward()
            fused_allreduce_gradients(model.parameters(), None)
        else:
            with sync.last_backward():
                if step == 3 and dist.get_rank() == 1 and fails:
                    raise ValueError("a label is out of range")
                model(paddle.ones([1, 64])).sum().backward()
        model.clear_gradients()
        if step <= 3:
            print(f"step {step} done", flush=True)


def main() -> None:
    """Hurt a rank in every way and write down what became of the other."""
    from benchmarks.faults import peers_that_die  # by the name under which the ranks import it

    rows = []
    for name, victim, signal_number, arguments in (
        ("rank 1 killed (SIGKILL)", 1, signal.SIGKILL, {}),
        ("rank 0 killed (SIGKILL)", 0, signal.SIGKILL, {}),
        ("rank 1 stopped (SIGSTOP)", 1, signal.SIGSTOP, {}),
        ("rank 0 stopped (SIGSTOP)", 0, signal.SIGSTOP, {}),
        ("rank 1 raises ValueError", 1, None, {"fails": True}),
        (f"rank 0 late by {LATE_SECONDS:.0f} s", 0, None, {"late": LATE_SECONDS, "num_steps": 5}),
        (
            f"rank 0 late by {LATE_SECONDS:.0f} s, fused_allreduce_gradients",
            0,
            None,
            {"late": LATE_SECONDS, "num_steps": 5, "paddles_own": True},
        ),
    ):
        with MortalRanks(peers_that_die.train, **arguments) as ranks:
            ranks.wait_until(victim, says="step 2 done")
            if signal_number is not None:
                ranks.send(victim, signal_number)
            began = time.monotonic()
            code, output = ranks.end_of(1 - victim, within=PATIENCE)
        lines = [line for line in output.strip().splitlines() if "Error: " in line]
        said = lines[-1].partition("Error: ")[2] if code else "ended in good order"
        rows.append([name, f"{time.monotonic() - began:.1f}", code, said])
        print(*rows[-1], sep=" | ", flush=True)
    path = write_record(
        "peers_that_die",
        "What becomes of the other rank",
        "python -m benchmarks.faults.peers_that_die",
        table(["what happens", "seconds until the other's end", "exit code", "it says"], rows),
    )
    print(path)


if __name__ == "__main__":
    main()
