"""The whole loop on a tiny model and a file of made-up pairs, on one rank and on two."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_recompute._paddle.amp import amp_state
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.retrieval import encode_batches
from paddle_recompute.app.trainer import (
    Trainer,
    chunk_search,
    evaluation,
    peak_memory,
    step,
    step_seed,
    total_steps,
)
from paddle_recompute.app.trainer import trainer as trainer_module
from paddle_recompute.app.trainer.loop import batches_of
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.contrastive import ContrastiveLoss
from paddle_recompute.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    SelectionError,
)
from tests.app.report.pages import Page
from tests.ranks import run_ranks
from tests.train_step.half_precision import pretended_gpu, rounded


def without_report(train: Any) -> Any:
    """For runs on ranks, which conftest.py does not reach."""
    return mock.patch.object(trainer_module, "write_report", lambda *_, **__: None)(train)


def unmeasured(train: Any) -> Any:
    """As `without_report`; nor is memory measured."""
    return without_report(mock.patch.object(chunk_search, "measure_peak", lambda *_: 1)(train))


NUM_PAIRS = 76  # 20 of them held out: 56 for training, 7 steps of 8 in an epoch


def write_pairs(path: Path) -> Path:
    """Made-up words and their translations, letter by letter: something that can be learned."""
    random = np.random.default_rng(0)
    letters, others = "abcdefghij", "klmnopqrst"
    words: set[str] = set()
    while len(words) < NUM_PAIRS:
        words.add("".join(random.choice(list(letters), size=6)))
    translation = str.maketrans(letters, others)
    lines = [f"{' '.join(word)}\t{' '.join(word.translate(translation))}" for word in sorted(words)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def held_out(folder: Path) -> dict[str, Any]:
    """Changes of `tiny`: two pairs of a file of their own, which this writes."""
    (folder / "valid.tsv").write_text("z z\ty y\nx x\tw w\n", encoding="utf-8")
    return {
        "data__valid_file": str(folder / "valid.tsv"),
        "data__valid_pairs": 2000,
        "data__pool_size": 3,
    }


def tiny(folder: Path, **changes: Any) -> Config:
    """A configuration for a 2-layer model; `changes` are dotted keys with ``__`` for dots."""
    tree: dict[str, Any] = {
        "model": {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 16,
            "type_vocab_size": 2,
            "pooling": "mean",
        },
        "contrastive": {"global_batch": 8},
        "data": {
            "source": "files",
            "train_file": str(folder / "pairs.tsv"),
            "cache_dir": str(folder / "cache"),
            "max_query_tokens": 10,
            "max_positive_tokens": 12,
            "valid_pairs": 20,
            "pool_size": 50,
            "vocab_size": 500,
        },
        "train": {
            "max_steps": 10,
            "learning_rate": 0.01,
            "warmup_steps": 2,
            "clip_grad_norm": 1.0,
            "output_dir": str(folder / "run"),
            "log_every": 1,
        },
    }
    for key, value in changes.items():
        *sections, name = key.split("__")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    if tree.get("recompute", {}).get("enable", True):
        # Of so small a model the plain figure takes longer than the run.
        tree["train"].setdefault("measure_plain", False)
    return Config.model_validate(tree)


def weights_of(output_dir: Path) -> dict[str, np.ndarray[Any, Any]]:
    return load_file(find_checkpoint(output_dir / "checkpoint").weights_file)


def numbers_of(output_dir: Path) -> list[tuple[Any, ...]]:
    """What a step does, without what the machine happens to do."""
    records = read_metrics(output_dir / "metrics.jsonl")
    return [(r["step"], r["epoch"], r["loss"], r["lr"], r["grad_norm"]) for r in records]


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers_of(one)
    assert numbers_of(one) == numbers_of(other)
    left, right = weights_of(one), weights_of(other)
    assert left
    assert left.keys() == right.keys()
    for key, value in left.items():
        np.testing.assert_array_equal(value, right[key], err_msg=key)


@pytest.mark.usefixtures("report")
def test_run_returns_and_writes_what_it_promises(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Trainer(tiny(folder, train__log_every=4)).run()
    output = folder / "run"
    assert record == json.loads((output / "result.json").read_text())
    given = {
        "world_size": 1,
        "steps": 10,
        "pool_size": 50,
        "queries": 20,
        "plain_peak_bytes": None,  # it need not be measured
        "output_dir": str(output),
    }
    assert {name: record[name] for name in given} == given
    assert record["examples_per_second"] > 0
    for key in ("recall@1", "recall@10", "mrr"):
        assert 0 <= record[f"untrained_{key}"] <= record[key] <= 1
    assert record["mrr"] > record["untrained_mrr"]
    assert "finished · 10 of 10 steps · 1 rank" in Page(output / "report.html").text
    shown = capsys.readouterr()
    assert "20 held-out queries, 50 candidates for each" in shown.out
    assert f"{output}/checkpoint/step-10" in shown.out
    assert "step 10/10" in shown.err
    records = read_metrics(output / "metrics.jsonl")
    assert [(one["step"], one["epoch"]) for one in records] == [(4, 0), (8, 1), (10, 1)]
    figures = {"loss", "lr", "grad_norm", "examples_per_second", "peak_bytes"}
    assert set(records[0]) == {"step", "epoch", *figures}
    assert records[0]["lr"] == pytest.approx(0.01 * 7 / 9)
    assert record["loss"] == records[-1]["loss"]


class Interrupted(Exception):
    pass


def interrupt_in_step(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the run die in its `number`-th step, as a power cut would."""

    train_step = step.TrainStep.__call__
    steps = itertools.count(1)

    def dying_train_step(self: Any, micro_batches: list[Any]) -> Any:
        if next(steps) == number:
            raise Interrupted
        return train_step(self, micro_batches)

    monkeypatch.setattr(step.TrainStep, "__call__", dying_train_step)


