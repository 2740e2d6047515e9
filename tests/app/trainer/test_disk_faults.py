"""A full disk, a folder that is gone, weights with NaN: one sentence each, and no traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.report import append_record
from paddle_recompute.app.trainer import Trainer, chunk_search, recorder
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import CheckpointError, ConfigError, OutputError
from tests.app.trainer.test_trainer import tiny


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs to mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    descriptor = os.open(place / "filler", os.O_WRONLY | os.O_CREAT)
    try:
        while True:
            os.write(descriptor, bytes(512))
    except OSError:
        os.close(descriptor)


def test_a_full_disk_at_a_checkpoint_and_at_the_start(folder: Path, small_disk: Path) -> None:
    settings = {"train__output_dir": str(small_disk / "run"), "train__save_every": 1}
    with pytest.raises((CheckpointError, OutputError), match="cannot be written"):
        Trainer(tiny(folder, **settings, train__max_steps=8, train__keep=8)).run()
    fill(small_disk)
    with pytest.raises(ConfigError, match=r"train\.output_dir: .*\(No space left on device\)"):
        Trainer(tiny(folder, train__output_dir=str(small_disk / "other"))).run()


def test_a_folder_that_is_removed_during_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_and_write(path: Path, record: dict[str, Any]) -> None:
        if record["step"] == 3:
            shutil.rmtree(folder / "run")
        append_record(path, record)

    monkeypatch.setattr(recorder, "append_record", remove_and_write)
    with pytest.raises(OutputError, match=r"metrics\.jsonl: cannot be written .* folder is gone\)"):
        Trainer(tiny(folder, train__max_steps=5)).run()


# --------------------------------------------------------------------------------------------- NaN


def test_weights_with_nan_are_refused_by_name(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> int:
        raise AssertionError("the memory of a step is measured, which takes minutes")

    monkeypatch.setattr(chunk_search, "measure_peak", measure)
    weights = load_file(find_checkpoint(finished / "run" / "checkpoint").weights_file)
    name = sorted(weights)[3]
    weights[name] = np.full_like(weights[name], np.nan)
    save_file(weights, finished / "nan.safetensors")
    (tokenizer,) = finished.glob("cache/**/tokenizer*.json")
    init = {"model__init_from": str(finished / "nan.safetensors"), "train__overwrite": True}
    init["data__tokenizer"] = str(tokenizer)
    with pytest.raises(CheckpointError, match=rf"nan\.safetensors: {name} holds NaN"):
        Trainer(tiny(finished, **init)).run()
