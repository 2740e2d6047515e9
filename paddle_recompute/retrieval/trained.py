"""A trained model, read back from the folder that `Trainer` has written."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import paddle
from pydantic import ValidationError

from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.config import ModelConfig
from paddle_recompute.data import PairTokenizer, load_tokenizer
from paddle_recompute.errors import CheckpointError
from paddle_recompute.models import build_model, load_weights


@dataclass(frozen=True)
class TrainedEncoder:
    """A model and what belongs to it, from a folder that `Trainer` has written.

    Attributes:
        model: In evaluation mode.
        tokenizer: Its vocabulary.
        folder: Of the checkpoint.
        fingerprint: 8 hexadecimal digits of weights and vocabulary: equal ones make equal vectors.
        max_query_tokens: What queries were cut at in training.
        max_positive_tokens: What positives were cut at in training.
    """

    model: paddle.nn.Layer
    tokenizer: PairTokenizer
    folder: Path
    fingerprint: str
    max_query_tokens: int
    max_positive_tokens: int

    @property
    def reads_at_most(self) -> int:
        """The longest text that the model can read, in tokens."""
        return int(getattr(self.model, "max_tokens", self.max_positive_tokens))


def load_encoder(folder: str | Path) -> TrainedEncoder:
    """Read the newest checkpoint of a run.

    Danger: its weights are a pickle; read folders that you trust.

    Args:
        folder: ``train.output_dir`` of the run, or the folder ``checkpoint`` in it.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged or of another version.
        DataError: Its tokenizer cannot be read.
    """
    folder = Path(folder)
    inner = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    if not any(inner.glob("step-*")):
        raise CheckpointError(
            f"{folder}: holds no trained model; name the folder that `paddle-recompute train` has "
            "written (its train.output_dir)"
        )
    checkpoint = find_checkpoint(inner)
    try:
        config = checkpoint.state["config"]
        # Where the weights started from is of no interest, and may be gone.
        dimensions = ModelConfig.model_validate({**config["model"], "init_from": None})
        limits = [int(config["data"][f"max_{side}_tokens"]) for side in ("query", "positive")]
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint.folder / 'state.json'}: its configuration cannot be read; was it written "
            f"by another version? ({str(error).splitlines()[0]})"
        ) from error
    tokenizer = load_tokenizer(checkpoint.tokenizer_file)
    model = build_model(dimensions, tokenizer.vocab_size)
    weights = checkpoint.folder / "model.pdparams"
    load_weights(model, weights)
    model.eval()
    fingerprint = _checksum(weights, checkpoint.tokenizer_file)
    return TrainedEncoder(model, tokenizer, checkpoint.folder, fingerprint, *limits)


def _checksum(*paths: Path) -> str:
    checksum = 0
    for path in paths:
        with path.open("rb") as file:
            while some := file.read(1 << 20):
                checksum = zlib.crc32(some, checksum)
    return f"{checksum:08x}"
