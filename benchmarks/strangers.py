"""Files of strangers: pickles that run code, bombs, and checkpoints with one changed bit.

    python -m benchmarks.strangers

Every way into the library that reads weights is tried: ``model.init_from``, ``encode --model`` and
``train.resume``. Takes about a minute.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import paddle

from benchmarks._record import table, write_record
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import CheckpointError
from paddle_recompute.models import load_weights
from paddle_recompute.retrieval import load_encoder
from tests.models.test_pdparams import files_that_run_code
from tests.trainer.test_trainer import write_pairs
from tests.trainer.trained_run import make_run

FLIPS = 30


def of_earlier_version(folder: Path) -> Path:
    """A run's folder whose checkpoint has a ``.pdparams`` file and no manifest."""
    write_pairs(folder / "pairs.tsv")
    config = make_run(folder)
    checkpoint = find_checkpoint(config.train.output_dir / "checkpoint").folder
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "model.safetensors").rename(checkpoint / "model.pdparams")
    return config.train.output_dir


def code_rows(base: Path) -> list[list[object]]:
    """Every pickle that would run code, through every way in."""
    run = of_earlier_version(base)
    checkpoint = run / "checkpoint" / "step-3"
    weights = checkpoint / "model.pdparams"
    encoder = paddle.nn.Linear(2, 2)
    rows: list[list[object]] = []
    for name, (content, _) in files_that_run_code(base).items():
        weights.write_bytes(content)
        ran, said = 0, ""
        refused = 0
        for read in (
            lambda: load_weights(encoder, weights),
            lambda: load_encoder(run),
            lambda: find_checkpoint(run / "checkpoint").load_into(encoder),
        ):
            try:
                read()
            except CheckpointError as error:
                refused += 1
                said = str(error).rpartition("pdparams: ")[2].partition(".")[0]
            ran += (base / "ran").exists()
            (base / "ran").unlink(missing_ok=True)
        rows.append([name, refused, ran, said[:90].replace("|", "\\|")])
    return rows


def flip_rows(base: Path) -> list[list[object]]:
    """One changed bit in each file of a checkpoint, many times."""
    write_pairs(base / "pairs.tsv")
    config = make_run(base)
    folder = config.train.output_dir / "checkpoint"
    checkpoint = find_checkpoint(folder).folder
    spare = base / "spare"
    shutil.copytree(checkpoint, spare)
    chance = random.Random(0)
    rows: list[list[object]] = []
    for file in sorted(checkpoint.iterdir()):
        whole = file.read_bytes()
        noticed = harmless = 0
        for _ in range(FLIPS):
            content = bytearray(whole)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
            try:
                find_checkpoint(folder)
                harmless += 1
            except CheckpointError:
                noticed += 1
        file.write_bytes(whole)
        rows.append([file.name, len(whole), FLIPS, noticed, harmless])
    return rows


def main() -> None:
    """Write both tables."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        code, flips = code_rows(Path(one)), flip_rows(Path(other))
    path = write_record(
        "strangers_files",
        "Files of strangers",
        "python -m benchmarks.strangers",
        [
            "Pickles that run code where `pickle.load` reads them, through three ways in:",
            "",
            *table(["file", "refused, of 3", "code ran, of 3", "it says"], code),
            "",
            "One bit changed in a file of a checkpoint, then read; what is not noticed is a space",
            "of the manifest itself, which means nothing:",
            "",
            *table(["file", "bytes", "changes", "noticed", "without meaning"], flips),
        ],
    )
    print(path)
    print(path.read_text())


if __name__ == "__main__":
    main()
