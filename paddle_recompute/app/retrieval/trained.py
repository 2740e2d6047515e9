"""Load a trained model from the folder that `Trainer` wrote."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path

import paddle
from pydantic import ValidationError

from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.data import PairTokenizer, load_tokenizer
from paddle_recompute.app.encoder import build_model
from paddle_recompute.checkpoint import find_checkpoint, has_checkpoint
from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights


@dataclass(frozen=True)
class TrainedEncoder:
    """A model with its tokenizer and limits, from a folder that `Trainer` wrote.

    Attributes:
        model: In evaluation mode.
        tokenizer: The tokenizer that it was trained with.
        folder: The folder of the checkpoint.
        step: Number of optimizer steps that it was trained.
        fingerprint: 8 hexadecimal digits of weights and vocabulary: equal ones make equal vectors.
        max_query_tokens: The limit for queries in training.
        max_positive_tokens: The limit for positives in training.
    """

    model: paddle.nn.Layer
    tokenizer: PairTokenizer
    folder: Path
    step: int
    fingerprint: str
    max_query_tokens: int
    max_positive_tokens: int

    @property
    def reads_at_most(self) -> int:
        """The longest text that the model accepts, in tokens."""
        return int(getattr(self.model, "max_tokens", self.max_positive_tokens))


def load_encoder(folder: str | Path) -> TrainedEncoder:
    """Read the newest checkpoint of a run.

    The folder may come from a stranger: nothing in it is run.

    Args:
        folder: ``train.output_dir`` of the run, or the folder ``checkpoint`` in it.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged or of another version.
        DataError: Its tokenizer cannot be read.
    """
    folder = Path(folder)
    inner = folder / "checkpoint" if (folder / "checkpoint").is_dir() else folder
    if not has_checkpoint(inner):
        raise CheckpointError(
            f"{folder}: contains no trained model; name the train.output_dir of a run of "
            "`paddle-recompute train`"
        )
    checkpoint = find_checkpoint(inner)
    try:
        config = checkpoint.state["config"]
        # The file of the initial weights is not needed, and may not exist any more.
        dimensions = ModelConfig.model_validate({**config["model"], "init_from": None})
        limits = [int(config["data"][f"max_{side}_tokens"]) for side in ("query", "positive")]
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{checkpoint.folder / 'state.json'}: its configuration cannot be read; was it written "
            f"by another version? ({str(error).splitlines()[0]})"
        ) from error
    tokenizer = load_tokenizer(checkpoint.tokenizer_file)
    model = build_model(dimensions, tokenizer.vocab_size)
    weights = checkpoint.weights_file
    load_weights(model, weights)
    model.eval()
    fingerprint = _checksum(weights, checkpoint.tokenizer_file)
    return TrainedEncoder(
        model, tokenizer, checkpoint.folder, checkpoint.step, fingerprint, *limits
    )


def _checksum(*paths: Path) -> str:
    checksum = 0
    for path in paths:
        with path.open("rb") as file:
            while some := file.read(1 << 20):
                checksum = zlib.crc32(some, checksum)
    return f"{checksum:08x}"
