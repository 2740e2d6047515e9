"""All ranks have the same pairs, split and tokenizer, and a resumed run has those it began with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paddle_recompute.app.data import Source
from paddle_recompute.distributed import values_of_ranks
from paddle_recompute.errors import CheckpointError, DataError

_ON_RANKS = {
    "split": "{name}: rank {rank} holds out other pairs than rank 0; all machines need the same "
    "version of this library",
    "tokenizer": "{name}: rank {rank} has another one than rank 0, in {file}; remove that file",
}
_A_FILE_ON_RANKS = (
    "{name}: rank {rank} reads other pairs in {file} than rank 0 in {first}; all machines need the "
    "same file"
)
_SINCE = {
    "split": "train.seed, data.valid_pairs: other pairs are held out than in {checkpoint}, so the "
    "run would be evaluated on pairs that it was trained on",
    "tokenizer": "{file} is not the tokenizer that the run began with",
}
_A_FILE_SINCE = "{name}: {file} is not the file that {checkpoint} was trained on"


def check_same_on_ranks(sources: Mapping[str, Source]) -> None:
    """Check that all ranks have the same pairs, split and tokenizer. All ranks call it.

    The digests are those of whole contents (SHA-256). Each rank reads all pairs anyway and takes
    their digest meanwhile, so a start reads nothing twice.

    Raises:
        DataError: They have not.
    """
    first, *others = values_of_ranks(dict(sources), "the digests of the data")
    for rank, theirs in enumerate(others, 1):
        for name, (file, digest) in theirs.items():
            if name not in first or digest != first[name][1]:
                message = _ON_RANKS.get(name, _A_FILE_ON_RANKS)
                other = first.get(name, ["nothing"])[0]
                raise DataError(message.format(name=name, rank=rank, file=file, first=other))


def check_same_as_before(
    sources: Mapping[str, Source], saved: Mapping[str, str], checkpoint: Path, weights: Path
) -> None:
    """Compare the data of a run with those that it began with.

    Args:
        sources: Now.
        saved: The digests in the checkpoint that the run goes on from.
        checkpoint: Its folder.
        weights: Its file of weights.

    Raises:
        CheckpointError: The run began with other data.
    """
    for name, (file, digest) in sources.items():
        if saved.get(name, digest) != digest:
            message = _SINCE.get(name, _A_FILE_SINCE)
            raise CheckpointError(
                message.format(name=name, file=file, checkpoint=checkpoint)
                + ". Put back what was changed, or start a new run: name another folder in "
                "train.output_dir, or set train.overwrite=true; model.init_from: "
                f"{weights} starts it from these weights"
            )
