"""``data``: the text pairs, their limits and their split."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Section, Values
from paddle_recompute.app.config._types import ByteCount, Count, UserPath
from paddle_recompute.options import Fault


def default_cache_dir() -> Path:
    """``$PADDLE_RECOMPUTE_CACHE``, or ``~/.cache/paddle_recompute`` where that is not set."""
    return Path(os.environ.get("PADDLE_RECOMPUTE_CACHE") or "~/.cache/paddle_recompute")


class DataConfig(Section):
    """The text pairs: files, split, tokenizer, evaluation pool."""

    @staticmethod
    def _source_names_its_files(v: Values) -> Iterator[Fault]:
        source, train, valid = v["source"], v["train_file"], v["valid_file"]
        if source == "files" and train is None:
            yield Fault("train_file", None, "required with source: files; a .tsv or .jsonl file")
        if source == "cedict":
            for name, value in (("train_file", train), ("valid_file", valid)):
                if value is not None:
                    yield Fault(name, str(value), "is not used with source: cedict; remove it")

    @staticmethod
    def _valid_file_or_held_out(v: Values) -> Iterator[Fault]:
        default = DataConfig.model_fields["valid_pairs"].default
        if v["valid_file"] is not None and v["valid_pairs"] != default:
            yield Fault(
                "valid_pairs",
                v["valid_pairs"],
                "has no effect with valid_file, whose pairs are all evaluated; remove it",
            )

    rules = (_source_names_its_files, _valid_file_or_held_out)
    refused_keys: ClassVar[Mapping[str, str]] = {
        "num_workers": "was removed: batches are made from tokens that are in "
        "memory; delete the line"
    }

    source: Literal["cedict", "files"] = Field(
        "cedict",
        description="cedict: CC-CEDICT, written into cache_dir; files: the file train_file",
    )
    train_file: UserPath | None = Field(
        None, description="training pairs, .tsv or .jsonl, also .gz; none with source: cedict"
    )
    valid_file: UserPath | None = Field(
        None, description="evaluation pairs; none: valid_pairs of the other pairs are held out"
    )
    cache_dir: UserPath = Field(
        default_factory=default_cache_dir,
        description="folder for mined pairs and tokenizers; default $PADDLE_RECOMPUTE_CACHE or "
        "~/.cache/paddle_recompute",
    )
    no_duplicates: bool = Field(
        False,
        description="true: no two pairs of a global batch have an equal query or an equal "
        "positive; pairs that find no place in an epoch are counted; false: they may",
    )
    on_bad_line: Literal["raise", "skip"] = Field(
        "raise", description="raise: stop at a line that is not a pair; skip: count it and continue"
    )
    max_line: ByteCount = Field(1 << 20, description="longest line of a file, in bytes")
    max_file: ByteCount = Field(8 << 30, description="largest file, in bytes, unpacked")
    max_query_tokens: Annotated[int, Field(ge=2, le=2**20)] = Field(
        32, description="longest query in tokens, special tokens included; longer ones are cut"
    )
    max_positive_tokens: Annotated[int, Field(ge=2, le=2**20)] = Field(
        64, description="longest positive in tokens, special tokens included; longer ones are cut"
    )
    valid_pairs: Count = Field(
        2000,
        description="pairs held out for evaluation; pairs that share a text are held out together",
    )
    pool_size: Count = Field(
        10_000,
        description="candidates among which a query is searched: the held-out positives first, "
        "then training positives",
    )
    tokenizer: UserPath | None = Field(
        None,
        description="tokenizer.json of Hugging Face, vocab.txt of BERT or ERNIE, or a folder with "
        "one of them; required with weights of other libraries; none: that in the folder "
        "model.init_from, or it is trained on the pairs",
    )
    vocab_size: Annotated[int, Field(ge=300, le=2**31 - 1)] = Field(
        20_000,
        description="largest vocabulary of the tokenizer, which is trained on the pairs; the bytes "
        "and the special tokens are 261 entries of it",
    )
