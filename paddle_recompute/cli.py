"""The command ``paddle-recompute``."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from paddle_recompute import __version__
from paddle_recompute._installed import require_paddle
from paddle_recompute._json_files import read_json
from paddle_recompute.config import Config, byte_count, load_config
from paddle_recompute.errors import ConfigError, LaunchError, StoppedError
from paddle_recompute.launch import (
    errors_in_one_paragraph,
    is_launched,
    is_rank,
    launch,
    launch_with_restarts,
    leave_error,
    prepare_rank,
    require_paddle_and_devices,
    speed_settings,
    start_line,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paddle-recompute")
def main() -> None:
    """Train large batches in PaddlePaddle with recompute."""


@main.command()
@click.option("--config", "config_file", required=True, metavar="FILE", help="A YAML file.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.option("--master", metavar="HOST:PORT", help="Several machines: address of the first one.")
@click.option(
    "--rank", "node_rank", type=int, default=0, help="Several machines: number of this one, from 0."
)
@click.option(
    "--max-restart",
    "--max_restart",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="How often to start the ranks again, from the last checkpoint, when one of them died.",
)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def train(
    config_file: str,
    debug: bool,
    master: str | None,
    node_rank: int,
    max_restart: int,
    overrides: tuple[str, ...],
) -> None:
    """Train, evaluate and write a report, as FILE configures; KEY=VALUE overrides a setting.

    For example: paddle-recompute train --config run.yaml train.max_steps=50

    The command starts launch.num_ranks ranks. Under fleetrun (python -m paddle.distributed.launch)
    the process is one of the ranks and starts none. On several machines, run the command on every
    machine with --master HOST:PORT and --rank N. The last line on standard output is the final
    record, one JSON object.

    SIGTERM and Ctrl-C finish the step and save it; the exit code is 143 or 130 then. With
    train.resume=auto the same command goes on.
    """
    if is_launched():
        prepare_rank()
        try:
            _train_here(load_config(config_file, overrides))
        except StoppedError as error:  # no excepthook is called for what ends a process in order
            leave_error(type(error), error, None)
            raise
        return
    with errors_in_one_paragraph(debug):
        config = load_config(config_file, overrides)
        if is_rank() or config.world_size == 1:
            record = _train_here(config)
        else:
            again = ["-m", "paddle_recompute.cli", "train", "--config", config_file, *overrides]
            launch_with_restarts(
                config, again, master=master, node_rank=node_rank, max_restart=max_restart
            )
            record = None if node_rank else _record_of(config)
        if record is not None:
            click.echo(record)


def _memory_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that `estimate` and `plan` have in common."""
    for decorate in reversed(
        [
            click.option(
                "--config", "config_file", required=True, metavar="FILE", help="A YAML file."
            ),
            click.option(
                "--memory-budget",
                metavar="BYTES|CARD",
                help="8GiB, or a card such as A100-40G, less 1.5 GiB for driver and libraries.",
            ),
            click.option(
                "--what-if",
                default="",
                metavar="NAME=N,...",
                help="Another step: batch (pairs of all ranks), gpus (ranks), length (tokens of a "
                "positive), layers.",
            ),
            click.option(
                "--output",
                metavar="FOLDER",
                help="Write memory.png, memory.html and, with a budget, plan.json there.",
            ),
            click.option("--debug", is_flag=True, help="Show the traceback of an error."),
            click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
        ]
    ):
        command = decorate(command)
    return command


@main.command()
@_memory_options
def estimate(
    config_file: str,
    memory_budget: str | None,
    what_if: str,
    output: str | None,
    debug: bool,
    overrides: tuple[str, ...],
) -> None:
    """Show what a step of FILE takes under each policy: peak, extra time, largest batch.

    For example: paddle-recompute estimate --config run.yaml --what-if batch=4096,gpus=8

    The calls of the blocks are measured on small batches in this process; no data is read.
    """
    _show_memory(config_file, memory_budget, what_if, output, debug, overrides, needs_budget=False)


@main.command()
@_memory_options
def plan(
    config_file: str,
    memory_budget: str | None,
    what_if: str,
    output: str | None,
    debug: bool,
    overrides: tuple[str, ...],
) -> None:
    """Choose what is recomputed so that a step of FILE stays within a budget.

    For example: paddle-recompute plan --config run.yaml --memory-budget 8GiB --output memory

    To train with it, set recompute.policy: budget and recompute.memory_budget.
    """
    _show_memory(config_file, memory_budget, what_if, output, debug, overrides, needs_budget=True)


@main.command()
@click.option(
    "--model", "folder", required=True, metavar="FOLDER", help="The train.output_dir of a run."
)
@click.option("--output", required=True, metavar="FILE", help="A .npy or .jsonl file to write.")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Texts encoded at once.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=2),
    help="Longer texts are cut; by default, at the limit of the positives in training.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("text_file")
