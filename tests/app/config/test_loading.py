"""Reading a file: overrides, YAML faults, and one message with every fault in it."""

from __future__ import annotations

import math
import re
import resource
import time
from pathlib import Path

import pytest

from paddle_recompute.app.config import load_config
from paddle_recompute.errors import ConfigError
from tests.app.config.bad_files import BAD_BYTES, BAD_FILES, BAD_OVERRIDES, GOOD
from tests.ranks import ROOT

SECONDS = 1.0
LONGEST_MESSAGE = 20_000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def fault_of(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def fault_of_text(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return fault_of(path)


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ([], "train.max_steps", 5),
        ([], "train.learning_rate", 1e-4),  # an exponent without a dot is a number
        (["train.learning_rate=3E5"], "train.learning_rate", 3e5),
        (["train.seed=1", "train.seed=2"], "train.seed", 2),
        (["train.seed=1_000"], "train.seed", 1000),
        (["train.seed=0x10"], "train.seed", 16),
        (["train.seed=+3"], "train.seed", 3),
        (["recompute.checkpoints=[a.*, 'b.*']"], "recompute.checkpoints", ["a.*", "b.*"]),
        (["train.clip_grad_norm=null"], "train.clip_grad_norm", None),
        (["data.pool_size=3"], "data.pool_size", 3),  # opens an empty section
        (["train.output_dir=out=1"], "train.output_dir", Path("out=1")),
        (
            ["strategy={gradient_merge: true, gradient_merge_configs: {k_steps: 2}}"],
            "strategy.gradient_merge_configs.k_steps",
            2,
        ),
    ],
)
def test_override_is_yaml(file: Path, overrides: list[str], path: str, value: object) -> None:
    file.write_text(GOOD + "data:\n" * path.startswith("data."), encoding="utf-8")
    found: object = load_config(file, overrides)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.max_steps", "must be written dotted.key=value"),
        ("", "must be written dotted.key=value"),
        ("train.max_steps.x=3", "train.max_steps is a value (5), not a section"),
        ("train.seed=[1", "override 'train.seed=[1': the value is not valid YAML"),
        (
            "train.max_step=3",
            "train.max_step (override train.max_step=3): received 3; unknown key; did you mean "
            "max_steps?",
        ),
    ],
)
def test_bad_override(file: Path, override: str, words: str) -> None:
    message = fault_of(file, override)
    assert words in message and message.startswith(f"{file} has 1 fault:")


BAD_TEXTS = {
    "a key that is no word": (
        GOOD + "launch: {1: x}\n",
        "unknown key; allowed here: num_ranks",
    ),
    "a section that is no mapping": (
        GOOD + "launch: 3\n",
        "launch (line 4): received 3; must be",
    ),
    "no YAML": (
        "model:\n  preset: tiny\n  pooling: [cls\ntrain: {}\n",
        ", line 4, column 6: is not valid YAML",
    ),
    "a key twice": (
        GOOD + "launch:\n  num_ranks: 1\n  num_ranks: 2\n",
        "line 6, column 3: is not valid YAML: the key launch.num_ranks is given twice (first in ",
    ),
    "an alias of a mapping": (
        GOOD + "launch: &a {num_ranks: 1}\ndata: *a\n",
        "line 5, column 7: is not valid YAML: the alias *a stands for more than one value",
    ),
    "a list": ("- a\n", "must hold a YAML mapping (key: value lines), it holds only a list"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_text(file: Path, name: str) -> None:
    text, words = BAD_TEXTS[name]
    assert words in fault_of_text(file, text)


def test_every_fault_in_one_message(file: Path) -> None:
    message = fault_of_text(
        file,
        """\
mode: graph
modle: {a: 1}
model: {preset: tiny, hidden_size: wide, heads: 3}
recompute: {checkpoints: [encoder.layers.*, 7]}
contrastive: {global_batch: 13, temperature: 0}
train: {learning_rate: 1e-4, warmup_steps: -1}
launch: {num_ranks: 2}
""",
    )
    for fault in (
        "mode (line 1): received 'graph'; must be 'dygraph' or 'static'",
        "modle (line 2): received {'a': 1}; unknown key; did you mean mode or model?",
        "model.hidden_size (line 3): received 'wide'; must be a whole number",
        "model.heads (line 3): received 3; unknown key; did you mean num_heads or head_dim?",
        "recompute.checkpoints.1: received 7; must be text",
        "contrastive.temperature (line 5): received 0; must be greater than 0",
        "train.warmup_steps (line 6): received -1; must be greater than or equal to 0",
        "train.max_steps: required if num_epochs is not given",
        # Crosses three sections, two of which have faults of their own.
        "contrastive.global_batch (line 5): received 13; must be a multiple of",
    ):
        assert f"\n  - {fault}" in message
    assert message.startswith(f"{file} has 9 faults:")


def test_what_is_no_file_of_text(file: Path) -> None:
    message = fault_of(file.with_name("rnu.yaml"))
    assert "no such configuration file" in message and f"the folder has {file}" in message
    assert "cannot be read (Is a directory)" in fault_of(file.parent)
    file.write_bytes("model: {preset: tiny} # größe".encode("latin-1"))
    assert "is not UTF-8 text" in fault_of(file)


# ----------------------------------------------------------- files that were not written to be read


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
def test_a_bad_file_is_refused_at_once(file: Path, name: str) -> None:
    file.write_bytes(CONTENTS[name])
    message = refusal(file)
    assert message.startswith(str(file))
    assert len(message) < LONGEST_MESSAGE
    assert message.replace("\n", "").isprintable()


@pytest.mark.parametrize("name", BAD_OVERRIDES)
def test_a_bad_override_is_refused_at_once(file: Path, name: str) -> None:
    assert len(refusal(file, BAD_OVERRIDES[name])) < LONGEST_MESSAGE


@pytest.mark.parametrize("path", ["a\0b", "/dev/zero", "/", "/nowhere/run.yaml", "a" * 5000])
def test_a_bad_name_is_refused_at_once(path: str) -> None:
    refusal(Path(path))


def test_anchors_are_still_good(file: Path) -> None:
    file.write_text(
        "model: {preset: tiny}\ncontrastive: {global_batch: &batch 8}\n"
        "train: &train {max_steps: *batch, learning_rate: 1e-4}\n"
    )
    assert load_config(file).train.max_steps == 8


# ------------------------------------------------------------------------------------ fleet_configs


@pytest.mark.parametrize("path", sorted((ROOT / "fleet_configs").glob("*")), ids=lambda p: p.name)
def test_loads_and_is_what_its_name_says(path: Path) -> None:
    config = load_config(path)
    named = re.fullmatch(
        r"contrastive_ernie-([a-z]+)(?:_[a-z-]+)?_(?:(\d)x)?(\d)([cg]pu)\.yaml", path.name
    )
    assert named, "the name is <task>_<model>[_<variant>]_<topology>.yaml"
    preset, nodes, ranks, device = named.groups()
    assert config.model.preset == preset
    assert config.launch.num_nodes == int(nodes or 1)
    assert config.launch.num_ranks == int(ranks)
    assert config.launch.device == device
    assert config.without_effect() == []
    # model.init_from reads PaddleNLP's names: tests/weights/test_init_from.py.
    assert "not converted" not in " ".join(path.read_text().replace("#", " ").split())
    # The comment beside the batch says the product.
    line = next(line for line in path.read_text().splitlines() if "global_batch:" in line)
    factors = re.findall(r"\d+", line.partition("#")[2].partition(",")[0])
    assert math.prod(map(int, factors)) == config.contrastive.global_batch
