"""Which hard negatives a pair gets: the same on any number of ranks, others in each epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.app.data import (
    Pair,
    PairLoader,
    PairTokenizer,
    check_files,
    load_tokenizer,
    train_tokenizer,
)
from paddle_recompute.app.data.negatives import HardNegatives
from paddle_recompute.errors import DataError
from tests.app.data import loaders
from tests.app.trainer.test_trainer import tiny

WORDS = [f"{first}{second}" for first in "abcdefgh" for second in "klmnopqr"]
# Of the pair i, i % 5 negatives; two queries have two positives each.
PAIRS = [
    Pair(f"q{max(2, i)}", f"pos {i}", tuple(f"neg {word}" for word in WORDS[i : i + i % 5]))
    for i in range(40)
]
FULL = [Pair(p.query, p.positive, tuple(f"n {w}" for w in WORDS[i : i + 6])) for i, p in
        enumerate(PAIRS)]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PairTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([*WORDS, *"0123456789", "pos", "neg", "n", "q"], path, 900)
    return load_tokenizer(path)


def loader_of(
    tokenizer: PairTokenizer,
    pairs: list[Pair],
    *,
    seed: int = 0,
    fill: bool = False,
    with_ids: bool = True,
    **how: Any,
) -> PairLoader:
    settings: dict[str, Any] = {
        "data__max_query_tokens": 12,
        "contrastive__hard_negatives": 3,
        "contrastive__fill": "random" if fill else "none",
        "contrastive__mask_false_negatives": with_ids,
        "train__seed": seed,
    }
    return loaders.loader_of(tokenizer, pairs, **{"local_batch": 8, **settings, **how})


def drawn(loader: PairLoader, epoch: int) -> list[tuple[int, list[int]]]:
    """(pair, ids of its negatives) in the order of the batches."""
    loader.set_epoch(epoch)
    return [
        pair
        for batch in loader
        for pair in zip(batch["index"].tolist(), batch["negative_ids"].tolist(), strict=True)
    ]


def ids_of(texts: list[str]) -> set[int]:
    from paddle_recompute.contrastive import text_ids

    return set(text_ids(texts).tolist())


def test_each_pair_gets_some_of_its_own(tokenizer: PairTokenizer) -> None:
    loader = loader_of(tokenizer, FULL)
    epochs = [drawn(loader, epoch) for epoch in range(12)]
    seen: dict[int, set[int]] = {}
    for pair, ids in [one for epoch in epochs for one in epoch]:
        assert len(set(ids)) == 3
        assert set(ids) <= ids_of(list(FULL[pair].negatives))
        seen.setdefault(pair, set()).update(ids)
    # 3 of 6, 12 times: each has its turn but for 1 in 4,096.
    assert sum(map(len, seen.values())) >= 0.99 * 6 * 40
    assert drawn(loader, 3) == epochs[3]
    first, second = (dict(epoch) for epoch in epochs[:2])
    assert sum(first[pair] != second[pair] for pair in first) > 30
    assert dict(drawn(loader_of(tokenizer, FULL, seed=1), 0)) != first


@pytest.mark.parametrize("fill", [False, True])
def test_ranks_share_what_one_process_draws(tokenizer: PairTokenizer, fill: bool) -> None:
    pairs = PAIRS if fill else FULL
    alone = drawn(loader_of(tokenizer, pairs, fill=fill), 2)
    loaders = [
        loader_of(tokenizer, pairs, fill=fill, local_batch=2, rank=rank, num_ranks=4)
        for rank in range(4)
    ]
    ranks = [drawn(loader, 2) for loader in loaders]
    first_rows = range(0, len(ranks[0]), 2)
    joined = [one for row in first_rows for rank in ranks for one in rank[row : row + 2]]
    assert joined == alone


def test_batches_hold_the_tokens_of_the_negatives(tokenizer: PairTokenizer) -> None:
    (batch, *_) = loader_of(tokenizer, FULL)
    texts = {next(iter(ids_of([text]))): text for pair in FULL for text in pair.negatives}
    drawn = [texts[one] for row in batch["negative_ids"].tolist() for one in row]
    expected = tokenizer.encode(drawn, 12)
    assert batch["negatives"].shape == [8, 3, expected.shape[1]]
    np.testing.assert_array_equal(batch["negatives"].numpy().reshape(24, -1), expected)
    assert set(loader_of(tokenizer, FULL, with_ids=False)._collate([*range(8)], 0, 0)) == {
        "query",
        "positive",
        "negatives",
        "index",
    }


def test_positives_of_other_queries_fill_in(tokenizer: PairTokenizer) -> None:
    loader = loader_of(tokenizer, PAIRS, fill=True)
    positives = {pair.query: set[str]() for pair in PAIRS}
    for pair in PAIRS:
        positives[pair.query].add(pair.positive)
    every = ids_of([pair.positive for pair in PAIRS])
    for place, found in [one for epoch in range(5) for one in drawn(loader, epoch)]:
        own = ids_of(list(PAIRS[place].negatives))
        assert len(set(found)) == 3
        assert len(own.intersection(found)) == min(3, len(own))
        filled = set(found) - own
        assert filled <= every
        assert not filled.intersection(ids_of(list(positives[PAIRS[place].query])))


def test_too_few_are_refused() -> None:
    with pytest.raises(DataError, match=r"24 pairs have fewer than .* = 3 .* query 'q2' with 0; "):
        HardNegatives(PAIRS, 3, fill=False)
    few = [Pair("a", "b"), Pair("a", "c"), Pair("d", "e")]
    with pytest.raises(DataError, match=r"3 different positives are too few .* query 'a' .* = 2"):
        HardNegatives(few, 2, fill=True)


# ------------------------------------------------------------------------------------ the files


def config_of(tmp_path: Path, text: str, **changes: Any) -> Config:
    (tmp_path / "pairs.tsv").write_text(text)
    return tiny(tmp_path, **changes)


def test_files_are_checked_as_training_reads_them(tmp_path: Path) -> None:
    text = "a\tb\tc\td\ne\tf\tg\n"
    with pytest.raises(DataError, match=r"pairs.tsv:1: 2 negatives, which training would ignore"):
        check_files(config_of(tmp_path, text))
    two = {"contrastive__hard_negatives": 2}
    with pytest.raises(DataError, match=r"pairs.tsv:2: 1 different negatives, fewer than"):
        check_files(config_of(tmp_path, text, **two))
    check_files(config_of(tmp_path, text, **two, contrastive__fill="random"))
    check_files(config_of(tmp_path, text, **two, data__on_bad_line="skip"))
    (tmp_path / "vocab.txt").write_text("cat\n")
    with pytest.raises(DataError, match=r"vocab.txt: not a vocab.txt"):
        check_files(config_of(tmp_path, "a\tb\n", data__tokenizer=str(tmp_path / "vocab.txt")))
