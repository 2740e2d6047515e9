"""`paddle-recompute parity`: the whole way, its verdict and its exit code."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

from paddle_recompute.app import cli, parity
from paddle_recompute.app.config import Config
from paddle_recompute.app.parity.outcome import WEIGHTS, Outcome
from paddle_recompute.app.parity.variants import Variant, plan
from tests.app.encoder.test_own import Mean
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.ranks import ROOT


@pytest.fixture(autouse=True)
def outside_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PADDLE_TRAINER_ID", raising=False)
    # One thread: this process has set it so, by importing Paddle.
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def run(folder: Path, *arguments: str, **changes: Any) -> Result:
    write_pairs(folder / "pairs.tsv")
    file = folder / "run.yaml"
    file.write_text(json.dumps(tiny(folder, **changes).to_dict()), encoding="utf-8")
    return CliRunner().invoke(cli.main, ["parity", "--config", str(file), *arguments])


@pytest.mark.timeout(300)  # a process that trains five runs
def test_one_process_from_end_to_end(tmp_path: Path) -> None:
    """With a learned temperature, hard negatives and masked false negatives."""
    changes = {
        "contrastive__hard_negatives": 2,
        "contrastive__fill": "random",
        "contrastive__learnable_temperature": True,
        "contrastive__mask_false_negatives": True,
    }
    result = run(tmp_path, "--steps", "2", "--json", **changes)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["parity"] is True
    assert "launch.num_ranks is 1" in record["notes"][0]
    runs = {(one["mode"], one["recompute"]): one for one in record["runs"] if not one["reference"]}
    references = [one for one in record["runs"] if one["reference"]]
    assert len(runs) == len(record["runs"]) - len(references) == 4
    assert [(one["mode"], one["recompute"]) for one in references] == [("dygraph", True)]
    for one in references:
        assert one["losses"] == runs["dygraph", True]["losses"]
    for mode in ("dygraph", "static"):
        plain, recomputed = runs[mode, False], runs[mode, True]
        assert len(plain["losses"]) == 2
        assert plain["losses"] == recomputed["losses"]
    bits = [one for one in record["comparisons"] if one["tolerance"] == "bit-equal"]
    assert len(bits) == 3
    assert sum(one["right"] == "dygraph fleet, 1 process" for one in bits) == 1
    assert all(one["gradient_difference"] == one["parameter_difference"] == 0 for one in bits)
    modes = [one for one in record["comparisons"] if one["tolerance"] == "modes"]
    assert {one["case"] for one in modes} == {"dropout"}
    left = sorted(path.name for path in (tmp_path / "run" / "parity").rglob("*.safetensors"))
    assert left == [], "arrays are removed, logs stay"
    assert "5/5  static recompute, 1 process (dropout)" in result.stderr


@pytest.mark.timeout(300)  # a process that trains five runs
def test_a_model_that_fleets_recompute_refuses_is_compared_without_it(tmp_path: Path) -> None:
    patterns = ["embeddings", "encoder.layers.*"]  # token ids need no gradient
    still = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
    result = run(tmp_path, "--steps", "1", "--json", recompute__checkpoints=patterns, **still)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert len(record["runs"]) == 4 and not any(one["reference"] for one in record["runs"])
    [note] = [note for note in record["notes"] if "fleet" in note]
    assert note.startswith("Not compared with Paddle's own recompute and synchronization (fleet): ")
    assert "no argument of embeddings needs a gradient" in note
    assert "5/5  static recompute, 1 process (no dropout)" in result.stderr


class DrawnByNumPy(Mean):
    """`train.seed` does not reach NumPy: each model draws other weights."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        drawn = np.random.standard_normal([vocab_size, 8]).astype("float32")
        attr = paddle.ParamAttr(initializer=paddle.nn.initializer.Assign(drawn))
        self.words = paddle.nn.Embedding(vocab_size, 8, weight_attr=attr)


