"""One training in many ways: as a Program, compiled, on ranks, interrupted, in both modes in turns.

Each row of `WAYS` is trained in every one of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file

from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.report import read_metrics
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.train_step import build_optimizer
from tests.app.trainer.test_trainer import (
    assert_same_run,
    held_out,
    numbers_of,
    tiny,
    unmeasured,
    weights_of,
    write_pairs,
)
from tests.ranks import run_ranks

# The operators of a Program are dygraph's, in an order of their own. Seen after 6 steps at a high
# rate: nothing with Paddle 3.3.1, 1.5e-6 with 2.6.2.
LOSS = 1e-5
# 2.6e-7 with 2.6.2. A step is 1e-2.
WEIGHT = 1e-5
# The true gradient of the bias of an attention's keys is 0, and AdamW makes a step of the noise in
# it: 2.3e-5 with 2.6.2.
BIAS_OF_KEYS = 2e-4
# On two ranks the sums have another order. AdamW's first step is g / (|g| + 1e-8): where a gradient
# is about 1e-7, the rounding in it is a percent of the step. Seen: 1e-4 in 3 to 10 of 512 weights.
WEIGHT_ON_RANKS = 5e-4
# The factor of a clip is a float32 in a Program and a float64 on the host: a trust ratio passes a
# last bit on. Lars steps are 50 times as large as the others.
TRUST_RATIO = 2e-5

STILL = {"model__hidden_dropout": 0.0, "model__attention_dropout": 0.0}
DROPOUT = {"model__hidden_dropout": 0.1, "model__attention_dropout": 0.1}
LEARNED: dict[str, Any] = {
    "contrastive__learnable_temperature": True,
    "contrastive__mask_false_negatives": True,
}
MERGED = {"strategy__gradient_merge": True, "strategy__gradient_merge_configs__k_steps": 2}
LAMB = {"lamb_weight_decay": 0.02, "exclude_from_weight_decay": [".b_0"]}
LARS = {"lars_coeff": 0.1, "exclude_from_weight_decay": ["layer_norm", ".b_0"]}


def write_hard_negatives(path: Path) -> Path:
    """70 pairs, of 0 to 6 negatives each, 25 different positives."""
    random = np.random.default_rng(0)
    words = [" ".join(word) for word in random.permutation(
        [list("abcde"[i % 5] + "fghij"[i // 5 % 5] + "klmno"[i // 25]) for i in range(125)]
    )]  # fmt: skip
    lines = []
    for number in range(70):
        others = [words[place] for place in random.permutation(np.arange(95, 125))[: number % 7]]
        lines.append("\t".join([words[number], words[70 + number % 25], *others]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_duplicates(path: Path) -> Path:
    """90 pairs, 45 different queries and 30 different positives."""
    lines = [f"q{n % 45} w{n % 7}\tp{n % 30} w{n % 5}\n" for n in range(90)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


HARD: dict[str, Any] = {
    "contrastive__hard_negatives": 3,
    "contrastive__fill": "random",
    "contrastive__mask_false_negatives": True,
}
DISTINCT: dict[str, Any] = {
    "data__no_duplicates": True,
    "contrastive__matryoshka_dims": [4, 16],
    "contrastive__chunk_size": 3,
}
Way = tuple[Callable[[Path], Path], dict[str, Any]]
WAYS: dict[str, Way] = {
    "plain": (write_pairs, STILL),
    "learned temperature": (write_pairs, {**STILL, **LEARNED}),
    "merged": (write_pairs, {**DROPOUT, **MERGED}),
    "tiles": (write_pairs, {**STILL, **LEARNED, "contrastive__tile": 3}),
    "chunk_size": (write_pairs, {**DROPOUT, "contrastive__chunk_size": 3}),
    "chunk_tokens": (
        write_pairs,
        {**DROPOUT, **LEARNED, "contrastive__chunk_tokens": 30, "contrastive__tile": 3},
    ),
    "hard negatives": (write_hard_negatives, {**STILL, **HARD}),
    "hard negatives in chunks": (
        write_hard_negatives,
        {**STILL, **HARD, "contrastive__chunk_tokens": 30},
    ),
    "no duplicates": (write_duplicates, {**STILL, **DISTINCT}),
    "lars": (
        write_pairs,
        {
            **STILL,
            "strategy__lars": True,
            "strategy__lars_configs": LARS,
            "train__learning_rate": 0.5,
        },
    ),
    "lamb": (
        write_pairs,
        {**STILL, "strategy__lamb": True, "strategy__lamb_configs": LAMB},
    ),
}
# Programs with hard negatives: tests/static_graph/test_ranks.py.
SAMPLE = ["merged", "chunk_tokens", "lamb"]
TO_THE_BIT = {"chunk_size", "chunk_tokens"}
"""Chunks, loss and order are those of dygraph, in a Program too; so are the masks of dropout."""
RESUMED = {
    "merged": [("static", "static")],
    "chunk_tokens": [("dygraph", "static"), ("static", "dygraph")],
}
"""In which mode a run began, and in which it goes on."""
STEPS = 6


def sampled(cases: Iterable[Any], sample: Container[Any]) -> list[Any]:
    """Parameters of a test; those that are not in `sample` are of the long table."""
    marks = [() if one in sample else pytest.mark.matrix for one in cases]
    values = [one if isinstance(one, tuple) else (one,) for one in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


def train(folder: Path, name: str, way: str, **changes: Any) -> Path:
    """Train in ``folder/name``, which is returned."""
    write, settings = WAYS[way]
    if not (folder / "pairs.tsv").exists():
        write(folder / "pairs.tsv")
    common = {
        "train__max_steps": STEPS,
        "train__eval_before": False,
        "train__decay": "constant",  # the same rates whatever the last step is
        "train__output_dir": str(folder / name),
        **(held_out(folder) if write is not write_pairs else {}),
    }
    Trainer(tiny(folder, **{**common, **settings, **changes})).run()
    return folder / name


def resumed(whole: Path, name: str, way: str, **changes: Any) -> Path:
    """Train again what `whole` trained: killed after its last but one save, it goes on from there.

    The run is beside `whole`, in a folder called `name`.
    """
    run = whole.with_name(name)
    shutil.copytree(whole, run)
    shutil.rmtree(find_checkpoint(run / "checkpoint").folder)
    (run / "result.json").unlink()
    return train(whole.parent, name, way, **changes, train__resume=True)


def losses_of(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl")]


def temperatures_of(run: Path) -> list[float]:
    return [one.get("temperature", 0.05) for one in read_metrics(run / "metrics.jsonl")]


def moments_of(run: Path) -> dict[str, Any]:
    return load_file(find_checkpoint(run / "checkpoint").folder / "optimizer.safetensors")


def assert_close(one: Path, other: Path, *, loss: float = LOSS, weight: float = WEIGHT) -> None:
    assert losses_of(one)
    np.testing.assert_allclose(losses_of(one), losses_of(other), rtol=loss)
    np.testing.assert_allclose(temperatures_of(one), temperatures_of(other), rtol=loss)
    for of in (weights_of, moments_of):
        left, right = of(one), of(other)
        assert left and left.keys() == right.keys()
        for name, value in left.items():
            assert value.size == right[name].size
            expected = right[name].reshape(value.shape)
            of_keys = weight and "k_proj.bias" in name
            atol = max(weight, BIAS_OF_KEYS) if of_keys else weight
            np.testing.assert_allclose(value, expected, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("way", sampled(WAYS, SAMPLE))
def test_a_program_trains_what_dygraph_trains(tmp_path: Path, way: str) -> None:
    # A Program writes its weights back for each evaluation, and for each save: not in one step.
    settings = {"train__eval_every": 2, "train__save_every": STEPS // 2}
    runs = {
        mode: train(tmp_path, mode, way, mode=mode, **settings) for mode in ("static", "dygraph")
    }
    static, dygraph = runs.values()
    assert len(losses_of(static)) == STEPS
    if WAYS[way][0] is write_pairs:  # others hold out 2 pairs alone
        scores = [
            [one["valid"]["mrr"] for one in read_metrics(run / "metrics.jsonl") if "valid" in one]
            for run in (static, dygraph)
        ]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3) and len({*scores[0]}) > 1
    if way in TO_THE_BIT:
        assert_close(static, dygraph, loss=0, weight=0)
    elif way in ("lamb", "lars"):
        assert_close(static, dygraph, loss=TRUST_RATIO, weight=TRUST_RATIO)
    else:
        assert_close(static, dygraph)
    if way == "merged":
        still = train(tmp_path, "still", "plain", **MERGED, train__max_steps=1)
        assert losses_of(dygraph)[0] != losses_of(still)[0]
    if "contrastive__learnable_temperature" in WAYS[way][1]:
        assert "loss/logit_scale:moment1" in moments_of(static)
        assert len(set(temperatures_of(static))) == STEPS
    for began, mode in RESUMED.get(way, []):
        run = resumed(runs[began], f"{began} {mode}", way, mode=mode, **settings)
        assert_close(run, runs[mode], loss=0, weight=0)


@pytest.mark.parametrize("kind", ["lamb", "lars"])
def test_the_update_of_lamb_and_lars_is_paddles_own(tmp_path: Path, kind: str) -> None:
    config = tiny(tmp_path, **WAYS[kind][1])
    models = []
    for ours in (True, False):
        paddle.seed(0)
        with paddle.utils.unique_name.guard():
            model = build_model(config.model, 50)
        models.append(model)
        parameters = model.parameters()
        if ours:
            optimizer = build_optimizer(config.optimizer, model, 0.1)
        elif kind == "lamb":
            undecayed = {"exclude_from_weight_decay_fn": lambda one: one.name.endswith(".b_0")}
            optimizer = paddle.optimizer.Lamb(0.1, 0.02, parameters=parameters, **undecayed)
        else:
            undecayed = {"exclude_from_weight_decay": ["layer_norm", ".b_0"]}
            optimizer = paddle.incubate.optimizer.LarsMomentumOptimizer(
                0.1, 0.9, 0.1, parameter_list=parameters, **undecayed
            )
        for _ in range(3):
            paddle.seed(1)
            model(paddle.ones([2, 4], "int64")).square().mean().backward()
            optimizer.step()
            optimizer.clear_grad()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert (one.numpy() == other.numpy()).all()


def test_the_temperature_is_trained_without_weight_decay(tmp_path: Path) -> None:
    """Nor is it clipped apart: with a gradient of next to nothing it stays where it was."""
    runs = [
        train(tmp_path, str(decay), "learned temperature", train__weight_decay=decay)
        for decay in (0.0, 0.5)
    ]
    # After the first step only: later ones see other weights.
    first, other = (temperatures_of(run)[0] for run in runs)
    assert first == other != 0.05
    ones, others = map(weights_of, runs)
    assert any(not np.array_equal(ones[name], others[name]) for name in ones)
    assert not any("logit_scale" in name for name in ones)  # it is no part of the model


def test_no_batch_of_a_run_has_duplicates(tmp_path: Path) -> None:
    write_duplicates(tmp_path / "pairs.tsv")
    config = tiny(tmp_path, **{**held_out(tmp_path), **DISTINCT})
    data, size = prepare_data(config, 0, lambda: None), config.contrastive.global_batch
    for batch in build_loader(config, data, 0):
        pairs = [data.train[place] for place in batch["index"].tolist()]
        assert len({pair.query for pair in pairs}) == len({p.positive for p in pairs}) == size


INTERRUPTED: dict[str, tuple[str, dict[str, Any]]] = {
    "learned in chunks of pairs": ("chunk_size", LEARNED),
    "learned in chunks of tokens": ("chunk_tokens", {}),
    "other negatives in the second epoch": ("hard negatives in chunks", DROPOUT),
    "other batches in the second epoch": ("no duplicates", DROPOUT),
    "lamb": ("lamb", DROPOUT),
    "lars": ("lars", DROPOUT),
}


@pytest.mark.parametrize(
    "name",
    sampled(INTERRUPTED, ["learned in chunks of tokens", "other batches in the second epoch"]),
)
def test_a_resumed_run_repeats_the_bits(tmp_path: Path, name: str) -> None:
    way, changes = INTERRUPTED[name]
    steps = 12 if "epoch" in name else STEPS
    settings = {**changes, "train__max_steps": steps, "train__save_every": steps // 2}
    whole = train(tmp_path, "whole", way, **settings)
    run = resumed(whole, "run", way, **settings)
    assert_same_run(run, whole)
    assert temperatures_of(run) == temperatures_of(whole)


# ----------------------------------------------------------------------------------- two ranks

STEPS_ON_RANKS = 3

ON_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned": ("learned temperature", {"contrastive__chunk_tokens": 30}),
    "Program in chunks": ("tiles", {"mode": "static", "contrastive__chunk_tokens": 30}),
    "hard in chunks": ("hard negatives", {"contrastive__chunk_size": 3, "contrastive__tile": 5}),
    "no duplicates": ("no duplicates", {}),
}


@unmeasured
def train_on_two_ranks(folder: str) -> None:
    for name, (way, changes) in ON_RANKS.items():
        place = Path(folder) / WAYS[way][0].__name__
        train(place, name, way, launch__num_ranks=2, train__max_steps=STEPS_ON_RANKS, **changes)


def test_two_ranks_train_what_one_trains(tmp_path: Path) -> None:
    for write in (write_pairs, write_hard_negatives, write_duplicates):
        (tmp_path / write.__name__).mkdir()
        write(tmp_path / write.__name__ / "pairs.tsv")
        held_out(tmp_path / write.__name__)
    run_ranks(train_on_two_ranks, 2, timeout=200, folder=str(tmp_path))
    for name, (way, _) in ON_RANKS.items():
        place = tmp_path / WAYS[way][0].__name__
        alone = place / "alone" / way
        if not alone.exists():
            train(place, f"alone/{way}", way, train__max_steps=STEPS_ON_RANKS)
        found, expected = numbers_of(place / name), numbers_of(alone)
        assert len(found) == STEPS_ON_RANKS
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)
        assert_close(place / name, alone, loss=1e-4, weight=WEIGHT_ON_RANKS)


@unmeasured
def train_or_go_on(folder: str, **changes: Any) -> None:
    train(Path(folder), "run", "plain", train__resume="auto", **changes)


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    whole = train(tmp_path, "whole", "plain")
    for both in ((2, 1), (1, 2)):
        folder = tmp_path / f"from{both[0]}"
        folder.mkdir()
        write_pairs(folder / "pairs.tsv")
        for ranks, steps in zip(both, (3, STEPS), strict=True):
            given = {"folder": str(folder), "launch__num_ranks": ranks, "train__max_steps": steps}
            if ranks == 1:
                train_or_go_on(**given)
            else:
                run_ranks(train_or_go_on, ranks, **given)
        assert len(losses_of(folder / "run")) == STEPS
        assert_close(folder / "run", whole, loss=1e-4, weight=WEIGHT_ON_RANKS)
