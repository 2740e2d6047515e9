"""What a training run leaves for the comparison, in one file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Arrays = dict[str, NDArray[Any]]
WEIGHTS = "weights.safetensors"
"""The initial weights of all runs."""
NO_REFERENCE = "no_reference.txt"
"""Why fleet's recompute refuses the model; the file exists only if it does."""


@dataclass
class Outcome:
    """A training run, as rank 0 has it.

    Attributes:
        losses: Of every step, the mean over all pairs.
        grad_norms: Of every step, before clipping.
        learning_rates: Of every step.
        disagreement: The first difference between the ranks; None: there is none.
        gradients: Gradients of the first step as the optimizer gets them: synchronized and clipped;
            by structured name.
        parameters: Parameters and buffers after the last step, by structured name.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    disagreement: str | None = None
    gradients: Arrays = field(default_factory=dict)
    parameters: Arrays = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Write it; the arrays are twice the size of the parameters."""
        figures = {name: value for name, value in vars(self).items() if name not in _ARRAYS}
        file.with_suffix(".json").write_text(json.dumps(figures), "utf-8")
        arrays = {
            f"{kind}/{name}": one for kind in _ARRAYS for name, one in vars(self)[kind].items()
        }
        save_file(arrays, file)

    @classmethod
    def read(cls, file: Path, *, figures_only: bool = False) -> Outcome:
        """What `write` wrote."""
        found = cls(**json.loads(file.with_suffix(".json").read_text("utf-8")))
        for key, array in {} if figures_only else load_file(file).items():
            kind, _, name = key.partition("/")
            getattr(found, kind)[name] = array
        return found


_ARRAYS = ("gradients", "parameters")


def disagreement(ranks: Sequence[Any]) -> str | None:
    """The first difference between the ranks of a run; None: all are equal.

    Args:
        ranks: Of each rank, in rank order: its losses, its gradient norms, and a digest of each
            parameter by structured name.
    """
    (losses, norms, digests), *others = ranks
    for rank, (its_losses, its_norms, its_digests) in enumerate(others, 1):
        for name, digest in digests.items():
            if its_digests.get(name) != digest:
                return f"{name}: the parameters of rank 0 and rank {rank} differ"
        if its_losses != losses or its_norms != norms:
            return f"losses or gradient norms of rank 0 and rank {rank} differ"
    return None
