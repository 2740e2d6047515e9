"""The mixins in the trainers of PaddleNLP and PaddleFormers: the weights of their own run, bit by
bit, on one rank and on two against their own ``DataParallel``.

``make test-nlp`` and ``make test-formers`` make the environments.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute.errors import ConfigError
from paddle_recompute.integrations import RecomputeTrainerMixin
from tests.ranks import ROOT, free_ports, rank_environment

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
PAIRS = ("plain-1-pairs", "contrastive-1-pairs", "plain-2-pairs", "contrastive-2-pairs")
VARIANTS = {
    1: ("plain-2", "ours-2", "plain-2-amp", "ours-2-amp", "contrastive-1-pairs"),
    2: (
        *("plain-2", "ours-2", "plain-2-amp", "ours-2-amp", "plain-2-tail", "ours-2-tail"),
        *(*PAIRS, "plain-1-pairs-amp", "contrastive-1-pairs-amp"),
        *("refuse:amp_master_grad=True", "refuse:sharding=stage2", "refuse:sharding=stage3"),
    ),
}
SHARDED = (
    *("plain-2-stage1", "ours-2-stage1"),
    *("plain-1-pairs-stage1", "contrastive-1-pairs-stage1"),
)
"""In processes of their own: their arguments start fleet once."""


def records(
    library: str, ranks: int, *, sharded: bool = False
) -> tuple[dict[str, list[Any]], Path]:
    """What each variant printed, by rank, and the folder with the weights."""
    outputs, codes, folder = run_all(library, ranks, SHARDED if sharded else VARIANTS[ranks])
    for code, output in zip(codes, outputs, strict=True):
        assert code == 0, f"rank ended with {code}: {output[-4000:]}"
    found: dict[str, list[Any]] = {}
    for output in outputs:
        for line in output.splitlines():
            if line.startswith('{"variant"'):
                record = json.loads(line)
                found.setdefault(record["variant"], []).append(record)
    return found, folder


@functools.cache
def run_all(
    library: str, ranks: int, variants: tuple[str, ...]
) -> tuple[list[str], list[int | None], Path]:
    """The output and the exit code of each rank, once for all tests."""
    folder = Path(tempfile.mkdtemp(prefix="trainers-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ports = free_ports(ranks + 1)
    command = [sys.executable, "-m", "tests.integrations.trained", library, str(folder)]
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if ranks > 1:
            env |= {
                **rank_environment(rank, ports),
                "PADDLE_RANK_IN_NODE": str(rank),
                "PADDLE_LOCAL_RANK": str(rank),
                "PADDLE_LOCAL_SIZE": str(ranks),
                "PADDLE_GLOBAL_RANK": str(rank),
                "PADDLE_GLOBAL_SIZE": str(ranks),
            }
        with log.open("w") as file:
            processes.append(
                subprocess.Popen([*command, *variants], cwd=ROOT, env=env, stdout=file, stderr=file)
            )
    end = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in processes):
        if time.monotonic() > end or any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
    outputs = [log.read_text(errors="replace") for log in logs]
    return outputs, [process.wait() for process in processes], folder


PATIENCE = 240.0
"""Seconds for all runs of a library; they take 40 on two free cores."""
long = pytest.mark.timeout(PATIENCE + 20)


def weights(library: str, ranks: int, variant: str) -> list[dict[str, Any]]:
    _, folder = records(library, ranks, sharded=is_sharded(variant))
    return [dict(np.load(folder / f"{variant}-{rank}.npz")) for rank in range(ranks)]


def is_sharded(variant: str) -> bool:
    return variant.endswith("-stage1")


def check_ours(library: str, variant: str, ranks: int, steps: int = 4) -> list[Any]:
    """What holds of every run with a mixin; its records."""
    ours = records(library, ranks, sharded=is_sharded(variant))[0][variant]
    synchronizes = ranks > 1 and not is_sharded(variant)
    assert len(ours) == ranks
    for own in ours:
        assert own["second"] > 0, "nothing was recomputed"
        assert own["wraps"] == 0, "their all-reduce is done as well"
        assert own["synchronized"] == (steps if synchronizes else None)
        assert len(own["losses"]) == steps
    return ours


def check_equal(library: str, theirs: str, ours: str, *, ranks: int) -> None:
    """Bit for bit: the weights of all ranks, and the losses."""
    own = check_ours(library, ours, ranks)
    other = records(library, ranks, sharded=is_sharded(theirs))[0][theirs]
    assert [one["losses"] for one in own] == [one["losses"] for one in other]
    for one in (*own, *other):
        assert one["levels"] == ["O1" if theirs.endswith("amp") else "O0"]
    for one in other:
        wraps = ranks > 1 and not is_sharded(theirs)
        assert one["wraps"] == wraps, "their own run has no DataParallel"
    trained = weights(library, ranks, ours)
    plain = weights(library, ranks, theirs)
    for rank in range(ranks):
        assert len(trained[rank]) > 10
        assert trained[rank].keys() == plain[rank].keys()
        for name, value in trained[rank].items():
            assert np.array_equal(value, plain[rank][name]), name
            assert np.array_equal(value, plain[0][name]), name


@long
@each_library
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("options", ["", "-amp"])
def test_recompute_mixin(library: str, ranks: int, options: str) -> None:
    check_equal(library, f"plain-2{options}", f"ours-2{options}", ranks=ranks)


@long
@each_library
def test_an_epoch_that_ends_between_two_micro_batches(library: str) -> None:
    """Their loop counts from the beginning of each epoch; the gradients of the rest stay."""
    check_equal(library, "plain-2-tail", "ours-2-tail", ranks=2)


@long
@each_library
@pytest.mark.parametrize("options", ["", "-amp"])
def test_contrastive_mixin(library: str, options: str) -> None:
    check_equal(library, f"plain-1-pairs{options}", f"contrastive-1-pairs{options}", ranks=2)


@long
@each_library
def test_their_sharding_of_stage_1(library: str) -> None:
    """Their optimizer and their synchronization, with our recompute and our gradient cache."""
    check_equal(library, "plain-2-stage1", "ours-2-stage1", ranks=2)
    check_equal(library, "plain-1-pairs-stage1", "contrastive-1-pairs-stage1", ranks=2)


@long
@each_library
def test_contrastive_mixin_evaluates(library: str) -> None:
    (record,) = records(library, 1)[0]["contrastive-1-pairs"]
    assert record["evaluated"] == pytest.approx(record["by hand"], rel=1e-6)


@long
@each_library
def test_contrastive_mixin_with_accumulation(library: str) -> None:
    """GradCache adds the two sides of one encoder to the gradient of the micro-batch before, one by
    one: (g + a) + b. A plain backward adds their sum: g + (a + b).
    """
    own = check_ours(library, "contrastive-2-pairs", 2)
    for one, other in zip(own, records(library, 2)[0]["plain-2-pairs"], strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=ORDER_OF_A_SUM)
    trained, plain = (
        weights(library, 2, variant) for variant in ("contrastive-2-pairs", "plain-2-pairs")
    )
    for name, value in trained[0].items():
        assert np.array_equal(value, trained[1][name]), name
        assert np.abs(value - plain[0][name]).max() < ORDER_OF_A_SUM, name


ORDER_OF_A_SUM = 1e-5
"""Of losses (relative) and weights after four steps of at most 0.01; 1.1e-6 was seen."""


@long
@each_library
@pytest.mark.parametrize("settings", ["amp_master_grad=True", "sharding=stage2", "sharding=stage3"])
def test_what_the_mixin_cannot_serve_is_refused(library: str, settings: str) -> None:
    name, _, value = settings.partition("=")
    for record in records(library, 2)[0][f"refuse:{settings}"]:
        assert re.search(rf"the training arguments ask for .*{name}=.*{value}", record["refused"])
        assert "patch_fleet works with all of them" in record["refused"]


class Theirs:
    """The part of a trainer that the mixin's constructor meets."""

    def __init__(self, model: Any = None, criterion: Any = None, args: Any = None) -> None:
        raise AssertionError("their constructor starts what is asked for")


