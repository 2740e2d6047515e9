"""Start the ranks of a run on this machine, show what rank 0 says, explain a failure.

Each rank is a process with the ``PADDLE_*`` variables that Paddle's launcher would give it, and a
log of its own. The first that fails ends the others.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

import click

from paddle_recompute._installed import require_paddle
from paddle_recompute.app.config import Config
from paddle_recompute.app.launch._rank_process import (
    ON_TERMINAL,
    STARTED,
    die_with_parent,
)
from paddle_recompute.app.launch._rank_settings import quiet_settings, speed_settings
from paddle_recompute.errors import LaunchError, StoppedError

_POLL_SECONDS = 0.1
_PATIENCE = 5.0
"""Seconds for the other ranks to end after one has failed, and again after they were asked to."""
_SAVE_SECONDS = 600.0
"""For the step that runs and the checkpoint that is written after a signal."""
_TAIL_LINES = 30
_STOPPED = [128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)]
NAME = "paddle-recompute"
"""Begins the paragraph with which a command, on ranks too, tells an error of this library."""
OF_LIBRARY = REFUSED, AGAIN = 2, 3
"""Exit codes of a rank after an error of this library: another start would end alike, or may go
well (then another rank may be the cause).
"""


class RankFailedError(LaunchError):
    """A rank ended with an error; says how, and the last lines of its log.

    Attributes:
        code: The exit code of the rank; negative: the signal that ended it.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def is_rank() -> bool:
    """Whether this process is a rank: Paddle's launcher, whoever called it, has set its number."""
    return "PADDLE_TRAINER_ID" in os.environ


def start_line(config: Config, chosen: Mapping[str, str]) -> str:
    """What is started and which variables were chosen for it, in one line."""
    ranks = config.launch.num_ranks
    what = f"starting {ranks} {'rank' if ranks == 1 else 'ranks'} on {config.launch.device}"
    return ", ".join([what, *(f"{name}={value}" for name, value in chosen.items())])


def launch(config: Config, command: Sequence[str]) -> None:
    """Run ``python COMMAND`` on ``config.launch.num_ranks`` ranks of this machine, to their end.

    What rank 0 writes appears on standard output while it runs. SIGTERM, SIGHUP and Ctrl-C go to
    the ranks, which finish their step, save it and end; a second one ends them at once.

    Args:
        config: Says how many ranks, on which device, and where the logs go.
        command: Arguments for the Python interpreter.

    Raises:
        DependencyError: There is no Paddle, or it is too old.
        StoppedError: A rank got a signal; all have saved their step and ended.
        RankFailedError: A rank ended with another code than 0.
        LaunchError: The ranks cannot be started here.
    """
    require_paddle_and_devices(config)
    _require_one_machine(config)
    log_dir = config.train.output_dir.absolute() / "logs"
    _remove_old_logs(log_dir)
    environment, chosen = _environment(config)
    print(f"{start_line(config, chosen)}, logs in {log_dir}", flush=True)
    ranks: list[subprocess.Popen[bytes]] = []
    logs = [log_dir / f"workerlog.{rank}" for rank in range(config.launch.num_ranks)]
    with signals_as_exit(), logs[0].open("w+b") as said:
        try:
            for log, own in zip(logs, _environments(config, environment), strict=True):
                ranks.append(_start(command, own, log))
            first = _run(ranks, said)
            codes = [rank.poll() or 0 for rank in ranks]  # those that `_end` ends have none yet
        finally:
            _end(ranks, said)
    if first is not None:
        raise _failure(logs, codes, first, is_long="--debug" in command)


def require_paddle_and_devices(config: Config) -> None:
    """Check that this machine has what ``config.launch`` asks for.

    Raises:
        DependencyError: There is no Paddle, or it is too old.
        LaunchError: More ranks than GPUs.
    """
    require_paddle()
    if config.launch.device == "cpu":
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No ccache found")  # of Paddle 3, at its import
        import paddle

    wanted = config.launch.num_ranks
    found = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if found < wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        raise LaunchError(
            f"launch.num_ranks: {wanted} asks for as many GPUs on this machine (launch.device: "
            f"gpu), and Paddle finds {found} (CUDA_VISIBLE_DEVICES: {visible}); install "
            "paddlepaddle-gpu where Paddle is the one for CPU, lower launch.num_ranks "
            "(contrastive.global_batch is divided among the ranks), or run it on the CPU: "
            f"launch.device=cpu launch.num_nodes=1 launch.num_ranks={min(wanted, 2)}"
        )


def _require_one_machine(config: Config) -> None:
    nodes, ranks = config.launch.num_nodes, config.launch.num_ranks
    if nodes > 1:
        raise LaunchError(
            f"the configuration asks for {nodes} machines (launch.num_nodes); run on every machine "
            f"fleetrun --master HOST:PORT --nnodes {nodes} --rank N --nproc_per_node {ranks} "
            "paddle-recompute train --config FILE, with the address of the first machine and a "
            f"free port there, and N from 0 to {nodes - 1}; launch.num_nodes=1 trains on this one"
        )


