"""Mined negatives, against brute force; interrupted runs write the same bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from paddle_recompute.app import cli
from paddle_recompute.app.data import normal_form, read_pairs
from paddle_recompute.app.retrieval import (
    Index,
    MiningOptions,
    encode_batches,
    encode_texts,
    load_encoder,
    mine,
)
from paddle_recompute.app.retrieval import mining as module
from paddle_recompute.app.retrieval.nearest import top_of_tiles
from paddle_recompute.errors import DataError
from tests.app.trainer.trained_run import make_run, texts

POOL = [*texts(60), "Big Dog!", "the end"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``run``, ``pool.txt`` and ``pairs.tsv``: 9 pairs of 7 queries."""
    folder = tmp_path_factory.mktemp("mined")
    make_run(folder)
    (folder / "pool.txt").write_text("\n".join(POOL) + "\n", encoding="utf-8")
    some = texts(60)
    lines = [f"{some[i % 7]}\t{some[20 + i]}" for i in range(9)]
    lines[3] += "\tan old negative"
    lines[4] = "big cat\tbig dog"
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)


def plainly(made: Path, options: MiningOptions) -> list[list[str]]:
    """The negatives of each pair, from the matrix of all scores."""
    encoder, pairs = load_encoder(made / "run"), read_pairs(made / "pairs.tsv").pairs

    def vectors(some: list[str], limit: int) -> Any:
        found = encode_batches(
            encoder.model, encoder.tokenizer, some, max_tokens=limit, batch_size=256
        )
        return found.astype(np.float64)

    query = vectors([pair.query for pair in pairs], 10)
    positive = vectors([pair.positive for pair in pairs], 12)
    scores = (query @ vectors(POOL, 12).T).astype(np.float32)
    found = []
    for row, pair in enumerate(pairs):
        same = [one.positive for one in pairs if one.query == pair.query]
        barred = {normal_form(text) for text in (pair.query, *same)}
        of_positive = np.float32(query[row] @ positive[row])
        order = [p for p in np.argsort(-scores[row], kind="stable") if normal_form(POOL[p])
                 not in barred]  # fmt: skip
        chosen = []
        for place in order[options.first_rank - 1 : options.last_rank]:
            far = options.margin is None or scores[row, place] <= of_positive - options.margin
            share = options.relative_margin
            if share is not None:
                far = far and scores[row, place] <= of_positive - share * abs(of_positive)
            if far:
                chosen.append(POOL[place])
        found.append(chosen[: options.num_negatives])
    return found


@pytest.mark.parametrize(
    "options",
    [
        MiningOptions(),
        MiningOptions(num_negatives=3, first_rank=4, last_rank=9),
        MiningOptions(margin=0.1, last_rank=40),
        MiningOptions(relative_margin=0.2, margin=0.05, num_negatives=50),
    ],
    ids=["nearest", "ranks", "margin", "both margins"],
)
def test_negatives_are_those_of_brute_force(
    made: Path, tmp_path: Path, options: MiningOptions
) -> None:
    encoder = load_encoder(made / "run")
    record = mine(encoder, made / "pairs.tsv", made / "pool.txt", tmp_path / "out.jsonl", options)
    expected = plainly(made, options)
    pairs = read_pairs(made / "pairs.tsv").pairs
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(line["query"], line["positive"]) for line in lines] == [
        (pair.query, pair.positive) for pair in pairs
    ]
    assert [line["negatives"] for line in lines] == expected
    assert (record["done"], record["pairs"], record["replaced"]) == (9, 9, 1)
    sizes = np.bincount([len(one) for one in expected], minlength=options.num_negatives + 1)
    assert record["lines_with"] == sizes.tolist()
    assert sum(record["scores_of_negatives"]) == sum(map(len, expected))
    assert sum(record["scores_of_positives"]) == 9
    read_pairs(tmp_path / "out.jsonl")  # what was written is read


