"""Start the ranks of a run with Paddle's own launcher, show what rank 0 says, explain a failure.

The ranks are started, watched and ended by ``python -m paddle.distributed.launch`` (``fleetrun``).
This module gives it the right arguments and environment, keeps its remarks in a file, copies the
output of rank 0 to the terminal as it is written, and, where a rank fails, finds out which was
the first and what it has to say.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from paddle_recompute._installed import require_paddle
from paddle_recompute.app.config import Config
from paddle_recompute.app.launch._rank_process import (
    LOG_DIR,
    ON_TERMINAL,
    RankError,
    die_with_parent,
    read_errors,
    signal_ranks,
)
from paddle_recompute.app.launch._rank_settings import quiet_settings, speed_settings
from paddle_recompute.errors import LaunchError, StoppedError

_POLL_SECONDS = 0.1
_STOP_SECONDS = 20.0  # the launcher gives the ranks a few seconds to end before it kills them
_SAVE_SECONDS = 600.0
"""For the step that runs and the checkpoint that is written after a signal."""
_TAIL_LINES = 30
_FAILED_RANK = re.compile(r"^Container rank (\d+) status failed .* code (-?\d+) log ", re.MULTILINE)

# The launcher takes these variables over its own arguments, which are given here.
_LAUNCHER_VARIABLES = ("PADDLE_LOG_DIR", "PADDLE_LOG_OVERWRITE", "PADDLE_NPROC_PER_NODE")
_CLUSTER_VARIABLES = ("PADDLE_MASTER", "PADDLE_NNODES", "PADDLE_RANK", "PADDLE_DEVICES")


class RankFailedError(LaunchError):
    """A rank ended with an error that is none of the library's own; says where to read on."""


class RankRefusedError(LaunchError):
    """A rank ended with one of the library's own errors; this one says the same.

    Attributes:
        traceback: The rank's, as Python prints it.
        kind: The name of the class of the rank's error.
    """

    def __init__(self, error: RankError) -> None:
        super().__init__(error.message)
        self.traceback = error.traceback
        self.kind = error.kind


def is_rank() -> bool:
    """Whether this process is a rank: Paddle's launcher, whoever called it, has set its number."""
    return "PADDLE_TRAINER_ID" in os.environ


def start_line(config: Config, chosen: Mapping[str, str]) -> str:
    """What is started and which variables were chosen for it, in one line."""
    ranks = config.launch.num_ranks
    what = f"{ranks} {'rank' if ranks == 1 else 'ranks'} on {config.launch.device}"
    return ", ".join([what, *(f"{name}={value}" for name, value in chosen.items())])


def log_folder(config: Config, node_rank: int = 0) -> Path:
    """Where the ranks' logs go; each machine has a folder of its own, as disks may be shared."""
    folder = config.train.output_dir.absolute() / "logs"
    return folder if config.launch.num_nodes == 1 else folder / f"node{node_rank}"


def launch(
    config: Config, command: Sequence[str], *, master: str | None = None, node_rank: int = 0
) -> None:
    """Run ``python COMMAND`` on ``config.launch.num_ranks`` ranks of this machine, to their end.

    What rank 0 of the machine writes appears on standard output while it runs. SIGTERM, SIGHUP and
    Ctrl-C go to the ranks, which finish their step, save it and end; a second one ends them at
    once.

    Args:
        config: Says how many ranks, on which device, and where the logs go.
        command: Arguments for the Python interpreter; each rank calls
            `paddle_recompute.app.launch._rank_process.prepare_rank` first.
        master: ``"host:port"`` of the first machine; needed with several, the same on all.
        node_rank: Number of this machine, from 0; the one with the address `master` is 0.

    Raises:
        DependencyError: There is no Paddle, or it is too old.
        StoppedError: A rank got a signal; all have saved their step and ended.
        RankRefusedError: A rank ended with one of the library's own errors.
        RankFailedError: A rank ended otherwise; the message holds the end of its traceback.
        LaunchError: The ranks cannot be started here.
    """
    require_paddle_and_devices(config)
    _check_machines(config, master, node_rank)
    log_dir = log_folder(config, node_rank)
    _remove_old_logs(log_dir)
    environment, chosen = _environment(config, log_dir)
    ranks = config.launch.num_ranks
    print(f"{start_line(config, chosen)}, logs in {log_dir}", flush=True)
    arguments = ["--nproc_per_node", str(ranks), "--log_dir", str(log_dir)]
    arguments += ["--log_overwrite", "True", "--enable_gpu_log", "False"]
    if master is not None:
        nodes = config.launch.num_nodes
        arguments += ["--master", master, "--nnodes", str(nodes), "--rank", str(node_rank)]
    # A training script that does not end in .py is run as a program: here Python itself, so that
    # a command can be "-m module". Not with --backend gloo: that is for Paddle's older launcher.
    launcher = [sys.executable, "-m", "paddle.distributed.launch", *arguments]
    code = _run([*launcher, sys.executable, "-u", *command], environment, log_dir)
    if code:
        raise _failure(log_dir, ranks, code)


