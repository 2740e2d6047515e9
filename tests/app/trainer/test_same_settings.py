"""Ranks with different settings, versions or data do not train together: each is named."""

from __future__ import annotations

import json
import platform
import re
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle.distributed as dist

from benchmarks.faults._failing_starts_rank import run
from paddle_recompute import _version
from paddle_recompute.app.config import load_config
from paddle_recompute.app.trainer import same_settings
from paddle_recompute.app.trainer.same_settings import MAY_DIFFER, check_same_settings, compared
from paddle_recompute.errors import ConfigError
from tests.app.trainer.test_trainer import tiny
from tests.forked_ranks import start
from tests.ranks import free_ports, rank_environment, run_ranks

# Of all that are compared (below): of each section, and where the file's others refuse the change.
CHANGED = """
mode=static model.preset=base model.vocab_size=999 recompute.enable=false recompute.offload=host
strategy.amp=true strategy.gradient_merge=true strategy.fuse_grad_size_in_MB=1 sync.mode=fused
sync.check_every=2 contrastive.global_batch=16 contrastive.temperature=0.07 data.pool_size=49
train.max_steps=99 train.seed=7 train.resume=auto launch.num_ranks=1 data.cache_dir=/other
data.train_file=/other.tsv train.output_dir=/other
"""
SETTINGS = CHANGED.split()
VERSIONS: dict[str, tuple[Any, str, Any]] = {
    "Paddle": (same_settings, "paddle_version", lambda: (2, 0, 0)),
    "Python": (platform, "python_version", lambda: "3.9.0"),
    "numpy": (np, "__version__", "0.1"),
    "paddle_recompute": (_version, "__version__", "0.0.1"),
    "paddle_recompute ": (same_settings, "_digest", lambda: "another"),
}


def file_of(folder: Path, *, num_ranks: int = 2) -> Path:
    file = folder / "run.yaml"
    file.write_text(json.dumps(tiny(folder, launch__num_ranks=num_ranks).to_dict()))
    return file


def compare_each(file: Path) -> list[str]:
    """What `check_same_settings` says where rank 1 has each of the settings, and versions."""
    is_other = dist.get_rank() == 1
    told = []
    for setting in SETTINGS:
        told.append(_complaint(_with(file, setting) if is_other else load_config(file)))
    for owner, name, value in VERSIONS.values():
        with mock.patch.object(owner, name, value if is_other else getattr(owner, name)):
            told.append(_complaint(load_config(file)))
    told.append(_complaint(load_config(file)))
    return told


def _with(file: Path, setting: str) -> Any:
    """The configuration with another setting, also where the file's others refuse that."""
    try:
        return load_config(file, [setting])
    except ConfigError:
        name, _, value = setting.partition("=")
        settings = {**load_config(file).settings(), name: value}
        return mock.Mock(settings=lambda: settings)


def _complaint(config: Any) -> str:
    try:
        check_same_settings(config)
    except ConfigError as error:
        return str(error)
    return ""


def test_each_setting_and_version_of_one_rank_is_named_with_both_values(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    before = load_config(file).settings()
    names = [setting.partition("=")[0] for setting in SETTINGS]
    first, second = run_ranks(compare_each, num_ranks=2, file=file)
    assert first == second
    for name, told in zip(names, first, strict=False):
        if name in MAY_DIFFER:
            assert told == "", name
        else:
            assert f"{name} is {before[name]!r} on rank 0, " in told, (name, told)
            assert told.count(" on rank 1") >= 1
    of_versions = first[len(names) : -1]
    for name, told in zip(VERSIONS, of_versions, strict=True):
        assert f"the version of {name.strip()} is " in told and " on rank 1" in told, (name, told)
    assert first[-1] == "", "ranks that are alike go on"


def test_all_settings_but_paths_are_compared(tmp_path: Path) -> None:
    config = load_config(file_of(tmp_path))
    settings = config.settings()
    assert {*MAY_DIFFER} < settings.keys()
    assert {*settings} - {*compared(config)} == {*MAY_DIFFER}


def ends_of(folder: Path, own: list[list[str]], *keys: str) -> list[tuple[int, str]]:
    """Exit code and output of the command on ranks that have arguments of their own."""
    ports = free_ports(len(own) + 1)
    common = ["train", "--config", str(file_of(folder, num_ranks=len(own)))]
    logs = [folder / f"{rank}.log" for rank in range(len(own))]
    ranks = []
    for rank, arguments in enumerate(own):
        environment = rank_environment(rank, ports)
        environment |= {"PADDLE_RECOMPUTE_CONTROL_KEY": keys[rank]} if keys else {}
        given = {"arguments": [*common, *arguments], "fault": None}
        ranks.append(start(run, environment, logs[rank], **given))
    codes = [rank.wait(90) for rank in ranks]
    remarks = re.compile(r"^[IW]\d{4} .*\n", re.MULTILINE)  # of Paddle, imported with them on
    return [(code, remarks.sub("", log.read_text())) for code, log in zip(codes, logs, strict=True)]


def test_another_setting_ends_the_command_on_all_ranks(folder: Path) -> None:
    for code, output in ends_of(folder, [[], ["launch.num_ranks=1"]]):
        assert code == 2
        last = output.splitlines()[-1]
        assert "launch.num_ranks is " in last and ", 1 on rank 1. Start all ranks with" in last
    assert not (folder / "run" / "metrics.jsonl").exists()


def test_another_key_ends_both_sides(folder: Path) -> None:
    own = f"rank 1 on {socket.gethostname()} has another key than rank 0"
    ends = ends_of(folder, [[], []], "secret", "guess")
    for (code, output), said in zip(ends, [own, "has another key; "], strict=True):
        assert code == 2
        assert said in output.splitlines()[-1]
        assert "PADDLE_RECOMPUTE_CONTROL_KEY must be the same" in output.splitlines()[-1]