def encode(
    folder: str, output: str, batch_size: int, max_tokens: int | None, debug: bool, text_file: str
) -> None:
    """Encode TEXT_FILE, one text per line, and write the vectors. It may be a .gz file.

    For example: paddle-recompute encode --model outputs/run --output pool.npy texts.txt

    After an interruption, run the same command again: it continues where it stopped. The last line
    on standard output is a record, one JSON object.
    """
    with errors_in_one_paragraph(debug, "interrupted; run the same command again to continue"):
        _prepare_one_process()
        from paddle_recompute.retrieval import encode_file, load_encoder

        with tqdm(unit="text", desc="encode", disable=None) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            record = encode_file(
                load_encoder(folder),
                text_file,
                output,
                batch_size=batch_size,
                max_tokens=max_tokens,
                progress=show,
            )
        click.echo(f"{record['texts']} texts, vectors of {record['dim']} numbers: {output}")
        for key, what in (
            ("cut", "texts cut at --max-tokens"),
            ("unknown", "texts with words that are not in the vocabulary"),
        ):
            if record[key]:
                click.echo(f"  {what}: {record[key]}")
        click.echo(json.dumps(record))


@main.command()
@click.option(
    "--model", "folder", required=True, metavar="FOLDER", help="The train.output_dir of a run."
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(["pdparams", "safetensors"]),
    default="pdparams",
    show_default=True,
    help="pdparams: for Paddle's own tools (paddle.load).",
)
@click.option("--output", required=True, metavar="FILE", help="The file to write.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def export(folder: str, file_format: str, output: str, debug: bool) -> None:
    """Write the weights of the newest checkpoint of FOLDER for other programs.

    For example: paddle-recompute export --model outputs/run --output encoder.pdparams
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        if not output.endswith(f".{file_format}"):
            raise ConfigError(
                f"--output {output}: must end in .{file_format}, as --format {file_format} says"
            )
        _prepare_one_process()
        from paddle_recompute.models import save_weights
        from paddle_recompute.retrieval import load_encoder

        encoder = load_encoder(folder)
        save_weights(encoder.model, output)
        click.echo(f"{len(encoder.model.state_dict())} tensors of {encoder.folder}: {output}")


@main.command()
@click.option(
    "--index", "place", required=True, metavar="FILE|FOLDER", help="The output of `encode`."
)
@click.option("--model", "folder", metavar="FOLDER", help="The run, if it was moved.")
@click.option(
    "--top-k", type=click.IntRange(min=1), default=10, show_default=True, help="Texts per query."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per query and line.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("queries", nargs=-1, required=True, metavar="QUERY...")
def search(
    place: str, folder: str | None, top_k: int, as_json: bool, debug: bool, queries: tuple[str, ...]
) -> None:
    """Show the texts nearest to each QUERY: rank, score (cosine), text.

    For example: paddle-recompute search --index pool.npy "a big cat"
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        _prepare_one_process()
        from paddle_recompute.retrieval import Index, load_encoder
        from paddle_recompute.retrieval import search as find

        index = Index(place)
        found = find(
            index,
            queries,
            top_k=top_k,
            encoder=load_encoder(folder) if folder else None,
            tell=lambda words: click.echo(f"paddle-recompute: {words}", err=True),
        )
        for query, hits in zip(queries, found, strict=True):
            if as_json:
                results = [hit.to_dict() for hit in hits]
                click.echo(json.dumps({"query": query, "results": results}, ensure_ascii=False))
                continue
            if len(queries) > 1:
                click.echo(query)
            for hit in hits:
                click.echo(f"{hit.rank:>3}  {hit.score:.4f}  {hit.text}")


@main.command()
@click.option("--config", "config_file", required=True, metavar="FILE", help="A YAML file.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Optimizer steps of each training run.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the tables.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
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
        from paddle_recompute.parity import parity as compare_modes

        report = compare_modes(config, steps=steps)
        click.echo(json.dumps(report.to_dict()) if as_json else str(report))
        if report.faults:
            sys.exit(1)


@main.command()
@click.option("--config", "config_file", metavar="FILE", help="A YAML file.")
@click.option("--self-test", "runs_self_test", is_flag=True, help="Test the library instead.")
@click.option("--output", metavar="FILE", help="Where the report goes, as JSON.")
@click.option("--device", default=None, help="With --self-test: gpu, cpu, ...")
@click.option("--parity", "compares_modes", is_flag=True, help="Also as the command parity does.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def doctor(
    config_file: str | None,
    runs_self_test: bool,
    output: str | None,
    device: str | None,
    compares_modes: bool,
    debug: bool,
    overrides: tuple[str, ...],
) -> None:
    """Compare the wrapped model with the plain one on one batch, before training.

    For example: paddle-recompute doctor --config run.yaml

    Names the first sublayer that differs. Exits with code 1 if a fault is found. --self-test runs
    the library's contract on this device and writes paddle_recompute_self_test.json.
    """
    if is_launched():
        from paddle_recompute.doctor import examine

        prepare_rank()
        assert config_file is not None
        examine(load_config(config_file, overrides), say=click.echo)
        return
    with errors_in_one_paragraph(debug):
        if runs_self_test:
            _prepare_one_process()
            from paddle_recompute.doctor import write_self_test

            file = Path(output or "paddle_recompute_self_test.json")
            if not write_self_test(file, device=device, say=click.echo):
                sys.exit(1)
            return
        if config_file is None:
            raise ConfigError("doctor needs --config FILE, or --self-test")
        config = load_config(config_file, overrides)
        if is_rank() or config.world_size == 1:
            from paddle_recompute.doctor import examine

            report = examine(config, say=click.echo)
        else:
            again = ["-m", "paddle_recompute.cli", "doctor", "--config", config_file, *overrides]
            launch(config, again)
            report = read_json(config.train.output_dir / "doctor.json")
        if output:
            Path(output).write_text(json.dumps(report), encoding="utf-8")
        if compares_modes:
            require_paddle_and_devices(config)
            from paddle_recompute import parity as modes

            compared = modes.parity(config, steps=2)
            click.echo(str(compared))
            report["ok"] &= not compared.faults
        if not report["ok"]:
            sys.exit(1)


@main.command()
@click.option(
    "--to",
    "naming",
    required=True,
    type=click.Choice(["paddle_recompute", "paddlenlp", "huggingface"]),
    help="Whose names the new file has.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.argument("source")
@click.argument("target")
def convert(naming: Any, debug: bool, source: str, target: str) -> None:
    """Write the weights in SOURCE to TARGET under other names (.pdparams or .safetensors).

    For example: paddle-recompute convert --to huggingface model.pdparams model.safetensors

    SOURCE holds an encoder of this library, PaddleNLP's Ernie or Bert, or Hugging Face's BERT.
    model.init_from reads all of these as they are.
    """
    with errors_in_one_paragraph(debug, "interrupted"):
        _prepare_one_process()
        from paddle_recompute.models import convert_weights

        count = convert_weights(source, target, to=naming)
        click.echo(f"{count} arrays with the names of {naming}: {target}")


def _show_memory(
    config_file: str,
    memory_budget: str | None,
    changes: str,
    output: str | None,
    debug: bool,
    overrides: tuple[str, ...],
    *,
    needs_budget: bool,
) -> None:
    with errors_in_one_paragraph(debug, "interrupted"):
        _prepare_one_process()
        from paddle_recompute.planner import budget_of_card
        from paddle_recompute.trainer import memory_report, what_if

        config = load_config(config_file, [*overrides, *what_if(changes)])
        budget = config.recompute.memory_budget
        if memory_budget is not None:
            is_size = memory_budget.strip()[:1].isdigit()
            budget = byte_count(memory_budget) if is_size else budget_of_card(memory_budget)
        if needs_budget and budget is None:
            raise ConfigError(
                "plan needs a budget: give --memory-budget 8GiB, or set recompute.memory_budget"
            )
        folder = Path(output) if output is not None else None
        with tqdm(unit="call", desc="measure", disable=None) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.n = done
                bar.refresh()

            report = memory_report(config, budget=budget, folder=folder, progress=show)
        click.echo(report.text)
        for path in report.files:
            click.echo(f"written: {path}")


def _prepare_one_process() -> None:
    """Prepare a command that starts no ranks, before the first import of Paddle."""
    require_paddle()
    os.environ.update(speed_settings(1, os.environ))
    # Paddle's remarks at import (ccache, OMP_NUM_THREADS) have nothing to do with the command.
    with redirect_stderr(io.StringIO()):
        import paddle  # noqa: F401


def _train_here(config: Config) -> str | None:
    """Train in this process; on rank 0, returns the record as one line of JSON."""
    chosen = speed_settings(config.launch.num_ranks, os.environ, device=config.launch.device)
    os.environ.update(chosen)
    if is_rank():
        require_paddle()
    else:
        require_paddle_and_devices(config)
        click.echo(start_line(config, chosen))
    from paddle_recompute.trainer import Trainer

    record = Trainer(config).run()
    is_first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    return json.dumps(record) if is_first else None


def _record_of(config: Config) -> str:
    """What rank 0 of a run has written."""
    result = config.train.output_dir / "result.json"
    try:
        return json.dumps(read_json(result))
    except (OSError, ValueError) as error:
        raise LaunchError(f"{result}: cannot read the record of rank 0 ({error})") from error


if __name__ == "__main__":
    main()
