"""What a run does before its first step: said when it begins, timed after the first step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from paddle_recompute.app.launch import STARTED
from paddle_recompute.app.trainer.loop import Callback, Run


class Phases(Callback):
    """The phases of a start, one after the other; the first step ends the last of them.

    Args:
        say: Shows a sentence, on rank 0.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began: dict[str, float] = {}
        if STARTED in os.environ:  # by the launcher on this machine
            self._began["start of the ranks"] = float(os.environ[STARTED])

    def begin(self, name: str, sentence: str) -> None:
        """The phase before ends here.

        Args:
            name: For the line with all times.
            sentence: What happens now.
        """
        self._began[name] = time.time()
        self._say(sentence)

    def on_start(self, run: Run) -> None:
        if run.done < run.total:
            first, every = run.done + 1, run.config.train.log_every
            self.begin(
                "first step", f"Training: steps {first:,} to {run.total:,}, figures every {every}"
            )

    def after_step(self, run: Run) -> None:
        if run.step != run.done + 1 or run.result is None:
            return
        now = time.time()
        times = [*self._began.values(), now]
        parts = ", ".join(
            f"{name} {end - begin:.1f}"
            for name, begin, end in zip(self._began, times, times[1:], strict=False)
        )
        self._say(
            f"Step {run.step:,}: loss {run.result.loss:.4f}, {now - times[0]:.1f} s after the "
            f"start ({parts})"
        )
