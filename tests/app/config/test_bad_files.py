"""Whatever stands in a configuration file, the end is our own error, within a second."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from paddle_recompute.app.config import load_config
from paddle_recompute.errors import ConfigError
from tests.app.config.bad_files import BAD_BYTES, BAD_FILES, BAD_OVERRIDES, GOOD

SECONDS = 1.0
LONGEST_MESSAGE = 20_000


def refusal(path: Path, *overrides: str) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert time.process_time() - began < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB
    return str(caught.value)


CONTENTS = {
    **{name: text.encode("utf-8", errors="surrogatepass") for name, text in BAD_FILES.items()},
    **BAD_BYTES,
}


@pytest.mark.parametrize("name", CONTENTS)
def test_a_bad_file_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(CONTENTS[name])
    message = refusal(file)
    assert message.startswith(str(file))
    assert len(message) < LONGEST_MESSAGE
    assert message.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", BAD_OVERRIDES)
def test_a_bad_override_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    assert len(refusal(file, BAD_OVERRIDES[name])) < LONGEST_MESSAGE


@pytest.mark.parametrize("path", ["a\0b", "/dev/zero", "/", "/nowhere/run.yaml", "a" * 5000])
def test_a_bad_name_is_refused_at_once(path: str) -> None:
    refusal(Path(path))


def test_anchors_are_still_good(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {preset: tiny}\ncontrastive: {global_batch: &batch 8}\n"
        "train: &train {max_steps: *batch, learning_rate: 1e-4}\n"
    )
    assert load_config(file).train.max_steps == 8


@pytest.mark.parametrize(
    ("written", "seed"), [("0", 0), ("12", 12), ("1_000", 1000), ("0x10", 16), ("+3", 3)]
)
def test_plain_numbers_are_still_good(tmp_path: Path, written: str, seed: int) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(GOOD)
    assert load_config(file, [f"train.seed={written}"]).train.seed == seed
