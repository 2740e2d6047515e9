"""`paddle-recompute parity`: the whole way, its verdict and its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from click.testing import Result

from paddle_recompute.app import cli
from paddle_recompute.app.config import Config
from paddle_recompute.app.parity import runs
from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    FLEET,
    PAIRS,
    RUNS,
    Outcome,
    tolerance_of,
)
from paddle_recompute.errors import ConfigError
from tests.app.commands import command
from tests.app.encoder.test_own import Mean
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def outside_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets variables for the ranks; they are put back after each test."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in [name for name in os.environ if name.startswith("PADDLE_")]:
        monkeypatch.delenv(name)


def run(folder: Path, *arguments: str, code: int = 0, **changes: Any) -> Result:
    write_pairs(folder / "pairs.tsv")
    file = folder / "run.yaml"
    file.write_text(json.dumps(tiny(folder, **changes).to_dict()), encoding="utf-8")
    return command("parity", "--config", file, *arguments, code=code)


# A Program takes as long to build as it has operators.
ONE_LAYER: dict[str, Any] = {
    "model__num_layers": 1,
    "recompute__checkpoints": ["encoder.layers.*"],
}


@pytest.mark.timeout(300)  # five runs on two ranks
def test_the_whole_way(tmp_path: Path) -> None:
    """Two ranks, with a learned temperature, hard negatives and masked false negatives."""
    changes = {
        "contrastive__hard_negatives": 2,
        "contrastive__fill": "random",
        "contrastive__learnable_temperature": True,
        "contrastive__mask_false_negatives": True,
        "launch__num_ranks": 2,
        **ONE_LAYER,
    }
    result = run(tmp_path, "--steps", "2", "--json", **changes)
    record = json.loads(result.stdout)
    assert record == json.loads((tmp_path / "run" / "parity.json").read_text())
    assert record["ok"] is True and record["ranks"] == 2
    losses = {name: one["losses"] for name, one in record["runs"].items()}
    assert [*losses] == [*RUNS] and {len(one) for one in losses.values()} == {2}
    assert losses["dygraph plain"] == losses["dygraph recompute"] == losses[FLEET]
    assert losses["static plain"] == losses["static recompute"]
    assert [(one["left"], one["right"]) for one in record["comparisons"]] == [*PAIRS]
    bits = [one for one in record["comparisons"] if one["tolerance"] == "bit-equal"]
    assert len(bits) == 3
    assert all(one["gradient_difference"] == one["parameter_difference"] == 0 for one in bits)
    assert "5/5  static recompute" in result.stderr and "Parity." in result.stderr


def test_a_model_that_fleets_recompute_refuses_is_compared_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runs._train

    def train(config: Config, initial: dict[str, Any], *rest: Any) -> Outcome:
        """The run of fleet alone is made; the others are taken to be equal."""
        if config.recompute.engine == "fleet":
            return real(config, initial, *rest)
        return Outcome([2.0], [3.0], [1e-3], parameters=initial)

    monkeypatch.setattr(runs, "_train", train)
    patterns = ["embeddings", "encoder.layers.*"]  # token ids need no gradient
    result = run(tmp_path, "--steps", "1", "--json", recompute__checkpoints=patterns)
    record = json.loads(result.stdout)
    assert len(record["runs"]) == 4 and FLEET not in record["runs"]
    assert any("There is one rank" in note for note in record["notes"])
    [note] = [note for note in record["notes"] if "fleet" in note]
    assert note.startswith("Not compared with Paddle's own recompute and synchronization (fleet): ")
    assert "no argument of embeddings needs a gradient" in note


def test_recompute_that_keeps_parts_is_compared_without_fleet(tmp_path: Path) -> None:
    kept = {"recompute__keep": ["**.self_attn"], **ONE_LAYER}
    result = run(tmp_path, "--steps", "1", "--json", **kept)
    record = json.loads(result.stdout)
    assert record["ok"] is True and len(record["runs"]) == 4 and FLEET not in record["runs"]
    [note] = [note for note in record["notes"] if "fleet" in note]
    assert note.endswith("fleet does not support recompute.keep: ['**.self_attn'].")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"recompute__policy": "segments", "mode": "static"},
            "policy: segments: parity trains in dygraph, too, which refuses it; set policy: all",
        ),
        (
            {"recompute__policy": "budget", "recompute__memory_budget": "1GiB"},
            "policy: budget: parity makes no plan; set policy: all",
        ),
    ],
)
def test_a_policy_without_comparison_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        runs.train_and_compare(tiny(tmp_path, **changes), steps=1, say=print)


class DrawnByNumPy(Mean):
    """`train.seed` does not reach NumPy: each model draws other weights."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        drawn = np.random.standard_normal([vocab_size, 8]).astype("float32")
        attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(drawn))
        self.words = paddle.nn.Embedding(vocab_size, 8, weight_attr=attr)


