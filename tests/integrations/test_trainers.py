"""The mixins in the trainers of PaddleNLP and PaddleFormers: the weights of their own run, bit by
bit, on one rank and on two against their own ``DataParallel``.

``make test-nlp`` and ``make test-formers`` make the environments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, free_ports

LIBRARIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(name) is None, reason=f"{name} is not installed ({how})"
        ),
    )
    for name, how in (
        ("paddlenlp", "make test-nlp installs it"),
        ("paddleformers", "make test-formers installs it"),
    )
]
each_library = pytest.mark.parametrize("library", LIBRARIES)


def train(library: str, variant: str, folder: Path, *, ranks: int, accumulation: int = 2) -> Any:
    """The record of each rank."""
    ports = free_ports(ranks)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    command = [sys.executable, "-m", "tests.integrations.trained", library, variant]
    command += [str(folder / variant), str(accumulation)]
    processes = []
    for rank in range(ranks):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            env |= {
                "PADDLE_TRAINER_ID": str(rank),
                "PADDLE_TRAINERS_NUM": str(ranks),
                "PADDLE_TRAINER_ENDPOINTS": endpoints,
                "PADDLE_CURRENT_ENDPOINT": f"127.0.0.1:{ports[rank]}",
                "PADDLE_MASTER": f"127.0.0.1:{ports[0]}",
                "PADDLE_DISTRI_BACKEND": "gloo",
                "PADDLE_RANK_IN_NODE": str(rank),
                "PADDLE_LOCAL_RANK": str(rank),
                "PADDLE_LOCAL_SIZE": str(ranks),
                "PADDLE_GLOBAL_RANK": str(rank),
                "PADDLE_GLOBAL_SIZE": str(ranks),
            }
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    lines = [
        next(line for line in reversed(output.splitlines()) if line.startswith("{"))
        for output in outputs
    ]
    return [json.loads(line) for line in lines]


def check(theirs: Any, ours: Any, *, ranks: int, steps: int = 4) -> None:
    assert len(theirs) == len(ours) == ranks
    for own, other in zip(ours, theirs, strict=True):
        assert len(own["weights"]) > 10
        assert own["weights"] == other["weights"] == theirs[0]["weights"]
        assert own["losses"] == other["losses"] and len(own["losses"]) == steps
        assert own["second"] > 0, "nothing was recomputed"
        assert other["wraps"] == (ranks > 1), "their own run has no DataParallel"
        assert own["wraps"] == 0, "their all-reduce is done as well"
        assert own["synchronized"] == (steps if ranks > 1 else None)


@each_library
@pytest.mark.parametrize("ranks", [1, 2])
def test_recompute_mixin(library: str, ranks: int, tmp_path: Path) -> None:
    theirs = train(library, "plain", tmp_path, ranks=ranks)
    check(theirs, train(library, "ours", tmp_path, ranks=ranks), ranks=ranks)


@each_library
def test_contrastive_mixin(library: str, tmp_path: Path) -> None:
    theirs, ours = (
        train(library, f"contrastive-{which}", tmp_path, ranks=2, accumulation=1)
        for which in ("plain", "ours")
    )
    check(theirs, ours, ranks=2)


@each_library
def test_contrastive_mixin_with_accumulation(library: str, tmp_path: Path) -> None:
    """The two sides of one encoder are added to a gradient that is there already, one by one; a
    plain backward adds their sum. So the last bits differ (`GradCache`), and no more.
    """
    theirs, ours = (
        train(library, f"contrastive-{which}", tmp_path, ranks=2, accumulation=2)
        for which in ("plain", "ours")
    )
    for own, other in zip(ours, theirs, strict=True):
        assert own["losses"] == pytest.approx(other["losses"], rel=1e-5)
        assert own["weights"] == ours[0]["weights"]
        assert own["synchronized"] == 4 and own["wraps"] == 0
