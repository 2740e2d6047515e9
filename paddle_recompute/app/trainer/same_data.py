"""Whether a run has the same pairs, split and tokenizer on all ranks, and after it was resumed.

The digests are those of whole contents (SHA-256). Each rank reads all pairs anyway and takes their
digest meanwhile, so a start reads nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from paddle_recompute.app.data import Source
from paddle_recompute.checkpoint import Checkpoint
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


def check_same_data(sources: Mapping[str, Source], checkpoint: Checkpoint | None) -> None:
    """Compare what this rank has with rank 0, and with the run of `checkpoint`. All ranks call it.

    Args:
        sources: As `prepare_data` gives them, by name.
        checkpoint: That the run goes on from; None in a new run. One of an earlier version has no
            digests to compare with.

    Raises:
        DataError: The ranks have different data.
        CheckpointError: The run began with other data.
    """
    for rank, theirs in enumerate(values_of_ranks(dict(sources), "the digests of the data")):
        if rank == 0:
            first = theirs
        for name, (file, digest) in theirs.items():
            if name not in first or digest != first[name][1]:
                told = _ON_RANKS.get(name, _A_FILE_ON_RANKS)
                other = first.get(name, ["nothing"])[0]
                raise DataError(told.format(name=name, rank=rank, file=file, first=other))
    before = checkpoint.state.get("data", {}) if checkpoint is not None else {}
    for name, (file, digest) in sources.items():
        if name in before and before[name] != digest:
            told = _SINCE.get(name, _A_FILE_SINCE)
            assert checkpoint is not None
            raise CheckpointError(
                told.format(name=name, file=file, checkpoint=checkpoint.folder)
                + ". Put back what was changed, or start a new run: name another folder in "
                "train.output_dir, or set train.overwrite=true; model.init_from: "
                f"{checkpoint.weights_file} starts it from these weights"
            )
