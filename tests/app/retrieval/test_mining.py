"""Mined negatives, against brute force; interrupted runs write the same bytes."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute.app.data import normal_form, read_pairs
from paddle_recompute.app.retrieval import (
    Index,
    MiningOptions,
    encode_texts,
    load_encoder,
    mine,
)
from paddle_recompute.app.retrieval import mining as module
from paddle_recompute.app.retrieval.index import top_of_tiles
from paddle_recompute.errors import DataError
from tests.app.commands import command
from tests.app.trainer.trained_run import make_run, texts

POOL = [*texts(60), "Big Dog!", "the end"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``run``, ``pool.txt`` and ``pairs.tsv``: 9 pairs of 7 queries, one in two spellings."""
    folder = tmp_path_factory.mktemp("mined")
    make_run(folder)
    (folder / "pool.txt").write_text("\n".join(POOL) + "\n", encoding="utf-8")
    some = texts(60)
    lines = [f"{some[i % 7]}\t{some[20 + i]}" for i in range(9)]
    lines[3] += "\tan old negative"
    lines[4] = "big cat\tbig dog"
    lines[8] = lines[8].replace(some[1], f"{some[1].upper()}!")
    (folder / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 4)


def mined(made: Path, output: Path, *options: Any, **more: Any) -> dict[str, Any]:
    encoder = load_encoder(made / "run")
    return mine(encoder, made / "pairs.tsv", made / "pool.txt", output, *options, **more)


def plainly(made: Path, options: MiningOptions) -> list[list[str]]:
    """The negatives of each pair, from the matrix of all scores."""
    encoder, pairs = load_encoder(made / "run"), read_pairs(made / "pairs.tsv").pairs
    query = encode_texts(encoder, [pair.query for pair in pairs], side="query").astype(np.float64)
    positive = encode_texts(encoder, [pair.positive for pair in pairs])
    scores = (query @ encode_texts(encoder, POOL).T.astype(np.float64)).astype(np.float32)
    found = []
    for row, pair in enumerate(pairs):
        form = normal_form(pair.query)
        same = [one.positive for one in pairs if normal_form(one.query) == form]
        barred = {normal_form(text) for text in (pair.query, *same)}
        of_positive = np.float32(query[row] @ positive[row])
        order = np.argsort(-scores[row], kind="stable")
        order = [place for place in order if normal_form(POOL[place]) not in barred]
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
        MiningOptions(num_negatives=3, first_rank=4, last_rank=9),
        MiningOptions(relative_margin=0.2, margin=0.05, num_negatives=50),
        MiningOptions(num_negatives=100),
    ],
    ids=["ranks", "margins", "all"],
)
def test_negatives_are_those_of_brute_force(
    made: Path, tmp_path: Path, options: MiningOptions
) -> None:
    record = mined(made, tmp_path / "out.jsonl", options)
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


def test_texts_that_are_no_negatives(made: Path, tmp_path: Path) -> None:
    """An equal text in another writing; a blank one, which `read_pairs` would refuse."""
    encoder, pool = load_encoder(made / "run"), [*POOL, "", "  "]
    Index(encode_texts(encoder, pool), pool, encoder=encoder).save(tmp_path / "pool.npy")
    output, every = tmp_path / "out.jsonl", MiningOptions(num_negatives=100)
    mine(encoder, made / "pairs.tsv", tmp_path / "pool.npy", output, every)
    pairs = read_pairs(output).pairs
    assert pairs[4].positive == "big dog"
    assert "Big Dog!" not in pairs[4].negatives
    assert "Big Dog!" in pairs[0].negatives


class Killed(BaseException):
    pass


def test_a_killed_run_continues_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    whole = mined(made, tmp_path / "whole.jsonl")

    def kill(what: str, done: int, total: int) -> None:
        if (what, done) == ("mine", 4):
            raise Killed

    output = tmp_path / "parts.jsonl"
    with pytest.raises(Killed):
        mined(made, output, progress=kill)
    with output.open("ab") as file:  # in the middle of a write
        file.write(b'{"query": "half a li')
    seen: list[tuple[str, int, int]] = []
    again = mined(made, output, progress=lambda *at: seen.append(at))
    assert again == whole
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert next(done for what, done, _ in seen if what == "mine") == 4
    assert mined(made, output) == whole  # nothing is left to do


def test_other_inputs_are_refused(made: Path, tmp_path: Path) -> None:
    output, pool = tmp_path / "out.jsonl", tmp_path / "out.jsonl.pool.npy"
    mined(made, output)
    with pytest.raises(DataError, match=r"exists, and was made with options="):
        mined(made, output, MiningOptions(margin=0.1))
    with pytest.raises(DataError, match=r"received the suffix '.tsv'; allowed is .jsonl"):
        mined(made, tmp_path / "out.tsv")
    with pytest.raises(DataError, match="received ranks 101 to 100"):
        MiningOptions(first_rank=101)
    make_run(tmp_path, seed=1)
    with pytest.raises(DataError, match="was encoded by another model than that in"):
        mine(load_encoder(tmp_path / "run"), made / "pairs.tsv", pool, tmp_path / "b.jsonl")
    file = Path(f"{output}.json")
    file.write_text(file.read_text().replace('"lines_with"', '"lines"'))
    with pytest.raises(DataError, match=r"out.jsonl.json: is damaged"):
        mined(made, output)


def test_the_search_is_bounded_in_memory() -> None:
    tiles = (np.full((4096, 8), number, np.float32) for number in range(40))
    tracemalloc.start()
    top_of_tiles(np.ones((64, 8), np.float32), tiles, 100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # One tile of scores is 64 * 4096 * 8 bytes = 2 MB; all of them are 84 MB. Each score of a tile
    # is above those of the tile before: a worst case.
    assert peak < 24e6


def mining(made: Path, output: Path) -> list[str | Path]:
    pairs: list[str | Path] = ["--pairs", made / "pairs.tsv", "--pool", made / "pool.txt"]
    return ["mine", "--model", made / "run", *pairs, "--output", output]


def test_command(made: Path, tmp_path: Path) -> None:
    output = tmp_path / "mined.jsonl"
    arguments = mining(made, output)
    result = command(*arguments, "--num-negatives", "2", "--ranks", "2:30")
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
    for ranks, words in (
        ("30", "--ranks 30: expected FIRST:LAST, as in 1:100"),
        ("5:4", "received ranks 5 to 4; the first is at least 1, and at most the last"),
    ):
        assert words in command(*arguments, "--ranks", ranks, code=2).stderr
