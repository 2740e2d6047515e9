"""``data``: the text pairs, their limits and their split."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Broken, Section, Values
from paddle_recompute.app.config._types import ByteCount, Count, UserPath
from paddle_recompute.options import apart


def default_cache_dir() -> Path:
    """``$PADDLE_RECOMPUTE_CACHE``, or ``~/.cache/paddle_recompute`` where that is not set."""
    return Path(os.environ.get("PADDLE_RECOMPUTE_CACHE") or "~/.cache/paddle_recompute")


def _source_names_its_file(v: Values) -> Broken:
    if v["source"] == "files" and v["train_file"] is None:
        yield "train_file", "required with source: files; a file of pairs"


class DataConfig(Section):
    """The text pairs: files, split, tokenizer, evaluation pool.

    Attributes:
        source: Cedict: CC-CEDICT, written into `cache_dir`; files: the file `train_file`.
        train_file: Training pairs, .tsv, .jsonl, .json or .txt (one text per line, its own
            positive), also .gz.
        valid_file: Evaluation pairs; None: `valid_pairs` of the other pairs are held out.
        cache_dir: Folder for mined pairs and tokenizers.
        no_duplicates: True: no two pairs of a global batch have an equal query or an equal
            positive; pairs that find no place in an epoch are counted.
        on_bad_line: Raise: stop at a line that is not a pair; skip: count it and continue.
        max_line: Longest line of a file, in bytes.
        max_file: Largest file, in bytes, unpacked.
        max_query_tokens: Longest query in tokens, special tokens included; longer ones are cut.
        max_positive_tokens: Longest positive in tokens, special tokens included; longer ones are
            cut.
        valid_pairs: Pairs held out for evaluation; pairs that share a text are held out together.
        pool_size: Candidates among which a query is searched: the held-out positives first, then
            training positives.
        tokenizer: A tokenizer.json of Hugging Face, vocab.txt of BERT or ERNIE, or a folder with
            one of them; required with weights of other libraries; None: that in the folder
            model.init_from, or it is trained on the pairs.
        vocab_size: Largest vocabulary of the tokenizer that is trained on the pairs; the bytes and
            the special tokens are 453 entries of it.
    """

    rules = (
        _source_names_its_file,
        *apart("source=cedict", "train_file", "valid_file"),
        *apart("valid_file", "valid_pairs", because="all its pairs are evaluated"),
    )
    refused_keys: ClassVar[Mapping[str, str]] = {
        "num_workers": "was removed: batches are made from tokens that are in "
        "memory; delete the line"
    }

    source: Literal["cedict", "files"] = "cedict"
    train_file: UserPath | None = None
    valid_file: UserPath | None = None
    cache_dir: UserPath = Field(default_factory=default_cache_dir)
    no_duplicates: bool = False
    on_bad_line: Literal["raise", "skip"] = "raise"
    max_line: ByteCount = 1 << 20
    max_file: ByteCount = 8 << 30
    max_query_tokens: int = Field(32, ge=2, le=2**20)
    max_positive_tokens: int = Field(64, ge=2, le=2**20)
    valid_pairs: Count = 2000
    pool_size: Count = 10_000
    tokenizer: UserPath | None = None
    vocab_size: int = Field(20_000, ge=500, le=2**31 - 1)
