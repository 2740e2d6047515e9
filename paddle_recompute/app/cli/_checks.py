"""``parity`` and ``doctor``: checks before a training run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from paddle_recompute._files import read_json
from paddle_recompute._run_folder import hold
from paddle_recompute.app.cli._process import configured, prepare_one_process, run_on_ranks
from paddle_recompute.app.config import Config, load_config
from paddle_recompute.app.launch import (
    errors_in_one_paragraph,
    is_launched,
    is_rank,
    launch,
    prepare_rank,
    require_paddle_and_devices,
)
from paddle_recompute.errors import ConfigError


@click.command()
@configured(
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        default=5,
        show_default=True,
        help="Optimizer steps of each training run.",
    ),
    click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the tables."),
)
def parity(
    config_file: str, steps: int, as_json: bool, debug: bool, overrides: tuple[str, ...]
) -> None:
    """Check that dygraph and the static graph train the same from FILE.

    For example: paddle-recompute parity --config run.yaml --steps 10

    Trains the first steps in both modes, with and without recompute, on one process and on
    launch.num_ranks ranks, from the same weights on the same pairs. Compares losses, gradients and
    parameters. Exits with code 1 if they differ by more than the tolerance, and names the first
    parameter that differs.

    The runs named "fleet" are the reference: dygraph with Paddle's own recompute and gradient
    synchronization (recompute.engine: fleet, sync.mode: fleet). Dygraph with recompute must equal
    the reference bit by bit on up to two ranks. If fleet cannot train FILE, the report says why.
    """
    with errors_in_one_paragraph(debug, "interrupted; all processes have ended"):
        config = load_config(config_file, overrides)
        require_paddle_and_devices(config)
        from paddle_recompute.app.parity import parity as compare_modes

        report = compare_modes(config, steps=steps)
        click.echo(json.dumps(report.to_dict()) if as_json else str(report))
        if report.faults:
            sys.exit(1)


@click.command()
@configured(
    click.option("--self-test", "runs_self_test", is_flag=True, help="Test the library instead."),
    click.option("--output", metavar="FILE", help="Where the report goes, a .json file."),
    click.option("--device", default=None, help="With --self-test: gpu, cpu, ..."),
    click.option(
        "--parity", "compares_modes", is_flag=True, help="Also as the command parity does."
    ),
    click.option("--json", "as_json", is_flag=True, help="The report too, as the last line."),
    required=False,
)
def doctor(
    config_file: str | None,
    runs_self_test: bool,
    output: str | None,
    device: str | None,
    compares_modes: bool,
    as_json: bool,
    debug: bool,
    overrides: tuple[str, ...],
) -> None:
    """Compare the wrapped model with the plain one on one batch, before training.

    For example: paddle-recompute doctor --config run.yaml

    Names the first sublayer that differs. Exits with code 1 if a fault is found. A warning, such as
    a parameter that the loss does not use, leaves the code 0. --self-test examines models of its
    own on this device and writes paddle_recompute_self_test.json.
    """
    if is_launched():
        prepare_rank()
        assert config_file is not None
        _examine(load_config(config_file, overrides))
        return
    with errors_in_one_paragraph(debug):
        if output is not None and Path(output).suffix != ".json":
            raise ConfigError(f"--output {output}: must end in .json; any file there is replaced")
        if runs_self_test:
            _refuse(config_file=config_file, parity=compares_modes, overrides=overrides)
            prepare_one_process("Testing the library on this device")
            from paddle_recompute.app.doctor_runs import write_self_test

            file = Path(output or "paddle_recompute_self_test.json")
            is_right = write_self_test(file, device=device, say=click.echo)
            if as_json:
                click.echo(json.dumps(read_json(file)))
            if not is_right:
                sys.exit(1)
            return
        if config_file is None:
            raise ConfigError("doctor needs --config FILE, or --self-test")
        if device is not None:
            raise ConfigError("--device is for --self-test; with --config set launch.device")
        if compares_modes and is_rank():
            raise ConfigError("--parity starts processes of its own: call it without fleetrun")
        config = load_config(config_file, overrides)
        report = run_on_ranks(
            config,
            ["doctor", "--config", config_file, *overrides],
            _examine,
            start=_launch,
            result="doctor.json",
        )
        if compares_modes:
            from paddle_recompute.app import parity as modes

            compared = modes.parity(config, steps=2)
            click.echo(str(compared))
            report["parity"] = compared.to_dict()
            report["ok"] &= not compared.faults
        if os.environ.get("PADDLE_TRAINER_ID", "0") == "0":
            if output:
                from paddle_recompute.app.doctor_runs import write_report

                write_report(Path(output), report)
            if as_json:
                click.echo(json.dumps(report))
        if not report["ok"]:
            sys.exit(1)


def _refuse(*, config_file: str | None, parity: bool, overrides: tuple[str, ...]) -> None:
    given = ["--config"] * bool(config_file) + ["--parity"] * parity + list(overrides)
    if given:
        raise ConfigError(f"{given[0]}: has no effect with --self-test; remove one of them")


def _examine(config: Config) -> dict[str, Any]:
    from paddle_recompute.app.doctor_runs import examine

    return examine(config, say=click.echo)


def _launch(config: Config, command: list[str]) -> None:
    with hold(config.train.output_dir, click.echo):  # a run that trains there has its logs there
        launch(config, command)