def test_equal_texts_in_another_writing_are_no_negatives(made: Path, tmp_path: Path) -> None:
    every = MiningOptions(num_negatives=100)
    encoder, output = load_encoder(made / "run"), tmp_path / "out.jsonl"
    mine(encoder, made / "pairs.tsv", made / "pool.txt", output, every)
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[4]["positive"] == "big dog"
    assert "Big Dog!" not in lines[4]["negatives"]
    assert "Big Dog!" in lines[0]["negatives"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kill_at", [("mine", 0), ("mine", 4), ("mine", 8)])
def test_a_killed_run_continues_to_the_same_bytes(
    made: Path, tmp_path: Path, kill_at: tuple[str, int], faiss: str | None = None
) -> None:
    encoder = load_encoder(made / "run")
    arguments = (encoder, made / "pairs.tsv", made / "pool.txt")
    whole = mine(*arguments, tmp_path / "whole.jsonl", faiss=faiss)

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == kill_at:
            raise Killed

    with pytest.raises(Killed):
        mine(*arguments, tmp_path / "parts.jsonl", faiss=faiss, progress=kill)
    if kill_at in (("mine", 4), ("mine", 8)):  # in the middle of a write
        with (tmp_path / "parts.jsonl").open("ab") as file:
            file.write(b'{"query": "half a li')
    seen: list[tuple[str, int, int]] = []
    again = mine(
        *arguments, tmp_path / "parts.jsonl", faiss=faiss, progress=lambda *at: seen.append(at)
    )
    assert again == whole
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    of_mine = kill_at[1] if faiss is None else 0  # another index may find other texts
    assert next(done for what, done, _ in seen if what == "mine") == of_mine
    assert mine(*arguments, tmp_path / "parts.jsonl", faiss=faiss) == whole  # nothing is left to do


def test_a_run_killed_before_its_first_record_counts_once(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = load_encoder(made / "run")
    lines = (made / "pairs.tsv").read_text(encoding="utf-8").splitlines()
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{line}\told\n" for line in lines), encoding="utf-8")
    arguments = (encoder, pairs, made / "pool.txt")
    whole = mine(*arguments, tmp_path / "whole.jsonl")
    written = module.write_json

    def kill(path: Path, tree: dict[str, Any]) -> None:
        if tree["done"]:
            raise Killed
        written(path, tree)

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_json", kill)
        with pytest.raises(Killed):
            mine(*arguments, tmp_path / "parts.jsonl")
    assert (tmp_path / "parts.jsonl").stat().st_size
    assert mine(*arguments, tmp_path / "parts.jsonl") == whole
    assert whole["replaced"] == len(lines) + 1


def test_other_inputs_are_refused(made: Path, tmp_path: Path) -> None:
    encoder = load_encoder(made / "run")
    output = tmp_path / "out.jsonl"
    mine(encoder, made / "pairs.tsv", made / "pool.txt", output)
    with pytest.raises(DataError, match=r"exists, and was made with options="):
        mine(encoder, made / "pairs.tsv", made / "pool.txt", output, MiningOptions(margin=0.1))
    with pytest.raises(DataError, match=r"received the suffix '.tsv'; allowed is .jsonl"):
        mine(encoder, made / "pairs.tsv", made / "pool.txt", tmp_path / "out.tsv")
    make_run(tmp_path, seed=1)
    with pytest.raises(DataError, match="was encoded by another model than that in"):
        pool = Path(f"{output}.pool.npy")
        mine(load_encoder(tmp_path / "run"), made / "pairs.tsv", pool, tmp_path / "b.jsonl")
    file = Path(f"{output}.json")
    file.write_text(file.read_text().replace('"lines_with"', '"lines"'))
    with pytest.raises(DataError, match=r"out.jsonl.json: is damaged"):
        mine(encoder, made / "pairs.tsv", made / "pool.txt", output)


@pytest.mark.parametrize(
    "values",
    [
        {"num_negatives": 0},
        {"first_rank": 0},
        {"first_rank": 5, "last_rank": 4},
        {"margin": -0.1},
        {"relative_margin": 3.0},
        {"margin": "0.1"},
        {"num_negatives": 2.5},
    ],
)
def test_options_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(
        DataError,
        match=r"received (MiningOptions\(.*|\w+=\S+); allowed|received ranks \d.* from 0 to 2",
    ):
        MiningOptions(**values)


def test_the_search_is_bounded_in_memory() -> None:
    tiles = (np.full((4096, 8), number, np.float32) for number in range(40))
    tracemalloc.start()
    top_of_tiles(np.ones((64, 8), np.float32), tiles, 100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One tile of scores is 64 * 4096 * 8 bytes = 2 MB; all of them are 84 MB. Each score of a tile
    # is above those of the tile before: a worst case.
    assert peak < 24e6


def test_command(made: Path, tmp_path: Path) -> None:
    output = tmp_path / "mined.jsonl"
    arguments = ["mine", "--model", str(made / "run"), "--pairs", str(made / "pairs.tsv")]
    arguments += ["--pool", str(made / "pool.txt"), "--output", str(output)]
    result = CliRunner().invoke(cli.main, [*arguments, "--num-negatives", "2", "--ranks", "2:30"])
    assert result.exit_code == 0, result.output
    shown = result.stdout.splitlines()
    assert shown[0] == f"9 pairs: {output}"
    assert shown[1] == "  9 with 2 negatives"
    assert "  1 earlier negatives are replaced" in shown
    assert any(line.startswith("  score ") for line in shown)
    record = json.loads(shown[-1])
    assert record["options"] == {
        "num_negatives": 2,
        "first_rank": 2,
        "last_rank": 30,
        "margin": None,
        "relative_margin": None,
    }
    again = CliRunner().invoke(cli.main, [*arguments, "--ranks", "30"])
    assert again.exit_code == 2
    assert "--ranks 30: expected FIRST:LAST, as in 1:100" in again.stderr


def test_a_blank_text_of_the_pool_is_no_negative(made: Path, tmp_path: Path) -> None:
    """`read_pairs` would refuse it."""
    encoder = load_encoder(made / "run")
    pool = [*(made / "pool.txt").read_text(encoding="utf-8").splitlines()[:5], "", "  "]
    Index(encode_texts(encoder, pool), pool, encoder=encoder).save(tmp_path / "pool.npy")
    mine(encoder, made / "pairs.tsv", tmp_path / "pool.npy", tmp_path / "mined.jsonl")
    assert any(pair.negatives for pair in read_pairs(tmp_path / "mined.jsonl").pairs)
