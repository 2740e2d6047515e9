"""A run of two machines: `fleetrun` on each of them, no shared disk, a slow cable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.harness.network import set_rate
from paddle_recompute.app.data.tokenizer import train_tokenizer
from paddle_recompute.app.trainer import Trainer
from tests.app.trainer.test_trainer import tiny, unmeasured, write_pairs
from tests.machines.machines import MBIT_PER_SECOND, Ended, Machine, fleetrun, two_machines
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(240)

SLOW = 8.0
"""Mbit/s; 0.4 MB of gradients take longer than the computation of a step."""
SETTINGS: dict[str, Any] = {
    "model__hidden_size": 64,
    "train__max_steps": 4,
    "train__save_every": 2,
    "train__eval_before": False,
    "launch__device": "cpu",
}


AS_IN_TESTS = {"OMP_NUM_THREADS": "1", "MKL_DEBUG_CPU_TYPE": "0", "FLAGS_use_stride_kernel": "1"}
"""Instead of what `speed_settings` chooses, which rounds differently."""


def prepare(folder: Path) -> None:
    """What every machine has a copy of: the pairs and the tokenizer."""
    write_pairs(folder / "pairs.tsv")
    lines = (folder / "pairs.tsv").read_text().splitlines()
    train_tokenizer([text for line in lines for text in line.split("\t")], folder / "words", 500)


@unmeasured
def train_alone(folder: Path) -> None:
    words = str(folder / "words")
    Trainer(tiny(folder, **SETTINGS, data__tokenizer=words, launch__num_ranks=2)).run()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks on one machine; the checkpoints of its steps 2 and 4."""
    folder = tmp_path_factory.mktemp("alone")
    prepare(folder)
    run_ranks(train_alone, 2, folder=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    try:
        made = two_machines(tmp_path_factory.mktemp("machines"))
        machines = made.__enter__()
    except SystemExit as missing:
        pytest.skip(str(missing))
    yield machines
    made.__exit__(None, None, None)


@pytest.fixture
def machines(network: list[Machine]) -> list[Machine]:
    """With empty disks but for the data and the configuration."""
    tree = tiny(Path(), **SETTINGS, data__tokenizer="words").to_dict()
    for machine in network:
        shutil.rmtree(machine.folder)
        machine.folder.mkdir()
        machine.name_itself(machine.host.address)
        prepare(machine.folder)
        (machine.folder / "run.yaml").write_text(yaml.safe_dump(tree))
    set_rate([machine.host for machine in network], MBIT_PER_SECOND)
    return network


def put(checkpoint: Path, machine: Machine) -> None:
    shutil.copytree(checkpoint, machine.folder / "run" / "checkpoint" / checkpoint.name)


@pytest.fixture
def shown(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Asserts how a run ended and what it said, which the benchmark writes down."""

    def check(ended: list[Ended], code: int, *words: tuple[int, str]) -> None:
        """`words`: The number of a machine, and a part of a line that its launcher writes."""
        output = "\n".join(f"==== code {one.code}\n{one.said}" for one in ended)
        assert [one.code for one in ended] == [code] * len(ended), output
        lines = []
        for number, text in words:
            found = [line.strip() for line in ended[number].said.splitlines() if text in line]
            assert found, f"not said by machine {number}: {text}\n{output}"
            lines.append(found[0])
        record_property("code", code)
        record_property("seconds", max(one.seconds for one in ended))
        record_property("said", lines)

    return check


def assert_same_state(machine: Machine, alone: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        file = Path("checkpoint") / "step-4" / name
        assert (machine.folder / "run" / file).read_bytes() == (alone / file).read_bytes(), name


def test_bits_of_one_machine_over_a_slow_network(
    machines: list[Machine], alone: Path, shown: Callable[..., None]
) -> None:
    set_rate([machine.host for machine in machines], SLOW)
    ended = fleetrun(machines, **AS_IN_TESTS)
    shown(ended, 0, (0, "The network is the limit: a step takes "))
    assert "sync.compression=bf16 sends half the bytes" in ended[0].said
    assert_same_state(machines[0], alone)
    assert not (machines[1].folder / "run" / "checkpoint").exists()


def test_checkpoint_on_machine_0_only(
    machines: list[Machine], alone: Path, shown: Callable[..., None]
) -> None:
    put(alone / "checkpoint" / "step-2", machines[0])
    text = (
        "no checkpoint is on all ranks; the newest are step 2 on rank 0 (alpha), none on rank 1 "
        "(beta). Every rank reads the checkpoint: copy its folder"
    )
    shown(fleetrun(machines, "train.resume=true"), 2, (0, text), (1, text))


def test_copied_checkpoint_and_hostnames_at_127_0_1_1(
    machines: list[Machine], alone: Path, shown: Callable[..., None]
) -> None:
    """Machine 0 has a newer checkpoint as well."""
    for machine in machines:
        machine.name_itself("127.0.1.1")
        put(alone / "checkpoint" / "step-2", machine)
    put(alone / "checkpoint" / "step-4", machines[0])
    ended = fleetrun(machines, "train.resume=auto", with_host=True, **AS_IN_TESTS)
    newest = "the newest checkpoints are step 4 on rank 0 (alpha), step 2 on rank 1 (beta)"
    shown(ended, 0, (0, f"{newest}; all ranks go on from step 2"))
    assert_same_state(machines[0], alone)


@pytest.mark.parametrize("place", [0, 1])
def test_typo_in_an_override_on_one_machine(
    place: int, machines: list[Machine], shown: Callable[..., None]
) -> None:
    """It fails before there is a process group."""
    name, other = machines[place].name, machines[1 - place].name
    wrong = ["train.max_step=5"]
    ended = fleetrun(machines, of=[wrong, []] if place == 0 else [[], wrong])
    cause = f"rank {place} on {name} failed before the first step: ConfigError: run.yaml has 1 fau"
    shown(
        ended,
        2,
        (1 - place, f"paddle-recompute: rank {1 - place} on {other}: {cause}"),
        (place, f"paddle-recompute: rank {place} on {name}: run.yaml has 1 fault"),
    )
    assert "train.max_step (override train.max_step=5): received 5" in ended[1 - place].said
    assert max(one.seconds for one in ended) < 90