def require_paddle_and_devices(config: Config) -> None:
    """Check that this machine has what ``config.launch`` asks for.

    Raises:
        DependencyError: There is no Paddle, or it is too old.
        LaunchError: More ranks than GPUs.
    """
    require_paddle()
    if config.launch.device == "cpu":
        return
    import paddle

    wanted = config.launch.num_ranks
    asked = (
        f"the configuration asks for {wanted} {'GPU' if wanted == 1 else 'GPUs'} on this machine "
        f"(launch.device: gpu, launch.num_ranks: {wanted})"
    )
    one_node = " launch.num_nodes=1" if config.launch.num_nodes > 1 else ""
    instead = f"launch.device=cpu launch.num_ranks=2{one_node} runs it on the CPU"
    if not paddle.is_compiled_with_cuda():
        raise LaunchError(
            f"{asked}, and the Paddle installed here is the one for CPU; install paddlepaddle-gpu "
            f"on a machine with GPUs; {instead}"
        )
    found = paddle.device.cuda.device_count()
    if found < wanted:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise LaunchError(
            f"{asked}, and this machine has {found or 'none'}{shown}; set launch.num_ranks to at "
            f"most the number of GPUs (contrastive.global_batch is divided among the ranks); "
            f"{instead}"
        )


def _check_machines(config: Config, master: str | None, node_rank: int) -> None:
    nodes = config.launch.num_nodes
    if nodes > 1 and master is None:
        raise LaunchError(
            f"the configuration asks for {nodes} machines (launch.num_nodes); run the command on "
            f"every machine with --master HOST:PORT (address of the first machine and a free port "
            f"there) and --rank N, 0 to {nodes - 1}"
        )
    if nodes == 1 and master is not None:
        raise LaunchError(
            "--master is for several machines, and launch.num_nodes is 1; remove it, or set "
            "launch.num_nodes"
        )
    if not 0 <= node_rank < nodes:
        raise LaunchError(
            f"--rank is the number of this machine, 0 to {nodes - 1} with launch.num_nodes: "
            f"{nodes}; received {node_rank}"
        )


def _environment(config: Config, log_dir: Path) -> tuple[dict[str, str], dict[str, str]]:
    """The launcher's variables, and those among them that were chosen here for speed."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (*_LAUNCHER_VARIABLES, *_CLUSTER_VARIABLES)
    }
    chosen = speed_settings(config.launch.num_ranks, environment, device=config.launch.device)
    environment |= chosen | quiet_settings(environment) | {LOG_DIR: str(log_dir)}
    if sys.stdout.isatty():
        size = shutil.get_terminal_size()
        environment |= {"COLUMNS": str(size.columns), "LINES": str(size.lines), ON_TERMINAL: "1"}
    if config.launch.device == "cpu":
        # On a machine with fewer GPUs than ranks the launcher would look for one for each rank.
        # These need not exist: nothing but the launcher reads them before the rank takes the CPU.
        labels = ",".join(str(rank) for rank in range(config.launch.num_ranks))
        environment |= {"PADDLE_DISTRI_BACKEND": "gloo", "CUDA_VISIBLE_DEVICES": labels}
    return environment, chosen


def _remove_old_logs(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        for pattern in ("workerlog.*", "error.*.json", "pid.*", "launcher.log"):
            for path in log_dir.glob(pattern):
                path.unlink()
    except OSError as error:
        raise LaunchError(
            f"{log_dir}: cannot be written ({error.strerror}); choose another train.output_dir"
        ) from error


def _run(command: list[str], environment: dict[str, str], log_dir: Path) -> int:
    """Run the launcher to its end; returns its exit code."""
    launcher_log = log_dir / "launcher.log"
    with launcher_log.open("wb") as log, _signals_as_exit():
        launcher = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for this process alone, which then ends the launcher in good order.
            start_new_session=True,
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
        try:
            with _copying(log_dir / "workerlog.0") as copy:
                try:
                    _wait(launcher, copy)
                except (SystemExit, KeyboardInterrupt) as asked:
                    is_by_keyboard = isinstance(asked, KeyboardInterrupt)
                    number = signal.SIGINT if is_by_keyboard else signal.SIGTERM
                    if signal_ranks(log_dir, number):
                        _wait(launcher, copy, _SAVE_SECONDS)
                    raise
        finally:
            _stop(launcher)
            _complete_logs(log_dir)
    return launcher.returncode


def _wait(
    launcher: subprocess.Popen[bytes], copy: Callable[[], None], seconds: float = math.inf
) -> None:
    """Copy what rank 0 writes until the launcher has ended, or so many seconds are over."""
    deadline = time.monotonic() + seconds
    while launcher.poll() is None and time.monotonic() < deadline:
        copy()
        time.sleep(_POLL_SECONDS)
    copy()


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """A polite kill, or a terminal that is closed, ends this process by way of `finally`."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _copying(path: Path) -> Iterator[Callable[[], None]]:
    """Gives a function that copies what `path` has gained to standard output."""
    log: BinaryIO | None = None

    def copy() -> None:
        nonlocal log
        if log is None and path.exists():
            log = path.open("rb")
        if log is not None and (new := log.read()):
            sys.stdout.flush()
            sys.stdout.buffer.write(new)
            sys.stdout.buffer.flush()

    try:
        yield copy
    finally:
        if log is not None:
            log.close()


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends the ranks; a rank dies with it where it is killed."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also where the user presses Ctrl-C again
            launcher.kill()
            launcher.wait()


