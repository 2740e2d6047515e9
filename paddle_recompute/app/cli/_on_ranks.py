"""``train``, ``parity`` and ``doctor``: the commands whose work is done on ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import click

from paddle_recompute._files import read_json
from paddle_recompute._installed import require_paddle
from paddle_recompute._run_folder import RECORD, check_folder, hold
from paddle_recompute.app.cli._process import (
    as_json,
    configured,
    is_main_rank,
    number,
    refused,
    words_apart,
)
from paddle_recompute.app.config import Config, check_in_a_program, load_config, load_settings
from paddle_recompute.app.launch import (
    is_launched,
    is_rank,
    launch,
    launch_with_restarts,
    quiet_settings,
    require_paddle_and_devices,
    speed_settings,
    start_line,
)
from paddle_recompute.errors import ConfigError, LaunchError

_OF_PADDLE = (
    "is an option of Paddle's launcher, which starts runs on several machines: fleetrun --master "
    "HOST:PORT --nnodes NODES --rank N --nproc_per_node RANKS paddle-recompute train --config FILE"
)


@configured(
    refused("--master", _OF_PADDLE),
    refused("--rank", _OF_PADDLE),
    number(
        "--max-restart",
        0,
        "How often to start the ranks again, from the last checkpoint, when one of them died.",
        least=0,
        alias="--max_restart",  # as Paddle's launcher spells it
    ),
    interrupted="interrupted; all ranks have ended",
)
def train(config_file: str, max_restart: int, overrides: tuple[str, ...]) -> None:
    """Train, evaluate and write a report.

    For example: paddle-recompute train --config run.yaml train.max_steps=50

    FILE configures the run; KEY=VALUE overrides a setting. The command starts launch.num_ranks
    ranks. Under fleetrun (python -m paddle.distributed.launch), which several machines need, the
    process is one of the ranks and starts none. The last line on standard output is the final
    record, one JSON object.

    SIGTERM and Ctrl-C finish the step and save it; the exit code is 143 or 130 then. With
    train.resume=auto the same command goes on. If train.output_dir holds a run, that run is
    resumed, or the command fails; train.overwrite=true removes it.
    """
    record = run_on_ranks(
        load_config(config_file, overrides),
        ["train", "--config", config_file, *overrides],
        partial(_train, config_file=config_file, overrides=overrides),
        start=partial(launch_with_restarts, max_restart=max_restart),
        result=RECORD,
    )
    if is_main_rank() and not is_launched():
        click.echo(json.dumps(record))


def _train(config: Config, *, config_file: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    from paddle_recompute.app.trainer import Trainer

    sources = {setting.path: setting.source for setting in load_settings(config_file, overrides)}
    return Trainer(config, sources=sources).run()


@configured(
    number("--steps", 5, "Optimizer steps of each training run."),
    as_json,
    interrupted="interrupted; all ranks have ended",
)
def parity(config_file: str, steps: int, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Compare dygraph with the static graph.

    For example: paddle-recompute parity --config run.yaml --steps 10

    Trains the first steps of FILE in both modes, with and without recompute, on launch.num_ranks
    ranks, from the same weights on the same pairs. Compares losses, gradients and parameters. Exits
    with code 1 if they differ by more than the tolerance, and names the first parameter that
    differs.

    The run named "fleet" is the reference: dygraph with Paddle's own recompute and gradient
    synchronization (recompute.engine: fleet, sync.mode: fleet). Dygraph with recompute must equal
    the reference bit by bit on up to two ranks. If fleet cannot train FILE, the report says why.
    """
    config = load_config(config_file, overrides)
    if not config.recompute.enable:
        raise ConfigError(
            "recompute.enable: false: parity compares each mode with and without recompute; set "
            "recompute.enable=true"
        )
    if config.contrastive.memory_budget is not None:
        raise ConfigError(
            "contrastive.memory_budget: parity does not measure how large the chunks may be; set "
            "contrastive.chunk_tokens (a run in this configuration reports them) instead"
        )
    check_in_a_program(config, is_trained=True)

    def compare(config: Config) -> dict[str, Any]:
        from paddle_recompute.app.parity import train_and_compare

        return train_and_compare(config, steps=steps, say=click.echo)

    arguments = ["parity", "--config", config_file, "--steps", str(steps), *overrides]
    _judge(config, arguments, compare, as_json=as_json)


@configured(
    refused("--output", "is gone: the report is in train.output_dir/doctor.json, or give --json"),
    refused("--parity", "is gone: call paddle-recompute parity, too"),
    refused(
        "--self-test", "is gone: call python -m benchmarks.correctness.self_test in a checkout"
    ),
    as_json,
    interrupted="interrupted; all ranks have ended",
)
def doctor(config_file: str, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Compare the wrapped model with the plain one.

    For example: paddle-recompute doctor --config run.yaml

    Trains a few steps on one batch, and names the first sublayer that differs. Exits with code 1 if
    a fault is found. A warning, such as a parameter that the loss does not use, leaves the code 0.
    The report is also in doctor.json in train.output_dir.
    """

    def examine(config: Config) -> dict[str, Any]:
        from paddle_recompute.app.doctor_runs import examine

        return examine(config, say=click.echo)

    arguments = ["doctor", "--config", config_file, *overrides]
    config = load_config(config_file, overrides)
    _judge(config, arguments, examine, as_json=as_json)


def _judge(
    config: Config,
    arguments: Sequence[str],
    act: Callable[[Config], dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    """Print what `act` reports on the ranks, and end with its code."""
    check_folder("train.output_dir", config.train.output_dir)
    with words_apart(as_json):
        report = run_on_ranks(config, arguments, act, start=_launch, result=f"{arguments[0]}.json")
    if is_launched():  # the launcher goes on with it
        return
    if as_json and is_main_rank():
        click.echo(json.dumps(report))
    if not report["ok"]:
        sys.exit(1)


def _launch(config: Config, command: list[str]) -> None:
    with hold(config.train.output_dir, click.echo):  # a run that trains there has its logs there
        launch(config, command)


def run_on_ranks(
    config: Config,
    arguments: Sequence[str],
    act: Callable[[Config], Any],
    *,
    start: Callable[[Config, list[str]], None],
    result: str,
) -> Any:
    """What `act` returns, in this process if it is a rank or the only one.

    Args:
        config: Says how many ranks.
        arguments: Of this command, for the ranks.
        act: Does the work of a rank; Paddle is imported there.
        start: Runs a command of Python on all ranks of this machine.
        result: The file in ``train.output_dir`` in which rank 0 leaves what `act` returns.

    Raises:
        LaunchError: Ranks cannot be started or failed, or the result cannot be read.
    """
    if not is_rank() and config.world_size > 1:
        require_paddle_and_devices(config)
        from paddle_recompute.app.data import check_files

        check_files(config)
        context = click.get_current_context(silent=True)
        debug = ["--debug"] if context is not None and context.params.get("debug") else []
        start(config, ["-m", "paddle_recompute", *arguments, *debug])
        file = config.train.output_dir / result
        try:
            return read_json(file)
        except (OSError, ValueError) as error:
            raise LaunchError(f"{file}: cannot read what rank 0 has written ({error})") from error
    chosen = speed_settings(config.launch.num_ranks, os.environ, device=config.launch.device)
    os.environ.update(chosen)
    if is_rank():
        os.environ.update(quiet_settings(os.environ))  # the last line of a log is the cause
        require_paddle()
    else:
        require_paddle_and_devices(config)
        click.echo(start_line(config, chosen))
    return act(config)