@pytest.mark.timeout(300)  # a process that trains four runs
def test_a_model_of_ones_own_with_the_gradient_cache_starts_from_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    model = {"name": f"{DrawnByNumPy.__module__}:DrawnByNumPy"}
    result = run(tmp_path, "--steps", "2", "--json", model=model, contrastive__chunk_size=3)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert any("contrastive.chunk_size: 3" in note for note in record["notes"])
    losses = [tuple(one["losses"]) for one in record["runs"]]
    assert len(losses) == 4 and record["parity"] is True
    assert len({*losses}) == 1  # in both modes, bit by bit


def fake_runs(spoil: Variant | None) -> Any:
    """In place of the ranks: every run has the same numbers, but for one of `spoil`."""

    def train(folder: Path, config: Config, steps: int, ranks: int) -> None:
        weights = {name: np.ones([2, 2], "float32") for name in ("embedding", "pooler.weight")}
        save_file(weights, folder / WEIGHTS)
        for variant in plan(config).variants:
            gradients = {name: np.full([2, 2], 0.5, "float32") for name in weights}
            kind = "fleet" if variant.reference else variant.recompute
            if (variant.mode, kind, variant.ranks) == spoil:
                gradients["pooler.weight"][1, 1] += 1e-3
            parameters = {name: weights[name] - 1e-3 for name in weights}
            found = Outcome([1.0] * steps, [1.0] * steps, [1e-3], None, gradients, parameters)
            found.write(folder / variant.file)

    return train


@pytest.mark.parametrize("as_json", [False, True])
def test_parity_ends_with_0_and_a_table(
    tmp_path: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "_train", fake_runs(None))
    arguments = ["--json"] if as_json else []
    result = run(tmp_path, *arguments, launch__num_ranks=2, launch__device="cpu")
    assert result.exit_code == 0, result.output
    if as_json:
        assert json.loads(result.stdout)["faults"] == []
    else:
        assert result.stdout.splitlines()[-1] == "Parity."
        assert "static recompute, 2 ranks" in result.stdout


@pytest.mark.parametrize(
    "spoiled",
    [("static", True, 2), ("dygraph", False, 1), ("static", False, 1), ("dygraph", "fleet", 2)],
)
def test_a_run_that_differs_ends_with_1_and_the_name_of_the_parameter(
    tmp_path: Path, spoiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "_train", fake_runs(spoiled))
    result = run(tmp_path, launch__num_ranks=2, launch__device="cpu")
    assert result.exit_code == 1, result.output
    mode, kind, ranks = spoiled
    kind = {False: "plain", True: "recompute"}.get(kind, kind)
    faults = [line for line in result.stdout.splitlines() if line.startswith("NO PARITY: ")]
    assert faults
    for fault in faults:
        assert f"{mode} {kind}, {ranks} " in fault
        assert "gradient of pooler.weight: an element differs by 0.001" in fault
    assert "Parity." not in result.stdout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"contrastive__memory_budget": "1GiB"}, ["memory_budget", "set contrastive.chunk_tokens"]),
        ({"recompute__offload": "disk"}, ["a static graph cannot honour", "recompute.offload"]),
        ({"sync__mode": "fused"}, ["a static graph cannot honour", "sync.mode"]),
        ({"strategy__sharding": True}, ["strategy.sharding", "not supported by mode: static"]),
        ({"strategy__amp": True}, ["strategy.amp_configs.dtype: float16", "loss scale, which"]),
        (
            {"recompute__offload_parameters": "disk"},
            ["offload_parameters", "not supported by mode: static"],
        ),
    ],
)
def test_what_a_mode_cannot_honour_is_one_paragraph_and_code_2(
    changes: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any) -> None:
        raise AssertionError("a run has begun")

    monkeypatch.setattr(parity, "_train", train)
    result = run(tmp_path, **changes)
    assert result.exit_code == 2, result.output
    assert all(word in result.stderr for word in words)
    assert "Traceback" not in result.stderr


def test_the_help_says_what_the_reference_is() -> None:
    result = CliRunner().invoke(cli.main, ["parity", "--help"])
    words = " ".join(result.output.split())
    assert 'The runs named "fleet" are the reference' in words
    assert "recompute.engine: fleet" in words and "sync.mode: fleet" in words