class Mixed(RecomputeTrainerMixin, Theirs):  # type: ignore[misc]
    """With no library at all."""


class OfOneRank:
    """As the training arguments of PaddleFormers and PaddleNLP on one rank: they drop sharding."""

    def __init__(self, left: Any) -> None:
        self.max_grad_norm = 1.0
        self.sharding = left
        self.sharding_parallel_degree = -1


@pytest.mark.parametrize("left", ["", []], ids=["PaddleFormers", "PaddleNLP"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["--sharding", "stage1"], None),
        (["--sharding=stage2"], "sharding=stage2"),
        (["--lr", "1", "--sharding", "stage1", "offload", "--bf16"], "sharding=stage1 offload"),
        (["--sharding", "stage3 offload"], "sharding=stage3 offload"),
        (["--sharding_parallel_config", "split_param"], None),
        (["--sharding", ""], None),
        (["--sharding="], None),
        (["--no-sharding", "stage1"], None),
        ([], None),
    ],
)
def test_sharding_on_one_rank_is_refused(
    command: list[str], words: str | None, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *command])
    arguments = OfOneRank(left)
    expected = ConfigError if words else AssertionError  # their constructor comes after ours
    told = rf"the training arguments ask for {words};" if words else "starts what is asked for"
    with pytest.raises(expected, match=told):
        Mixed(args=arguments)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sharding": "stage3"}, "sharding=stage3"),
        (
            {"sharding": "stage1", "sharding_parallel_config": "enable_stage1_overlap"},
            "sharding=stage1 with stage1_overlap",
        ),
        ({"sharding": ["stage1"], "split_param": True}, "sharding=stage1 with split_param"),
        ({"sharding": "stage2"}, "sharding=stage2"),
        ({"sharding": ["stage1", "offload"]}, "sharding=stage1 offload"),
        ({"tensor_parallel_degree": 2}, "tensor_parallel_degree=2"),
        ({"pipeline_model_parallel_size": 4}, "pipeline_model_parallel_size=4"),
        ({"use_expert_parallel": True}, "use_expert_parallel=True"),
    ],
)
@pytest.mark.parametrize("by_name", [True, False])
def test_arguments_are_refused_before_theirs_are_obeyed(
    settings: dict[str, Any], words: str, by_name: bool
) -> None:
    arguments = types.SimpleNamespace(max_grad_norm=1.0, amp_master_grad=True, **settings)
    with pytest.raises(ConfigError, match=rf"the training arguments ask for {words};"):
        Mixed(args=arguments) if by_name else Mixed(None, None, arguments)