def test_resume_of_a_finished_run_keeps_its_record_or_makes_it(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = finished / "run"
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    for asked in (2, 1):  # that many, and fewer than were made
        again = Trainer(tiny(finished, train__max_steps=asked, train__resume=True)).run()
        assert again == json.loads((output / "result.json").read_text())
        shown = capsys.readouterr().out
        assert f"The run has ended: 2 steps are done, and {asked} are asked for" in shown
        assert "its record is kept" in shown
        assert "20 held-out queries" in shown
    after = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert after == before
    # It was killed in its last evaluation: what its steps were is in the checkpoint.
    file = output / "result.json"
    first = json.loads(file.read_text()) | {"output_dir": str(output)}
    file.unlink()
    again = Trainer(tiny(finished, train__max_steps=2, train__resume=True)).run()
    assert "has no record of step 2: the model is evaluated" in capsys.readouterr().out
    assert json.loads(file.read_text()) == again == first


def test_settings_without_effect_and_a_run_without_gain_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(config: Config, record: dict[str, Any]) -> list[str]:
        return [f"{record['steps']} steps taught nothing"]

    monkeypatch.setattr(trainer_module, "without_gain", told)
    settings = {
        "recompute__enable": False,
        "recompute__policy": "segments",
        "sync__mode": "fused",
        "train__max_steps": 2,
        "train__warmup_steps": 5,
        "train__eval_before": False,
    }
    record = Trainer(tiny(folder, **settings)).run()
    assert record["untrained_recall@1"] is None and record["recall@1"] is not None
    shown = capsys.readouterr().out
    for path in ("recompute.policy: segments", "sync.mode: fused"):
        assert shown.count(f"{path} has no effect here: ") == 1
    assert "train.warmup_steps: 5 is longer than the run of 2 steps" in shown
    assert "2 steps taught nothing" in shown
    later = {"data__vocab_size": 520, "train__max_steps": 3, "train__resume": True}
    Trainer(tiny(folder, **{**settings, **later})).run()
    shown = capsys.readouterr().out
    assert "train.max_steps was 2, is 3" in shown
    assert "was 500, is 520, which has no effect here: the voc" in shown


REFUSED: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "no such checkpoints": (
        SelectionError,
        r"'encoder\.layer\.\*' matches no sublayer",
        {"recompute__enable": False, "recompute__checkpoints": ["encoder.layer.*"]},
    ),
    "other ranks": (
        ConfigError,
        r"is 2, and 1 rank is running.*launch\.num_ranks=1",
        {"launch__num_ranks": 2},
    ),
    "too few distinct pairs": (
        DataError,
        r"do not fill one batch.*data\.no_duplicates: true puts no query or positive into a batch",
        {"contrastive__global_batch": 64, "data__no_duplicates": True},
    ),
    "unknown operators": (
        ConfigError,
        "custom_black_list: no operator of this Paddle is called 'layernorm'; did you mean lay",
        {
            "mode": "static",
            "strategy__amp": True,
            "strategy__amp_configs": {"dtype": "bfloat16", "custom_black_list": ["layernorm"]},
        },
    ),
    "no mixed precision on a CPU": (
        ConfigError,
        "would silently compute in float32.*strategy.amp: fal",
        {"strategy__amp": True},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_refused(folder: Path, name: str) -> None:
    kind, words, changes = REFUSED[name]
    with pytest.raises(kind, match=words):
        Trainer(tiny(folder, **changes)).run()
    if kind is ConfigError:
        assert not (folder / "cache").exists()  # before anything else is done


def test_recompute_and_measuring_memory_change_no_bit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"train__max_steps": 4, "train__eval_before": False}
    Trainer(tiny(folder, **short)).run()
    plain = {"recompute__enable": False, "train__output_dir": str(folder / "plain")}
    Trainer(tiny(folder, **short, **plain)).run()
    assert_same_run(folder / "run", folder / "plain")
    monkeypatch.setattr(chunk_search, "measure_peak", peak_memory.measure_peak)
    measured = {"train__measure": True, "train__output_dir": str(folder / "measured")}
    record = Trainer(tiny(folder, **short, **measured)).run()
    assert record["peak_bytes"] > 1
    assert_same_run(folder / "run", folder / "measured")


def test_memory_is_measured_if_asked_and_never_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[bool] = []

    def measure_peak(config: Config, *_: Any) -> int:
        calls.append(config.recompute.enable)
        return 1 << 40 if config.recompute.enable else 1 << 41

    monkeypatch.setattr(chunk_search, "measure_peak", measure_peak)
    short = {"train__eval_before": False, "train__measure_plain": True}
    Trainer(tiny(folder, **short, train__max_steps=1)).run()
    assert (calls, "Measuring" in capsys.readouterr().out) == ([], False)  # a CPU
    measured = {**short, "train__measure": True, "train__overwrite": True}
    Trainer(tiny(folder, **measured, train__max_steps=1)).run()
    assert calls == [True, False]
    more = {**short, "train__measure": True, "train__resume": True}
    record = Trainer(tiny(folder, **more, train__max_steps=2)).run()
    assert calls == [True, False]
    assert (record["peak_bytes"], record["plain_peak_bytes"]) == (1 << 40, 1 << 41)
    plain = {**measured, "train__max_steps": 1, "recompute__enable": False}
    capsys.readouterr()
    Trainer(tiny(folder, **plain)).run()
    assert "A step takes 2048.00 GiB; nothing is recomputed\n" in capsys.readouterr().out

    def fills_the_memory(config: Config, *_: Any) -> int:
        if not config.recompute.enable:
            paddle.ones([1 << 50])  # raises what Paddle raises where the memory is full
        return 1 << 20

    monkeypatch.setattr(chunk_search, "measure_peak", fills_the_memory)
    record = Trainer(tiny(folder, **measured, train__max_steps=1)).run()
    assert record["plain_peak_bytes"] is None
    assert "1.0 MiB as configured; without recompute, more than there is" in capsys.readouterr().out


def test_same_pairs_however_many_micro_batches(folder: Path) -> None:
    """The rows are compared: the weights differ, as a pair's negatives are its micro-batch."""
    rows = []
    for k_steps in (1, 4):
        merge = {"gradient_merge": k_steps > 1, "gradient_merge_configs": {"k_steps": k_steps}}
        config = tiny(folder, strategy=merge)
        loader = build_loader(config, prepare_data(config, 0, lambda: None), 0)
        steps = list(batches_of(config, loader, 5, 9))
        assert [(step, epoch) for step, epoch, _ in steps] == [(6, 0), (7, 0), (8, 1), (9, 1)]
        assert all(len(micro_batches) == k_steps for _, _, micro_batches in steps)
        rows.append(
            [
                paddle.concat([batch[side] for batch in micro_batches]).tolist()
                for _, _, micro_batches in steps
                for side in ("query", "positive")
            ]
        )
    assert rows[0] == rows[1]


def test_loss_that_is_no_number_stops_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = itertools.count(1)
    sound_loss = ContrastiveLoss.forward

    def forward(self: ContrastiveLoss, *vectors: Any, **named: Any) -> paddle.Tensor:
        loss = sound_loss(self, *vectors, **named)
        return loss * (float("nan") if next(losses) == 3 else 1.0)

    monkeypatch.setattr(ContrastiveLoss, "forward", forward)
    told = "^step 3: the loss is nan.* The weights are finite; the loss is the first that is not"
    with pytest.raises(DivergenceError, match=told):
        Trainer(tiny(folder, train__save_every=2)).run()
    assert find_checkpoint(folder / "run" / "checkpoint").step == 2
    assert [record["step"] for record in read_metrics(folder / "run" / "metrics.jsonl")] == [1, 2]


# ----------------------------------------------------------------------------- mixed precision


def test_mixed_precision_from_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Forward passes of steps and of the last evaluation run in it; nothing is rounded here."""
    levels = []

    def noted_encode_batches(*args: Any, **options: Any) -> Any:
        levels.append(str(amp_state().level))
        return encode_batches(*args, **options)

    monkeypatch.setattr(evaluation, "encode_batches", noted_encode_batches)
    Trainer(tiny(folder, train__output_dir=str(folder / "plain"), train__max_steps=3)).run()
    settings = {"strategy__amp": True, "strategy__amp_configs__dtype": "bfloat16"}
    with pretended_gpu():
        record = Trainer(tiny(folder, train__max_steps=3, **settings)).run()
    assert_same_run(folder / "run", folder / "plain")
    assert levels == ["AmpLevel.O0"] * 6 + ["AmpLevel.O1"] * 2
    assert "Mixed precision: bfloat16, level O1" in capsys.readouterr().out
    assert record["skipped_steps"] == 0
    assert "loss_scale" not in read_metrics(folder / "run" / "metrics.jsonl")[0]


FLOAT16 = {
    "strategy__amp": True,
    "strategy__amp_configs__init_loss_scaling": 2.0**19,
    "strategy__amp_configs__decr_every_n_nan_or_inf": 1,
    "strategy__amp_configs__decr_ratio": 0.5,
    "strategy__amp_configs__incr_every_n_steps": 1,
    "train__save_every": 4,
}


@pytest.fixture
def float16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The vectors, and their gradients, go through float16."""

    sound_loss = ContrastiveLoss.forward

    def forward(
        self: ContrastiveLoss, query: paddle.Tensor, positive: paddle.Tensor
    ) -> paddle.Tensor:
        return sound_loss(self, rounded(query), rounded(positive))

    monkeypatch.setattr(ContrastiveLoss, "forward", forward)
    with pretended_gpu():
        yield


@pytest.mark.usefixtures("report")
def test_skipped_steps_are_told_and_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], float16: None
) -> None:
    probed = []

    class NotedTrainStep(step.TrainStep):
        def __init__(self, *args: Any, **options: Any) -> None:
            probed.append(options["amp"])
            super().__init__(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(step, "TrainStep", NotedTrainStep)
        patch.setattr(chunk_search, "measure_peak", peak_memory.measure_peak)
        other = {"train__output_dir": str(folder / "whole"), "train__measure": True}
        whole = Trainer(tiny(folder, **other, **FLOAT16)).run()
    # The step whose memory is measured must not be skipped, or AdamW would make no moments.
    *measured, trained = probed
    assert {amp.init_loss_scaling for amp in measured} == {1}
    assert trained.init_loss_scaling == 2.0**19
    shown = capsys.readouterr()
    records = read_metrics(folder / "whole" / "metrics.jsonl")
    skipped = [record["step"] for record in records if record["grad_norm"] is None]
    assert skipped and len(skipped) < 10
    assert skipped[0] == 1 and skipped[-1] > 4  # some before the checkpoint, some after
    assert [r["skipped_steps"] for r in records] == [
        sum(number <= step for number in skipped) for step in range(1, 11)
    ]
    assert records[0]["loss_scale"] == 2.0**19 and records[1]["loss_scale"] == 2.0**18
    assert whole["skipped_steps"] == len(skipped)
    assert shown.out.count(" is skipped: not finite in float16 with") == len(skipped)
    assert "Step 1 is skipped" in shown.out
    assert f"{len(skipped)} of the steps skipped" in (folder / "whole/report.html").read_text()
    with monkeypatch.context() as patch:
        interrupt_in_step(patch, 6)
        with pytest.raises(Interrupted):
            Trainer(tiny(folder, **FLOAT16)).run()
    resumed = Trainer(tiny(folder, train__resume=True, **FLOAT16)).run()
    assert resumed["skipped_steps"] == whole["skipped_steps"]
    assert_same_run(folder / "run", folder / "whole")
    scales = [r["loss_scale"] for r in read_metrics(folder / "run" / "metrics.jsonl")]
    assert scales == [r["loss_scale"] for r in records]


# ------------------------------------------------------------------------------------ the ranks


@pytest.mark.parametrize(
    ("max_steps", "num_epochs", "expected"), [(5, None, 5), (None, 2, 14), (5, 2, 5), (99, 2, 14)]
)
def test_total_steps(max_steps: int | None, num_epochs: int | None, expected: int) -> None:
    limits = {"train__max_steps": max_steps, "train__num_epochs": num_epochs}
    assert total_steps(tiny(Path("nowhere"), **limits), 7) == expected


def test_every_step_and_rank_has_masks_of_its_own() -> None:
    seeds = {
        step_seed(seed, step, rank) for seed in range(3) for step in range(50) for rank in range(4)
    }
    assert len(seeds) == 3 * 50 * 4
    assert step_seed(1, 2, 3) == step_seed(1, 2, 3)


ON_TWO_RANKS = {
    "train__decay": "constant",
    "sync__compression": "bf16",
    "contrastive__learnable_temperature": True,
    "contrastive__mask_false_negatives": True,
    "contrastive__chunk_tokens": 30,
}


@unmeasured
def train_on_two_ranks(folder: str) -> list[dict[str, Any]]:
    """A run that is interrupted after step 4 and resumed, and one that is not; see what is said."""
    settings = {"launch__num_ranks": 2, **ON_TWO_RANKS}
    whole = str(Path(folder) / "whole")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        records = [
            Trainer(tiny(Path(folder), **settings, **changes)).run()
            for changes in (
                {"train__max_steps": 4},
                {"train__max_steps": 6, "train__resume": True},
                {"train__max_steps": 6, "train__output_dir": whole},
                {"train__max_steps": 6, "train__output_dir": whole, "train__resume": True},
            )
        ]
    return [{**record, "shown": shown.getvalue()} for record in records]


def test_two_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = run_ranks(train_on_two_ranks, 2, folder=str(folder))
    assert "20 held-out queries" in first[0].pop("shown")
    assert second[0].pop("shown") == ""
    assert first[0] == second[0]
    assert first[0]["world_size"] == 2
    assert first[0]["pool_size"] == 50
    assert_same_run(folder / "run", folder / "whole")
    for key in ("recall@1", "mrr", "untrained_mrr", "loss", "temperature"):
        assert first[1][key] == first[2][key]
    assert first[1]["temperature"] != 0.05
    assert {**first[3], "shown": None} == {**first[2], "shown": None}  # kept, by both ranks
    with_residuals = find_checkpoint(folder / "run" / "checkpoint")
    # Gone on with by one rank, which does not owe what two ranks owe.
    alone = {**ON_TWO_RANKS, "train__resume": True, "contrastive__negatives": "local"}
    Trainer(tiny(folder, **alone, train__max_steps=7)).run()
    said = capsys.readouterr().out
    assert "2 ranks saved it, and 1 go on: each step has the same pairs, but dropout" in said
    assert "a query meets the 8 pairs of its rank now" in said
    assert "2 ranks saved the bfloat16 rounding errors of their" in said
    assert with_residuals.has_sync_states
    assert not find_checkpoint(folder / "run" / "checkpoint").has_sync_states
