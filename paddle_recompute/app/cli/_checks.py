"""``parity`` and ``doctor``: checks before a training run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from paddle_recompute._files import read_json
from paddle_recompute._run_folder import hold
from paddle_recompute.app.cli._process import (
    as_json,
    configured,
    is_main_rank,
    number,
    prepare_one_process,
    refused,
    run_on_ranks,
)
from paddle_recompute.app.config import Config, load_config
from paddle_recompute.app.launch import is_launched, launch, require_paddle_and_devices
from paddle_recompute.errors import ConfigError


@configured(
    number("--steps", 5, "Optimizer steps of each training run."),
    as_json,
    interrupted="interrupted; all processes have ended",
)
def parity(config_file: str, steps: int, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Compare dygraph with the static graph.

    For example: paddle-recompute parity --config run.yaml --steps 10

    Trains the first steps of FILE in both modes, with and without recompute, on one process and on
    launch.num_ranks ranks, from the same weights on the same pairs. Compares losses, gradients and
    parameters. Exits with code 1 if they differ by more than the tolerance, and names the first
    parameter that differs.

    The runs named "fleet" are the reference: dygraph with Paddle's own recompute and gradient
    synchronization (recompute.engine: fleet, sync.mode: fleet). Dygraph with recompute must equal
    the reference bit by bit on up to two ranks. If fleet cannot train FILE, the report says why.
    """
    config = load_config(config_file, overrides)
    require_paddle_and_devices(config)
    from paddle_recompute.app.parity import parity as compare_modes

    report = compare_modes(config, steps=steps)
    click.echo(json.dumps(report.to_dict()) if as_json else str(report))
    if report.faults:
        sys.exit(1)


@configured(
    click.option("--self-test", "runs_self_test", is_flag=True, help="Test the library instead."),
    click.option("--output", metavar="FILE", help="Where the report goes, a .json file."),
    click.option("--device", default=None, help="With --self-test: gpu, cpu, ..."),
    refused("--parity", "is gone: call paddle-recompute parity, too"),
    click.option("--json", "as_json", is_flag=True, help="The report too, as the last line."),
    required=False,
    interrupted="interrupted; all ranks have ended",
)
def doctor(
    config_file: str | None,
    runs_self_test: bool,
    output: str | None,
    device: str | None,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Compare the wrapped model with the plain one.

    For example: paddle-recompute doctor --config run.yaml

    Trains a few steps on one batch, and names the first sublayer that differs. Exits with code 1 if
    a fault is found. A warning, such as a parameter that the loss does not use, leaves the code 0.
    --self-test examines models of its own on this device and writes
    paddle_recompute_self_test.json.
    """
    if output is not None and Path(output).suffix != ".json":
        raise ConfigError(f"--output {output}: must end in .json; any file there is replaced")
    if runs_self_test:
        if given := ["--config"] * bool(config_file) + list(overrides):
            raise ConfigError(f"{given[0]}: has no effect with --self-test; remove one of them")
        prepare_one_process("Testing the library on this device")
        from paddle_recompute.app.doctor_runs import write_self_test

        file = Path(output or "paddle_recompute_self_test.json")
        is_right = write_self_test(file, device=device, say=click.echo)
        if as_json:
            click.echo(json.dumps(read_json(file)))
        sys.exit(0 if is_right else 1)
    if config_file is None:
        raise ConfigError("doctor needs --config FILE, or --self-test")
    if device is not None:
        raise ConfigError("--device is for --self-test; with --config set launch.device")
    report = run_on_ranks(
        load_config(config_file, overrides),
        ["doctor", "--config", config_file, *overrides],
        _examine,
        start=_launch,
        result="doctor.json",
    )
    if is_launched():
        return
    if output and is_main_rank():
        from paddle_recompute.app.doctor_runs import write_report

        write_report(Path(output), report)
    if as_json and is_main_rank():
        click.echo(json.dumps(report))
    if not report["ok"]:
        sys.exit(1)


def _examine(config: Config) -> dict[str, Any]:
    from paddle_recompute.app.doctor_runs import examine

    return examine(config, say=click.echo)


def _launch(config: Config, command: list[str]) -> None:
    with hold(config.train.output_dir, click.echo):  # a run that trains there has its logs there
        launch(config, command)
