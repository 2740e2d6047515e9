"""Each example runs as its docstring says, learns, and is short enough to copy."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from paddle_recompute.errors import ConfigError
from tests.bfloat16 import needs_bfloat16
from tests.processes import outside_of_ranks, python
from tests.ranks import ROOT, run_ranks
from tests.train_step.half_precision import pretended_gpu

OPTIONS_OF_A_STEP = (
    *("accumulation", "compiled_graph", "data_parallel"),
    *("lamb_lars", "mixed_precision", "recompute"),
)
MOST_LINES = {**dict.fromkeys(OPTIONS_OF_A_STEP, 79), "train_contrastive": 89,
    **dict.fromkeys(("large_batch", "trainer", "clip"), 149)}  # fmt: skip


@pytest.mark.parametrize("script", MOST_LINES)
def test_it_is_short_enough_to_copy(script: str) -> None:
    text = (ROOT / "examples" / f"{script}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES[script]


# -------------------------------------------------------------- here, or in the pooled ranks


def run(script: str, *arguments: str) -> str:
    """What it prints."""
    shown = io.StringIO()
    path = str(ROOT / "examples" / f"{script}.py")
    with (
        mock.patch.object(sys, "argv", [path, *arguments]),
        contextlib.redirect_stdout(shown),
    ):
        runpy.run_path(path, run_name="__main__")
    return shown.getvalue()


FIVE = ("--steps", "5")


def check_losses(shown: str) -> None:
    losses = [float(one) for one in re.findall(r"^step \d+  loss (\S+)", shown, re.MULTILINE)]
    assert len(losses) == 5, shown
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("accumulation", ()),
        ("compiled_graph", ()),
        ("lamb_lars", ()),
        ("lamb_lars", ("--optimizer", "lars")),
        pytest.param("mixed_precision", ("--static",), marks=needs_bfloat16),
        ("recompute", ()),
    ],
)
def test_it_learns(script: str, arguments: tuple[str, ...]) -> None:
    shown = run(script, *FIVE, *arguments)
    check_losses(shown)
    if script == "recompute":
        assert "the losses of the plain model: equal" in shown
    if script == "compiled_graph":
        assert "compiled: one Program" in shown


def test_mixed_precision_in_dygraph() -> None:
    with pytest.raises(ConfigError, match="silently compute in float32"):
        run("mixed_precision", *FIVE)
    with pretended_gpu():
        shown = run("mixed_precision", *FIVE)
    check_losses(shown)
    assert "loss scale 32768" in shown


def data_parallel() -> list[str]:
    return [run("data_parallel", *FIVE, "--sync", mode) for mode in ("overlap", "fused")]


def test_data_parallel_learns_on_two_ranks() -> None:
    (overlap, fused), others = run_ranks(data_parallel, 2)
    check_losses(overlap)
    assert fused == overlap
    assert others == ["", ""]


def test_offload_sequential_learns() -> None:
    losses = [
        float(one) for one in re.findall(r"loss (\S+)", run("offload_sequential", "--steps", "6"))
    ]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]


def large_batch() -> str:
    return run("large_batch", "--pairs", "64", "--chunk-tokens", "128", "--steps", "10")


def test_large_batch_learns_in_chunks_of_the_size_it_says() -> None:
    shown, _ = run_ranks(large_batch, 2)
    steps = re.findall(
        r"^step \d+  loss (\S+)  temperature (\S+)  chunks (\d+)$", shown, re.MULTILINE
    )
    assert len(steps) == 10
    losses = [float(loss) for loss, _, _ in steps]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    assert len({temperature for _, temperature, _ in steps}) > 1
    # About 32 texts a side, of 14 letters on average, 128 at a time.
    assert all(5 < int(chunks) * 2 < 32 for _, _, chunks in steps)


@pytest.mark.timeout(300)  # a launcher and two ranks, beside other tests
def test_train_contrastive_finds_what_it_learned(tmp_path: Path) -> None:
    """Paddle's launcher starts the ranks."""
    pairs = [f"w{i} x{i * i % 97}\tW{i} X{i * i % 97}\n" for i in range(200)]
    (tmp_path / "pairs.tsv").write_text("".join(pairs))
    arguments = [
        str(ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"),
        "data.source=files",
        f"data.train_file={tmp_path / 'pairs.tsv'}",
        f"data.cache_dir={tmp_path / 'cache'}",
        "data.valid_pairs=20",
        "data.pool_size=100",
        "data.vocab_size=500",
        "model.num_layers=1",
        "model.hidden_size=16",
        "model.intermediate_size=16",
        "contrastive.global_batch=16",
        "contrastive.chunk_tokens=32",
        "contrastive.learnable_temperature=true",
        "train.max_steps=14",  # more than an epoch, which has 11 steps
        "train.warmup_steps=2",
        f"train.output_dir={tmp_path / 'run'}",
    ]
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", tmp_path]
    command = [*launcher, ROOT / "examples" / "train_contrastive.py", *arguments]
    shown = python(*command, folder=tmp_path, env=outside_of_ranks(), timeout=280).stdout
    losses = [float(loss) for loss in re.findall(r"^step \d+ +loss (\S+)$", shown, re.M)]
    assert len(losses) == 14
    assert sum(losses[-3:]) < sum(losses[:3])
    assert "'recall@1'" in shown and "'queries': 20" in shown
    assert (tmp_path / "run" / "model.pdparams").stat().st_size > 0