def test_a_model_of_ones_own_with_the_gradient_cache_starts_from_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model = {"name": f"{DrawnByNumPy.__module__}:DrawnByNumPy"}
    result = run(tmp_path, "--steps", "2", "--json", model=model, contrastive__chunk_size=3)
    record = json.loads(result.stdout)
    [note] = [note for note in record["notes"] if "fleet" in note]
    assert note.endswith("fleet does not support contrastive.chunk_size: 3.")
    losses = [tuple(one["losses"]) for one in record["runs"].values()]
    assert len(losses) == 4 and record["ok"] is True
    assert len({*losses}) == 1  # in both modes, bit by bit


@pytest.mark.parametrize("spoiled", [None, "dygraph recompute"])
def test_a_run_that_differs_ends_with_1_and_the_name_of_the_parameter(
    tmp_path: Path, spoiled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Config] = []

    def train(config: Config, initial: dict[str, Any], *_: Any) -> Outcome:
        gradients = {name: np.full(one.shape, 0.5, "float32") for name, one in initial.items()}
        if RUNS[len(done)] == spoiled:
            gradients["pooler.dense.weight"][1, 1] += 1e-3
        done.append(config)
        return Outcome([1.0] * 5, [1.0] * 5, [1e-3], gradients, initial)

    monkeypatch.setattr(runs, "_train", train)
    result = run(tmp_path, model__pooling="cls", code=1 if spoiled else 0)
    faults = [line for line in result.stdout.splitlines() if line.startswith("NO PARITY: ")]
    assert len(faults) == sum(spoiled in pair for pair in PAIRS)
    for fault in faults:
        assert spoiled in fault
        assert "gradient of pooler.dense.weight: differs by 0.001" in fault
    assert ("Parity." in result.stdout) == (spoiled is None)
    configured = [(one.mode, one.recompute.enable, one.recompute.engine) for one in done]
    assert configured == [
        ("dygraph", False, "paddle_recompute"),
        ("dygraph", True, "paddle_recompute"),
        ("dygraph", True, "fleet"),
        ("static", False, "paddle_recompute"),
        ("static", True, "paddle_recompute"),
    ]
    assert [one.sync.mode for one in done] == ["auto", "auto", "fleet", "auto", "auto"]


@pytest.mark.parametrize(
    ("name", "of_other_rank"), [("embeddings.word.weight", 1), ("the loss", [2.5])]
)
def test_ranks_that_drift_apart_are_told(
    name: str, of_other_rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(config: Config, initial: dict[str, Any], *_: Any) -> Outcome:
        return Outcome([2.0], [3.0], [1e-3], parameters=initial)

    monkeypatch.setattr(runs, "_train", train)
    monkeypatch.setattr(runs, "values_of_ranks", lambda own, _: [own, own | {name: of_other_rank}])
    result = run(tmp_path, code=1)
    faults = [line for line in result.stdout.splitlines() if line.startswith("NO PARITY: ")]
    assert faults == [f"NO PARITY: {one}: {name} differs between the ranks" for one in RUNS]


@pytest.mark.parametrize(
    ("ranks", "negatives", "modes", "fleet"),
    [
        (1, "global", BETWEEN_MODES, EXACT),
        (2, "global", BETWEEN_RANKS, EXACT),
        (2, "local", BETWEEN_MODES, EXACT),
        (4, "global", BETWEEN_RANKS, BETWEEN_RANKS),
    ],
)
def test_how_closely_runs_must_agree(
    ranks: int, negatives: str, modes: object, fleet: object, tmp_path: Path
) -> None:
    config = tiny(tmp_path, launch__num_ranks=ranks, contrastive__negatives=negatives)
    assert [tolerance_of(*pair, config) for pair in PAIRS] == [EXACT, fleet, EXACT, modes, modes]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recompute__enable": False}, ["with and without recompute", "recompute.enable=true"]),
        ({"contrastive__memory_budget": "1GiB"}, ["memory_budget", "set contrastive.chunk_tokens"]),
        ({"sync__mode": "fused"}, ["a static graph cannot honour", "sync.mode"]),
        ({"strategy__sharding": True}, ["strategy.sharding", "does not go with mode: static"]),
    ],
)
def test_what_a_mode_cannot_honour_is_one_paragraph_and_code_2(
    changes: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise AssertionError("a run has begun")

    monkeypatch.setattr(cli._on_ranks, "run_on_ranks", begin)
    result = run(tmp_path, code=2, **changes)
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr
