"""The folder of a run: what a run leaves there, and which run may write. Needs no Paddle.

A run holds a lock of the system (``flock``) on the file ``.lock`` of its folder. The system
releases it when the last process that holds it ends, however it ends, so a kill leaves no lock
behind. The command that starts ranks holds it for all of them, and rank 0 holds it with the
command: if the command is killed, the folder is in use until that rank has saved its step and
ended.

On a disk of the network the lock is valid between machines with NFS 4, and with NFS 3 or Lustre if
they are mounted with locks; with ``nolock``, ``local_lock`` or ``localflock`` it is valid on one
machine only. On a disk without locks a run says so and goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from paddle_recompute.errors import ConfigError

CHECKPOINTS, BEST, METRICS, RECORD = "checkpoint", "best", "metrics.jsonl", "result.json"
"""Names in the folder. The record is that of a finished run."""
EVENTS, PLAN, REPORT = "events.jsonl", "plan.json", "report.html"
MANIFEST = "manifest.json"
"""A folder of a checkpoint that has it is complete, whatever its name."""
FOLDER = re.compile(r"step-(\d{1,18})")
UNFINISHED = re.compile(r"\.unfinished-step-(\d{1,18})")
"""Folders that a run leaves if it is killed during a save."""
PATIENCE = 2.0
"""Seconds for a process that was killed to be gone."""
_HELD = "PADDLE_RECOMPUTE_LOCK"
"""The file whose lock the command holds that started this process."""


@contextlib.contextmanager
def hold(folder: Path, say: Callable[[str], object], *, for_ranks: bool = False) -> Iterator[None]:
    """Inside, no other run writes into `folder`, which is made.

    Args:
        folder: ``train.output_dir``.
        say: Shows the user a sentence.
        for_ranks: Whether ranks that are started inside write there, for this process.

    Raises:
        ConfigError: Another run holds it, or it cannot be made.
    """
    make_folder(folder)
    path = folder.resolve() / ".lock"
    is_rank = os.environ.get(_HELD) == str(path)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(
            f"train.output_dir: {path} cannot be opened to write ({error.strerror}), so it is not "
            "known whether another run is there; allow it, or name another folder"
        ) from error
    try:
        _wait_for(lock, fcntl.LOCK_SH if is_rank else fcntl.LOCK_EX)
        if not is_rank:
            os.ftruncate(lock, 0)
            os.pwrite(lock, json.dumps([os.getpid(), socket.gethostname()]).encode(), 0)
        if for_ranks:
            _wait_for(lock, fcntl.LOCK_SH)
            os.environ[_HELD] = str(path)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"train.output_dir: {folder} is in use by another run {_holder(path)}; wait until it "
            "has ended, or name another folder"
        ) from None
    except OSError as error:
        say(
            f"train.output_dir: the disk of {folder} has no locks ({error.strerror}), so two runs "
            "at once are not noticed"
        )
    try:
        yield
    finally:
        if for_ranks:
            os.environ.pop(_HELD, None)
        os.close(lock)


def is_held(folder: Path) -> bool:
    """Whether a run writes into `folder` now; false on a disk without locks."""
    try:
        with (folder / ".lock").open("rb+") as lock:  # for a moment; a run that starts waits
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def make_folder(folder: Path) -> None:
    """Make the folder of a run, and write a page into it to see that one can.

    Raises:
        ConfigError: One cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"train.output_dir: {folder} cannot be made, or written to ({error.strerror}); name a "
            "folder that is writable"
        ) from error


def check_folder(name: str, folder: Path) -> None:
    """Check that `folder` can be made, or written to, without making it.

    Args:
        name: The setting.
        folder: Its value.

    Raises:
        ConfigError: It cannot.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "is not writable" if there.is_dir() else "is a file"
        raise ConfigError(f"{name}: {folder}: {there} {why}; name a folder that is writable")


def check_may_start(folder: Path, *, resume: bool | Literal["auto"], overwrite: bool) -> None:
    """Check that a run that starts in `folder` loses nothing of an earlier one.

    Args:
        folder: ``train.output_dir``, held.
        resume: ``train.resume``; true asks for a checkpoint, which is looked for elsewhere.
        overwrite: ``train.overwrite``.

    Raises:
        ConfigError: It would; the message says what else can be done.
    """
    saved = checkpoints_in(folder / CHECKPOINTS)
    metrics = folder / METRICS
    if overwrite or resume is True or (resume and saved):
        return
    go_on = "go on with it by train.resume=auto, "
    if saved:
        found = f"a run of {saved[0][0]} steps"
    elif (folder / RECORD).exists():
        found, go_on = f"the {RECORD} of a run without its checkpoints", ""
    elif not resume and metrics.exists() and metrics.stat().st_size:
        found = "the metrics of a run that saved no checkpoint"
    else:
        return
    raise ConfigError(
        f"train.output_dir: {folder} holds {found}; {go_on}name another folder, or set "
        "train.overwrite=true to remove it"
    )


def begin_anew(folder: Path, say: Callable[[str], object], *, overwrite: bool) -> None:
    """Call it on one rank where a run that is not resumed writes its first file: removes the
    earlier run with `overwrite`; otherwise puts aside what one without a checkpoint has left.
    """
    if not overwrite:
        metrics, number = folder / METRICS, 1
        if metrics.exists() and metrics.stat().st_size:
            while (kept := folder / f"metrics.before-{number}.jsonl").exists():
                number += 1
            metrics.rename(kept)
            say(f"The metrics of an earlier start, which saved no checkpoint, are kept in {kept}")
            if checkpoints_in(folder / BEST):
                best = (folder / BEST).rename(folder / f"{BEST}.before-{number}")
                say(f"Its best model is kept in {best}")
        return
    written = [
        *(
            path
            for name in (CHECKPOINTS, BEST)
            for _, path in checkpoints_in(folder / name, complete=False)
        ),
        *(path for path in (folder / METRICS, folder / RECORD, folder / EVENTS) if path.exists()),
    ]
    if written:
        say(f"train.overwrite: the run in {folder} is removed")
    for path in written:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoints_in(folder: Path, *, complete: bool = True) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints in `folder`, the newest first.

    Args:
        folder: ``train.output_dir/checkpoint``.
        complete: Whether folders that a killed run has left count only if they are complete.
    """
    found = []
    for path in folder.glob("*") if folder.is_dir() else ():
        if (step := step_of(path.name)) is not None:
            found.append((step, False, path))
        elif (step := step_of(path.name, UNFINISHED)) is not None and (
            not complete or (path / MANIFEST).exists()
        ):
            # It is newer than a folder of the same step, which it was about to replace.
            found.append((step, True, path))
    return [(step, path) for step, _, path in sorted(found, reverse=True)]


def step_of(name: str, pattern: re.Pattern[str] = FOLDER) -> int | None:
    """The step in the name of a checkpoint's folder; None for another name."""
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None


def _wait_for(lock: int, kind: int) -> None:
    """Lock the open file `lock`, or raise BlockingIOError."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def _holder(path: Path) -> str:
    """Who wrote itself into the file: ``(pid 17 on host a)``."""
    try:
        pid, host = json.loads(path.read_text())
    except (OSError, ValueError, TypeError):
        return "(which has not said its pid)"
    return f"(pid {pid} on {host})"
