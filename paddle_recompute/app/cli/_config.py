"""``config``: what a configuration says, whether it is valid, how two of them differ."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import click

from paddle_recompute._run_folder import check_folder, check_may_start
from paddle_recompute.app.cli._process import (
    as_json,
    command,
    configured,
    prepare_one_process,
    words_apart,
)
from paddle_recompute.app.config import (
    Config,
    Setting,
    line_of_yaml,
    load_config,
    load_settings,
)
from paddle_recompute.errors import ConfigError, DependencyError, PaddleRecomputeError
from paddle_recompute.options import RecomputeConfig


@configured(
    click.option("--changed", is_flag=True, help="Only what is not a default."),
    as_json,
)
def show(config_file: str, changed: bool, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Show every value of FILE, and where it comes from: a line, an override, a preset, a default.

    For example: paddle-recompute config show --config run.yaml train.max_steps=50

    The text is itself a configuration: `> whole.yaml` writes one that depends on no default.
    """
    found = load_settings(config_file, overrides)
    if changed:
        found = [setting for setting in found if setting.source != "default"]
    click.echo(json.dumps([vars(setting) for setting in found]) if as_json else _as_yaml(found))


@configured(as_json)
def validate(config_file: str, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Check the values of FILE. Exits with code 2 and all faults if it is bad.

    For example: paddle-recompute config validate --config run.yaml mode=static

    The files are read as `train` reads them: the pairs, the tokenizer and the description of the
    model. If one of them is not on this machine, a note says so, and none is read. A note also
    names a run in train.output_dir. If Paddle is installed, a model of your own is built, and
    recompute is applied to it. `train` also counts the devices and looks for packages before it
    starts.
    """
    try:
        config = load_config(config_file, overrides)
        if not _missing_files(config):
            from paddle_recompute.app.data import check_files

            check_files(config, whole=True)
        check_folder("train.output_dir", config.train.output_dir)
        if config.data.source == "cedict" or config.tokenizer_file is None:
            check_folder("data.cache_dir", config.data.cache_dir)
        with words_apart(as_json):  # what the user's model prints
            notes = _check_model(config)
        if config.strategy.amp and (config.mode, config.launch.device) == ("dygraph", "cpu"):
            raise ConfigError(
                "strategy.amp: true: Paddle has no mixed precision on a CPU in dygraph; set it to "
                "false, launch.device: gpu, or mode: static with "
                "strategy.amp_configs.dtype=bfloat16"
            )
    except PaddleRecomputeError as error:
        if as_json:
            head, *faults = str(error).split("\n  - ")
            click.echo(json.dumps({"valid": False, "faults": faults or [head]}))
        raise
    notes = [*config.without_effect(), *_missing_files(config), *notes]
    train = config.train
    try:
        check_may_start(train.output_dir, resume=train.resume, overwrite=train.overwrite)
    except ConfigError as error:
        notes.append(str(error))
    if as_json:
        click.echo(json.dumps({"valid": True, "notes": notes}))
        return
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    click.echo(
        f"{config_file}: valid; mode {config.mode}, {ranks}, {config.micro_batch} pairs per "
        "rank and micro-batch"
    )
    for note in notes:
        click.echo(f"note: {note}")


def _check_model(config: Config) -> list[str]:
    """Check the user's model and the patterns; returns what is not checked."""
    notes = [
        f"{section}.memory_budget: not compared with what a step takes; paddle-recompute {command} "
        "measures it"
        for section, command in (("recompute", "plan"), ("contrastive", "train"))
        if getattr(config, section).memory_budget is not None
    ]
    if config.model.is_own or config.recompute != RecomputeConfig():
        try:
            prepare_one_process("")
        except DependencyError as error:
            return [*notes, f"model, recompute: not compared with each other: {error}"]
        import paddle

        from paddle_recompute.app.trainer import check_model

        paddle.set_device("cpu")
        check_model(config)
    return notes


def _missing_files(config: Config) -> list[str]:
    named = {
        "data.train_file": config.data.train_file,
        "data.valid_file": config.data.valid_file,
        "data.tokenizer": config.data.tokenizer,
        "model.init_from": config.model.init_from,
        "model.positive_from": config.model.positive_from,
    }
    return [
        f"{name}: {path}: there is no such file on this machine"
        for name, path in named.items()
        if path is not None and not os.path.exists(path)
    ]


@command(click.argument("left", metavar="FILE"), click.argument("right", metavar="FILE"), as_json)
def diff(left: str, right: str, as_json: bool) -> None:
    """Show the values in which two configurations differ, defaults included.

    For example: paddle-recompute config diff before.yaml after.yaml

    Exits with code 1 if they differ.
    """
    both = zip(load_settings(left), load_settings(right), strict=True)
    pairs = [(setting, other) for setting, other in both if setting.value != other.value]
    if as_json:
        click.echo(
            json.dumps([{"left": vars(setting), "right": vars(other)} for setting, other in pairs])
        )
    else:
        for setting, other in pairs:
            click.echo(f"{setting.path}: {_told(setting)} -> {_told(other)}")
    if pairs:
        sys.exit(1)


@click.group("config", commands=[show, validate, diff])
def config_group() -> None:
    """Show, check and compare configurations.

    For example: paddle-recompute config show --config run.yaml

    Touches no device and needs no Paddle.
    """


def _told(one: Setting) -> str:
    return f"{line_of_yaml(one.value)} ({one.source})"


def _as_yaml(settings: Sequence[Setting]) -> str:
    """Nested YAML, with each value's source as a comment."""
    lines: list[tuple[str, str]] = []
    opened: set[str] = set()
    for setting in settings:
        *sections, name = setting.path.split(".")
        for depth, section in enumerate(sections):
            path = ".".join(sections[: depth + 1])
            if path not in opened:
                opened.add(path)
                lines.append((f"{'  ' * depth}{section}:", ""))
        lines.append(
            (f"{'  ' * len(sections)}{name}: {line_of_yaml(setting.value)}", setting.source)
        )
    return "\n".join(f"{text:<40}  # {source}" if source else text for text, source in lines)