def _environment(config: Config) -> tuple[dict[str, str], dict[str, str]]:
    """The variables of all ranks, and those among them that were chosen here for speed."""
    environment = dict(os.environ)
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # Paddle would prefer them to PADDLE_MASTER
        environment.pop(name, None)
    chosen = speed_settings(config.launch.num_ranks, environment, device=config.launch.device)
    environment |= chosen | quiet_settings(environment) | {STARTED: str(time.time())}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        environment |= {"COLUMNS": str(size.columns), "LINES": str(size.lines), ON_TERMINAL: "1"}
    return environment, chosen


def _environments(config: Config, common: dict[str, str]) -> Iterator[dict[str, str]]:
    """The variables of each rank: `common`, and those that Paddle's launcher (2.6, 3.x) sets."""
    with ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(config.launch.num_ranks + 1)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        master, *endpoints = [f"127.0.0.1:{opened.getsockname()[1]}" for opened in sockets]
    is_on_cpu = config.launch.device == "cpu"
    for rank, endpoint in enumerate(endpoints):
        on_gpu = {"FLAGS_selected_gpus": str(rank)}  # among those that are visible
        yield {
            **common,
            **({"PADDLE_DISTRI_BACKEND": "gloo"} if is_on_cpu else on_gpu),
            "PADDLE_MASTER": master,
            "PADDLE_TRAINER_ID": str(rank),
            "PADDLE_TRAINERS_NUM": str(len(endpoints)),
            "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
            "PADDLE_CURRENT_ENDPOINT": endpoint,
            "PADDLE_RANK_IN_NODE": str(rank),
        }


def _remove_old_logs(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        for path in log_dir.glob("workerlog.*"):
            path.unlink()
    except OSError as error:
        raise LaunchError(
            f"{log_dir}: cannot be written ({error.strerror}); choose another train.output_dir"
        ) from error


def _start(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-u", *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this process alone, which tells the ranks
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )


def _run(ranks: list[subprocess.Popen[bytes]], said: BinaryIO) -> int | None:
    """Wait for the ranks; returns the number of the first that failed."""
    try:
        return _wait(ranks, said)
    except (SystemExit, KeyboardInterrupt) as asked:
        is_by_keyboard = isinstance(asked, KeyboardInterrupt)
        for rank in ranks:
            rank.send_signal(signal.SIGINT if is_by_keyboard else signal.SIGTERM)
        _wait(ranks, said, _SAVE_SECONDS)
        raise


def _wait(
    ranks: list[subprocess.Popen[bytes]], said: BinaryIO, seconds: float = math.inf
) -> int | None:
    """Copy what rank 0 writes until all ranks have ended, or so many seconds are over, or one has
    failed, whose number is returned, and the others had time to end.
    """
    failed = None
    deadline = time.monotonic() + seconds
    while True:
        codes = [rank.poll() for rank in ranks]
        if new := said.read():
            sys.stdout.flush()
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()
        if failed is None and any(codes):
            failed = next(rank for rank, code in enumerate(codes) if code)
            deadline = min(deadline, time.monotonic() + _PATIENCE)
        if None not in codes or time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_SECONDS)


def _end(ranks: list[subprocess.Popen[bytes]], said: BinaryIO) -> None:
    """End the ranks that still run; those that do not end when asked to are killed."""
    try:
        for rank in ranks:
            rank.terminate()
        _wait(ranks, said, _PATIENCE)
    finally:  # also where the user presses Ctrl-C again
        for rank in ranks:
            rank.kill()
            rank.wait()


@contextmanager
def signals_as_exit() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, so that `finally` blocks run."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failure(
    logs: Sequence[Path], codes: Sequence[int], first: int, *, is_long: bool
) -> RankFailedError | StoppedError:
    """The error of the rank that failed by itself: the `first` to end, unless that followed from
    the end of another one.
    """
    follows = (0, AGAIN, -signal.SIGTERM)
    own = [rank for rank, code in enumerate(codes) if code not in follows]
    failed = first if first in own or not own else own[0]
    code, log = codes[failed], logs[failed]
    if code in _STOPPED:
        return StoppedError(f"rank {failed} was asked to stop, and has saved its step", code)
    if code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", which the system sends where memory runs out"
    else:
        how = f"ended with code {code}"
    if not log.exists():
        return RankFailedError(f"rank {failed} {how}; its output was in {log}, removed since", code)
    text = click.unstyle(log.read_text(encoding="utf-8", errors="replace").rstrip())
    _, begin, paragraph = f"\n{text}".rpartition(f"\n{NAME}: ")
    if code in OF_LIBRARY and begin and not is_long:
        return RankFailedError(paragraph, code)
    full = "" if shutil.disk_usage(log.parent).free else " (the disk is full)"
    tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
    ends = f"which ends with\n{tail}" if tail else "which is empty"
    return RankFailedError(f"rank {failed} {how}; its output is in {log}{full}, {ends}", code)
