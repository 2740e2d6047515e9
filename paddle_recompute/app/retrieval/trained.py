"""Load a trained model from the folder that `Trainer` wrote, encode texts with it, and measure how
well it finds judged answers.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import paddle
from numpy.typing import NDArray
from pydantic import ValidationError

from paddle_recompute._paddle.cpu_settings import use_cpu_settings_and_say_so
from paddle_recompute._run_folder import CHECKPOINTS, MANIFEST, checkpoints_in
from paddle_recompute.app.config import (
    ModelConfig,
    model_folder,
    newest_checkpoint,
    tokenizer_beside,
)
from paddle_recompute.app.data import JudgedQueries, PairTokenizer, load_tokenizer
from paddle_recompute.app.encoder import build_model, encoder_of, encoders_of
from paddle_recompute.app.retrieval.evaluation import (
    Judgements,
    encode_batches,
    place_of,
    retrieval_metrics,
)
from paddle_recompute.checkpoint import find_checkpoint, open_checkpoint
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import CheckpointError, ConfigError, DataError
from paddle_recompute.weights import load_weights

Side = Literal["query", "document"]
_OF_A_MODEL = (".json", ".safetensors", ".pdparams", ".txt")


@dataclass(frozen=True)
class TrainedEncoder:
    """A model with its tokenizer and limits.

    Attributes:
        model: In evaluation mode.
        tokenizer: The tokenizer that it was trained with.
        folder: The folder of the checkpoint, or of the pretrained model.
        step: Number of optimizer steps that it was trained; 0: it is a pretrained model.
        fingerprint: 8 hexadecimal digits of weights, vocabulary and prompts: equal ones make
            equal vectors.
        max_query_tokens: The limit for queries in training, or that of the pretrained model.
        max_positive_tokens: The same for positives.
        config: The section ``model`` of the run, without ``init_from``.
        truncate_dim: Vectors are their first numbers, so many, scaled to length 1; None: whole.
    """

    model: paddle.nn.Layer
    tokenizer: PairTokenizer
    folder: Path
    step: int
    fingerprint: str
    max_query_tokens: int
    max_positive_tokens: int
    config: ModelConfig
    truncate_dim: int | None = None

    @property
    def reads_at_most(self) -> int:
        """The longest text that the model accepts, in tokens."""
        in_training = max(self.max_query_tokens, self.max_positive_tokens)
        return int(getattr(encoders_of(self.model)[0], "max_tokens", in_training))

    def parts(self) -> dict[str, TrainedEncoder]:
        """The encoder, or each of two separate towers, by the folder that it is exported to."""
        encoders, config = encoders_of(self.model), self.config
        if len(encoders) == 1:
            return {"": self}
        alone = replace(self, config=config.model_copy(update={"towers": "shared", "frozen": None}))
        of_query = replace(alone, max_positive_tokens=self.max_query_tokens)
        made = zip(("query", "document"), (of_query, alone), encoders, strict=True)
        return {name: replace(encoder, model=model) for name, encoder, model in made}

    def longest(self, side: Side, max_tokens: int | None = None) -> int:
        """Where texts of a side are cut, in tokens; `max_tokens` replaces the limit of training.

        Raises:
            DataError: `side` is another word, or `max_tokens` no number from 2 to `reads_at_most`.
        """
        if side not in get_args(Side):
            raise DataError(f"received side={side!r}; allowed are {' and '.join(get_args(Side))}")
        limit = self.max_query_tokens if side == "query" else self.max_positive_tokens
        if max_tokens is None:
            return min(limit, self.reads_at_most)
        check_count("max_tokens", max_tokens, least=2)  # [CLS] and [SEP]
        if max_tokens > self.reads_at_most:
            raise DataError(
                f"received max_tokens={max_tokens}; the model reads at most {self.reads_at_most} "
                "tokens"
            )
        return max_tokens

    @property
    def prompts(self) -> dict[Side, str]:
        """What is put before the texts of each side."""
        query, document = self.config.prompts
        return {"query": query, "document": document}


def load_encoder(folder: str | Path, *, truncate_dim: int | None = None) -> TrainedEncoder:
    """Read an encoder: the newest checkpoint of a run that is whole, or a pretrained model.

    A warning names checkpoints that are damaged. The folder may come from anyone: nothing in it is
    run. On a CPU it calls `use_cpu_settings`, and logs once what that has set;
    ``PADDLE_RECOMPUTE_CPU_SETTINGS=0`` switches it off.

    Args:
        folder: ``train.output_dir`` of a run, the folder ``checkpoint`` or ``best`` in it, or one
            checkpoint; or a folder of Hugging Face, sentence-transformers or PaddleNLP, or what
            ``export`` has written.
        truncate_dim: Length of the vectors: their first numbers, scaled to length 1, as
            ``contrastive.matryoshka_dims`` trains them. None: whole vectors.

    Raises:
        CheckpointError: There is no model, or all checkpoints are damaged, or it is of another
            version.
        ConfigError: The model needs something that is not supported.
        DataError: Its tokenizer cannot be read, or its vectors are shorter than `truncate_dim`.

    Examples:
        >>> from paddle_recompute import load_encoder
        >>> encoder = load_encoder("outputs/run")
        >>> encoder.step
        3
    """
    encoder = _loaded(Path(folder))
    if truncate_dim is None:
        return encoder
    check_count("truncate_dim", truncate_dim)
    width = encode_texts(encoder, [""]).shape[1]
    if truncate_dim > width:
        raise DataError(f"received truncate_dim={truncate_dim}; the vectors have {width} numbers")
    if truncate_dim == width:
        return encoder
    fingerprint = f"{encoder.fingerprint}-{truncate_dim}"
    return replace(encoder, truncate_dim=truncate_dim, fingerprint=fingerprint)


def _loaded(folder: Path) -> TrainedEncoder:
    use_cpu_settings_and_say_so()
    if newest_checkpoint(folder) is None:
        return _pretrained(folder)
    if (folder / MANIFEST).is_file():
        checkpoint = open_checkpoint(folder)
    else:
        inner = folder / CHECKPOINTS if checkpoints_in(folder / CHECKPOINTS) else folder
        checkpoint = find_checkpoint(inner, tell=partial(warnings.warn, stacklevel=4))
    try:
        config = checkpoint.state["config"]
        # The file of the initial weights is not needed, and may not exist any more.
        of_weights = {"init_from": None, "positive_from": None}
        dimensions = ModelConfig.model_validate({**config["model"], **of_weights})
        dimensions = dimensions.without_weights()
        query, positive = (
            int(config["data"][f"max_{side}_tokens"]) for side in ("query", "positive")
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint.folder / 'state.json'}: its configuration cannot be read; was it written "
            f"by another version? ({str(error).splitlines()[0]})"
        ) from error
    tokenizer = load_tokenizer(checkpoint.tokenizer_file, pad_id=dimensions.pad_token_id)
    model = build_model(dimensions, tokenizer.vocab_size)
    weights = checkpoint.weights_file
    load_weights(model, weights)
    model.eval()
    fingerprint = _checksum(dimensions.prompts, weights, checkpoint.tokenizer_file)
    return TrainedEncoder(
        model=model,
        tokenizer=tokenizer,
        folder=checkpoint.folder,
        step=checkpoint.step,
        fingerprint=fingerprint,
        max_query_tokens=query,
        max_positive_tokens=positive,
        config=dimensions,
    )


def _pretrained(folder: Path) -> TrainedEncoder:
    found = model_folder(folder)
    file = tokenizer_beside(folder)
    if found is None or file is None:
        lacks = "config.json" if found is None else "tokenizer.json or vocab.txt"
        raise CheckpointError(
            f"{folder}: contains no trained model; it has no checkpoint and no {lacks}. "
            "Name the train.output_dir of a run of `paddle-recompute train`, or a folder of "
            "Hugging Face, sentence-transformers or PaddleNLP"
        )
    try:
        config = ModelConfig.model_validate({"init_from": folder})
    except ValidationError as error:
        raise ConfigError(f"{found.said_in}: {str(error)[:500]}") from error
    tokenizer = load_tokenizer(file, pad_id=config.pad_token_id)
    if found.vocabulary and found.vocabulary != tokenizer.vocabulary():
        raise DataError(
            f"{file}: has other entries than the vocabulary that the weights in {folder} were "
            "trained with; put back their tokenizer"
        )
    model = build_model(config, tokenizer.vocab_size)
    model.eval()
    query, document = found.limits or (config.max_tokens, config.max_tokens)
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in _OF_A_MODEL]
    return TrainedEncoder(
        model=model,
        tokenizer=tokenizer,
        folder=folder,
        step=0,
        fingerprint=_checksum(config.prompts, *files),
        max_query_tokens=query,
        max_positive_tokens=document,
        config=config.without_weights(),
    )


def encode_texts(
    encoder: TrainedEncoder,
    texts: Sequence[str],
    *,
    side: Side = "document",
    batch_size: int = 256,
    max_tokens: int | None = None,
    counts: dict[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
    over_ranks: bool = False,
) -> NDArray[np.float32]:
    """The vectors of `texts`; the inner product of two is their cosine.

    On a CPU it calls `use_cpu_settings`, as `load_encoder` does.

    Args:
        encoder: From `load_encoder`.
        texts: At least one.
        side: Which prompt and which limit the texts have: those of a ``query`` or a ``document``.
        batch_size: Texts per batch.
        max_tokens: Longer texts are cut; None: the limit that training had for this side.
        counts: The number of texts that are cut is added to ``cut``, that of texts with ``[UNK]``
            tokens to ``unknown``; on several ranks that of all ranks.
        progress: Called after every batch with its number of texts.
        over_ranks: Every rank calls this with the same texts, encodes a share of the batches and
            gets all vectors.

    Returns:
        ``[len(texts), dim]``, float32, row i of text i, each of length 1.

    Raises:
        DataError: There are no texts, `side` is another word, `batch_size` or `max_tokens` is too
            small, the model does not read `max_tokens`, an argument has another type, or a vector
            is not finite.
        SyncError: The ranks' texts differ.

    Examples:
        >>> from paddle_recompute import encode_texts, load_encoder
        >>> encoder = load_encoder("outputs/run")
        >>> query = encode_texts(encoder, ["a big cat"], side="query")
        >>> pool = encode_texts(encoder, ["big cat", "small dog"])
        >>> (query @ pool.T).shape
        (1, 2)
    """
    check_texts(texts)
    check_encoder(encoder)
    check_count("batch_size", batch_size)
    use_cpu_settings_and_say_so()
    longest = encoder.longest(side, max_tokens)
    tokenizer = _Counting(encoder.tokenizer)
    vectors = encode_batches(
        encoder_of(encoder.model, side),
        tokenizer,
        texts,
        max_tokens=longest,
        batch_size=batch_size,
        prompt=encoder.prompts[side],
        truncate_dim=encoder.truncate_dim,
        progress=progress,
        over_ranks=over_ranks,
    )
    if counts is not None:
        rank, num_ranks = place_of(over_ranks)
        # Ranks with a batch less than others have encoded the first one again.
        own = len(range(rank, -(-len(texts) // batch_size), num_ranks))
        sums = [sum(numbers[:own]) for numbers in (tokenizer.cut, tokenizer.unknown)]
        every = values_of_ranks(sums, "counts of texts") if num_ranks > 1 else [sums]
        for name, found in zip(("cut", "unknown"), zip(*every, strict=True), strict=True):
            counts[name] = counts.get(name, 0) + sum(found)
    if not np.isfinite(vectors).all():
        raise DataError(f"{encoder.folder}: its vectors are not finite; the training has diverged")
    return vectors


def check_texts(texts: Sequence[str]) -> None:
    """Check that `texts` are texts, and not one string, whose letters would be the texts.

    Raises:
        DataError: They are not.
    """
    if isinstance(texts, str):
        raise DataError(f"received the text {texts[:40]!r} in place of a list of texts")
    if not isinstance(texts, Sequence):
        raise DataError(f"received texts of {type(texts).__name__}; allowed is a list of str")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {number} is {text!r}, of {type(text).__name__}; expected str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"text {number} cannot be written as UTF-8 ({error.reason}): {text[:40]!r}"
            ) from None


def check_count(name: str, value: int, *, least: int = 1) -> None:
    """Check that an argument is a whole number of at least `least`.

    Raises:
        DataError: It is not.
    """
    is_number = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not is_number or value < least:
        raise DataError(f"received {name}={value!r}; allowed are whole numbers from {least} on")


def check_encoder(encoder: TrainedEncoder) -> None:
    """Check that an argument is an encoder.

    Raises:
        DataError: It is not, for example because it is the folder of a run.
    """
    if not isinstance(encoder, TrainedEncoder):
        raise DataError(f"received the encoder {encoder!r}; load_encoder(folder) makes one")


class _Counting:
    """A tokenizer that counts the texts with lost or unknown tokens."""

    def __init__(self, tokenizer: PairTokenizer) -> None:
        self._tokenizer = tokenizer
        self.cut: list[int] = []
        self.unknown: list[int] = []

    def encode(self, texts: list[str], max_tokens: int, /) -> NDArray[np.int64]:
        rows = self._tokenizer.tokenize(texts, max_tokens)
        self.cut.append(rows.num_cut)
        self.unknown.append(rows.num_unknown)
        return rows.pad(np.arange(len(texts)))


def _checksum(prompts: tuple[str, str], *paths: Path) -> str:
    checksum = zlib.crc32(repr(prompts).encode()) if any(prompts) else 0
    for path in paths:
        with path.open("rb") as file:
            while some := file.read(1 << 20):
                checksum = zlib.crc32(some, checksum)
    return f"{checksum:08x}"


KS = (1, 10, 100)


def evaluate_encoder(
    encoder: TrainedEncoder,
    judged: JudgedQueries,
    *,
    exclude_same_id: bool = False,
    batch_size: int = 256,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Encode queries and pool, compare each query with every candidate, and measure the ranking.

    All vectors are in memory, 4 bytes for each number of them.

    Args:
        encoder: From `load_encoder`. Texts are cut where training cut queries and positives.
        judged: From `read_judged`.
        exclude_same_id: A document with the id of the query is no candidate for it.
        batch_size: Texts encoded at once.
        progress: Called after every batch with its number of texts.

    Returns:
        For JSON: ``metrics`` (see `retrieval_metrics`), ``queries``, ``pool_size``, ``tied``
        (queries with candidates that score as much as an answer), ``judgements`` (answers of all
        queries), ``model``, ``step`` and ``notes``.

    Raises:
        DataError: A vector is not finite; or an answer has the id of its query and is excluded.
    """
    vectors, notes = {}, [*judged.notes]
    sides: tuple[tuple[Side, str, list[str]], ...] = (
        ("query", "queries", judged.queries),
        ("document", "documents", judged.pool),
    )
    for side, name, texts in sides:
        counts = {"cut": 0, "unknown": 0}
        vectors[side] = encode_texts(
            encoder, texts, side=side, batch_size=batch_size, counts=counts, progress=progress
        )
        told = {
            f"{name} are cut after {encoder.longest(side)} tokens": counts["cut"],
            f"{name} hold words outside the vocabulary": counts["unknown"],
        }
        notes += [f"{count} {what}" for what, count in told.items() if count]
    answers = Judgements.of(judged.answers)
    found = retrieval_metrics(
        vectors["query"],
        vectors["document"],
        answers,
        ks=KS,
        excluded=np.array(judged.same_id) if exclude_same_id else None,
    )
    sizes = {name: int(found.pop(name)) for name in ("queries", "pool_size", "tied")}
    if tied := sizes["tied"]:
        notes.append(
            f"{tied} queries have candidates with the score of an answer; ties count against the "
            "model"
        )
    return {
        "metrics": found,
        **sizes,
        "judgements": len(answers.query),
        "model": str(encoder.folder.resolve()),
        "step": encoder.step,
        "notes": notes,
    }
