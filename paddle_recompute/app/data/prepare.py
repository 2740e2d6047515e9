"""From the ``data`` section of a configuration to pairs, candidates and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from paddle_recompute._files import weights_file
from paddle_recompute.app.config import Config, DataConfig, model_folder, tokenizer_beside
from paddle_recompute.app.data._cache_folder import require_file
from paddle_recompute.app.data.cedict import LICENSE, mine_cedict, mined_cedict
from paddle_recompute.app.data.pairs import Pair, read_pairs
from paddle_recompute.app.data.split import (
    Split,
    digest_of,
    num_pairs_sharing_a_text,
    shuffling_key,
    split_pairs,
    without_duplicates,
)
from paddle_recompute.app.data.tokenizer import (
    PairTokenizer,
    load_tokenizer,
)
from paddle_recompute.app.data.tokenizer_cache import cached_tokenizer
from paddle_recompute.errors import CheckpointError, ConfigError, DataError

_SHOWN_REASONS = 5


class DataDigest(NamedTuple):
    """An input that must be the same on all ranks, and when the run is resumed."""

    file: str
    """Where it is from."""
    sha256: str
    """Of its whole content."""


@dataclass(frozen=True)
class PreparedData:
    """The data of a run; equal on all ranks.

    Attributes:
        train: Pairs to train on.
        valid: Pairs to evaluate on. They share no text with `train`, unless ``data.valid_file``
            contains such pairs; then `notes` says so.
        pool: Candidates, all different: the positives of `valid` first, then some of `train`.
        target: For each pair of `valid`, the row of its positive in `pool`.
        tokenizer: Trained on `train`, that of the file, or that of the resumed run.
        notes: Sentences for the user about what was left out, with numbers.
        sources: Of the files (``data.train_file``, ``data.valid_file``), ``split`` and
            ``tokenizer``.
    """

    train: list[Pair]
    valid: list[Pair]
    pool: list[str]
    target: list[int]
    tokenizer: PairTokenizer
    notes: list[str] = field(default_factory=list)
    sources: dict[str, DataDigest] = field(default_factory=dict)


def check_vocabulary(config: Config) -> None:
    """Check that the tokenizer has the vocabulary that ``model.init_from`` was trained with.

    Raises:
        DataError: The tokenizer cannot be read.
        ConfigError: There is none for the weights, or it is not the one that they belong to.
        CheckpointError: There are no weights.
    """
    source, file = config.model.init_from, config.tokenizer_file
    pad_id = config.model.pad_token_id
    for name, place in (("init_from", source), ("positive_from", config.model.positive_from)):
        if place is not None:
            told = model_folder(place)
            try:
                weights_file(place if told is None else told.weights)
            except CheckpointError as error:
                raise CheckpointError(f"model.{name}: {error}") from error
    if file is None and source is not None:
        raise ConfigError(
            f"model.init_from: {source} has no tokenizer.json or vocab.txt beside it, and each row "
            "of its word embedding is an entry of the vocabulary that the weights were trained "
            "with. A vocabulary that is trained on the pairs has other entries in these rows, so "
            "the weights would mean nothing. Set data.tokenizer to the tokenizer.json or vocab.txt "
            "that belongs to them"
        )
    if file is None or not file.exists():  # a resumed run needs none
        return
    tokenizer = load_tokenizer(file, pad_id=pad_id)
    if (other := config.model.positive_from) is not None:
        of_other = tokenizer_beside(other)
        theirs = load_tokenizer(of_other, pad_id=pad_id) if of_other is not None else tokenizer
        if theirs.vocabulary() != tokenizer.vocabulary():
            raise ConfigError(
                f"model.positive_from: {of_other} has other entries than {file}; both encoders "
                "of a run read the same vocabulary"
            )
    beside = tokenizer_beside(source) if source is not None else None
    digest = found.vocabulary if source and (found := model_folder(source)) else ""
    if not digest and beside is not None and beside != file:
        digest = load_tokenizer(beside, pad_id=pad_id).vocabulary()
    if digest and tokenizer.vocabulary() != digest:
        raise ConfigError(
            f"data.tokenizer: {file} has other entries than the vocabulary that the weights of "
            f"model.init_from: {source} were trained with; remove data.tokenizer, or put back the "
            "tokenizer of the weights"
        )
    config.model.rows(tokenizer.vocab_size)


def prepare_data(
    run: Config,
    rank: int,
    barrier: Callable[[], None],
    *,
    tokenizer_file: Path | None = None,
    compare: Callable[[Mapping[str, DataDigest]], None] | None = None,
) -> PreparedData:
    """Read, split and tokenize; slow results are computed once and kept in ``data.cache_dir``.

    Rank 0 mines the pairs (``source: cedict``) and trains the tokenizer while the others
    wait at `barrier`; then all ranks read the same files. Errors in the user's own files are raised
    on every rank, before any rank waits.

    Args:
        run: The configuration. ``train.seed`` decides which groups are held out and which training
            positives fill the pool.
        rank: This rank.
        barrier: Returns when all ranks have called it.
        tokenizer_file: The vocabulary of a resumed run; None: that of `run`, or it is trained on
            the pairs.
        compare: Called on every rank with what `PreparedData.sources` will be, before a vocabulary
            is trained and again with the tokenizer; may raise.

    Raises:
        DataError: The pairs cannot be used or are too few, or the ranks have different cache
            folders.
        DependencyError: A package that the source needs is not installed.
    """
    account, config, seed, is_main_rank = Account(), run.data, run.train.seed, rank == 0
    if config.source == "cedict":
        train_file = _mine(config, is_main_rank, barrier, account)
    else:
        assert config.train_file is not None
        train_file = config.train_file
    split = read_split(run, train_file, account)
    account.sources["split"] = DataDigest(str(train_file), digest_of(split))
    if compare is not None:
        compare(account.sources)
    pool = build_pool(split, config.pool_size, seed)
    of_query, of_document = run.model.prompts
    tokenizer_file = tokenizer_file or run.tokenizer_file
    texts = [
        text
        for pair in split.train
        for text in (of_query + pair.query, of_document + pair.positive)
    ]
    if tokenizer_file is None:
        tokenizer_file = cached_tokenizer(
            texts, config.vocab_size, config.cache_dir, barrier, trains=is_main_rank
        )
    tokenizer = load_tokenizer(tokenizer_file, pad_id=run.model.pad_token_id)
    account.notes += tokenizer.notes
    account.sources["tokenizer"] = DataDigest(str(tokenizer_file), tokenizer.sha256)
    if compare is not None:
        compare(account.sources)
    asked = [of_query + pair.query for pair in split.valid]
    queries = tokenizer.tokenize(asked, config.max_query_tokens)
    candidates = tokenizer.tokenize(
        [of_document + text for text in pool], config.max_positive_tokens
    )
    account.note(queries.num_cut, "held-out queries are cut at data.max_query_tokens")
    account.note(candidates.num_cut, "candidates are cut at data.max_positive_tokens")
    account.note(queries.num_unknown, "held-out queries hold words outside the vocabulary")
    account.note(candidates.num_unknown, "candidates hold words outside the vocabulary")
    place = {text: index for index, text in enumerate(pool)}
    return PreparedData(
        split.train,
        split.valid,
        pool,
        [place[pair.positive] for pair in split.valid],
        tokenizer,
        account.notes,
        account.sources,
    )


def build_pool(split: Split, pool_size: int, seed: int) -> list[str]:
    """The candidates among which queries search, all different.

    Args:
        split: All positives of its held-out pairs are in the pool.
        pool_size: Number of candidates; the pool is larger if the held-out pairs have more
            positives.
        seed: Decides which positives of the training pairs fill the pool.

    Raises:
        DataError: The pairs have fewer different positives in total.
    """
    held_out = dict.fromkeys(pair.positive for pair in split.valid)
    others = {pair.positive for pair in split.train}.difference(held_out)
    missing = max(0, pool_size - len(held_out))
    if len(others) < missing:
        raise DataError(
            f"data.pool_size is {pool_size}, and the pairs have {len(held_out) + len(others)} "
            "different positives; lower it or give more pairs"
        )
    return [*held_out, *sorted(others, key=lambda text: shuffling_key(text, seed))[:missing]]


@dataclass
class Account:
    """What was read, and sentences about what is left out."""

    notes: list[str] = field(default_factory=list)
    sources: dict[str, DataDigest] = field(default_factory=dict)

    def note(self, count: int, what: str) -> None:
        if count:
            self.notes.append(f"{count} {what}")


def _mine(
    config: DataConfig, is_main_rank: bool, barrier: Callable[[], None], account: Account
) -> Path:
    path = mined_cedict(config.cache_dir)
    if is_main_rank:
        mine_cedict(config.cache_dir)
    barrier()
    account.notes.append(LICENSE)
    return require_file(path)


def read_split(run: Config, train_file: Path, account: Account) -> Split:
    """The pairs of a run to train on, and those that are held out.

    Raises:
        DataError: The pairs cannot be used, or are too few to hold some out.
    """
    config, negatives, seed = run.data, run.contrastive.negatives_of_a_line, run.train.seed
    pairs = read_file(config, "train_file", train_file, account, negatives)
    if config.valid_file is None:
        split = split_pairs(pairs, valid_pairs=config.valid_pairs, seed=seed)
        account.note(split.num_duplicates, "duplicates removed")
        account.note(
            config.valid_pairs - len(split.valid),
            "pairs fewer than data.valid_pairs are held out: pairs that share a text stay together",
        )
    else:
        train, num_duplicates = without_duplicates(pairs)
        account.note(num_duplicates, "duplicates removed from data.train_file")
        valid, num_valid_duplicates = without_duplicates(
            read_file(config, "valid_file", config.valid_file, account, negatives)
        )
        account.note(num_valid_duplicates, "duplicates removed from data.valid_file")
        account.note(
            num_pairs_sharing_a_text(valid, train),
            "pairs of data.valid_file share a text with data.train_file, which flatters recall",
        )
        split = Split(train, valid, num_duplicates=num_duplicates + num_valid_duplicates)
    unused = sum(len(pair.negatives) for pair in split.valid)
    account.note(unused, "negatives of held-out pairs are not used")
    held_out = {pair.positive for pair in split.valid}
    shared = sum(not held_out.isdisjoint(pair.negatives) for pair in split.train)
    account.note(shared, "training pairs have a held-out positive among their negatives")
    answers: dict[str, set[str]] = {}
    for pair in split.train:
        answers.setdefault(pair.query, set()).add(pair.positive)
    wrong = sum(not answers[pair.query].isdisjoint(pair.negatives) for pair in split.train)
    account.note(wrong, "training pairs have an answer to their own query among their negatives")
    return split


def read_file(
    config: DataConfig,
    name: str,
    path: Path,
    account: Account,
    negatives: tuple[float, float],
) -> list[Pair]:
    """The pairs of the file ``data.name``; `negatives`: the least and the most of a line."""
    least, most = negatives
    found = read_pairs(
        path,
        on_bad_line=config.on_bad_line,
        max_line=config.max_line,
        max_file=config.max_file,
        negatives=(least if name == "train_file" else 0, most),
    )
    account.notes += found.notes
    account.sources[f"data.{name}"] = DataDigest(str(path), found.sha256)
    shown = "; ".join(found.skipped[:_SHOWN_REASONS])
    more = len(found.skipped) - _SHOWN_REASONS
    account.note(
        len(found.skipped),
        f"bad lines skipped: {shown}" + (f"; and {more} more" if more > 0 else ""),
    )
    return found.pairs