def _complete_logs(log_dir: Path) -> None:
    """Add the tracebacks to the ranks' logs, and remove every copy of the environment.

    The launcher writes all variables, and with them whatever secret is among them, beside logs
    that people attach to bug reports (2.6: into its own output as well).
    """
    for pattern in ("envlog.*", "backup_env.*.json", "default.*.log", "pid.*"):
        for path in log_dir.glob(pattern):
            path.unlink()
    with suppress(OSError):  # the folder is gone, or the disk is full: `_failure` says so
        own = log_dir / "launcher.log"
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith("env {"))
        if len(kept) < own.stat().st_size:
            own.write_text(kept, "utf-8")
        for error in read_errors(log_dir):
            with (log_dir / f"workerlog.{error.rank}").open("a", encoding="utf-8") as log:
                log.write(error.traceback)


def _failure(log_dir: Path, num_ranks: int, code: int) -> LaunchError | StoppedError:
    """The error that tells what went wrong first."""
    errors = read_errors(log_dir)
    if errors and errors[0].exit_code is not None:
        return StoppedError(errors[0].message, errors[0].exit_code)
    if errors and errors[0].is_users:
        return RankRefusedError(errors[0])
    if errors:
        first = errors[0]
        silent = sorted(set(range(num_ranks)) - {error.rank for error in errors})
        log = log_dir / f"workerlog.{first.rank}"
        text = f"rank {first.rank} failed; {_end_of(log)}"
        if silent:
            text += (
                f"\n(rank {', '.join(map(str, silent))} left no traceback: stopped because of "
                f"this, or killed before it, for want of memory perhaps)"
            )
        return RankFailedError(text)
    if (fault := _fault_of_disk(log_dir)) is not None:
        return RankFailedError(f"the ranks failed with code {code}, and {fault}")
    launcher_log = log_dir / "launcher.log"
    said = launcher_log.read_text(encoding="utf-8", errors="replace")
    dead = _FAILED_RANK.search(said)
    if dead is None:
        return RankFailedError(
            f"Paddle's launcher failed with code {code}; {_end_of(launcher_log)}"
        )
    rank, rank_code = int(dead[1]), int(dead[2])
    how = f"ended with code {rank_code}"
    if rank_code < 0:
        how = f"was ended by {signal.Signals(-rank_code).name}"
        if -rank_code == signal.SIGKILL:
            how += ", which the system sends where memory runs out"
    return RankFailedError(f"rank {rank} {how}; {_end_of(log_dir / f'workerlog.{rank}')}")


def _fault_of_disk(log_dir: Path) -> str | None:
    """Why the logs say nothing, if they cannot."""
    try:
        with tempfile.NamedTemporaryFile(dir=log_dir) as file:
            file.write(bytes(1 << 16))
            file.flush()
    except FileNotFoundError:
        return f"{log_dir} is gone: it was removed during the run"
    except OSError as error:
        return f"{log_dir} cannot be written ({error.strerror}): the logs end early; free the disk"
    return None


def _end_of(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").rstrip() if log.exists() else ""
    tail = "\n".join(text.splitlines()[-_TAIL_LINES:])
    return f"its output is in {log}, which " + (f"ends with\n{tail}" if tail else "is empty")
