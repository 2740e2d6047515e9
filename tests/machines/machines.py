"""Two machines inside of one, and Paddle's launcher on both of them.

A machine is a network namespace at the end of a cable (`harness.network`), with a hostname, an
``/etc/hosts`` and a folder of its own: the configuration has relative paths, so nothing is shared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.network import Host, rate_limited
from paddle_recompute.app.launch._rank_process import die_with_parent
from tests.ranks import ROOT

PORT = 6170
MBIT_PER_SECOND = 1000.0
_ENTER = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'


@dataclass(frozen=True)
class Machine:
    """One of them.

    Attributes:
        name: Its hostname.
        host: Where it is in the network.
        folder: Its disk.
    """

    name: str
    host: Host
    folder: Path

    def name_itself(self, address: str) -> None:
        """Let its own hostname lead to `address`."""
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {self.name}\n")

    def start(self, *arguments: object, log: str, **env: str) -> subprocess.Popen[bytes]:
        """Begin ``python *arguments`` here; what it says is appended to the file `log`."""
        enter = [*self.host.command, "unshare", "--uts", "--mount", "sh", "-c", _ENTER]
        with (self.folder / log).open("wb") as output:
            return subprocess.Popen(
                [*enter, self.name, "hosts", sys.executable, *map(str, arguments)],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: die_with_parent(signal.SIGKILL),
            )

    def kill_all(self) -> None:
        """End every process that runs here."""
        listed = ["ip", "netns", "pids", str(self.host.namespace)]
        for pid in subprocess.run(listed, capture_output=True, text=True).stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """What became of the launcher of a machine.

    Attributes:
        code: Exit code.
        said: What the launcher and its rank have written.
        seconds: From the start of the first launcher to the end of this one.
    """

    code: int
    said: str
    seconds: float


@contextlib.contextmanager
def two_machines(folder: Path) -> Iterator[list[Machine]]:
    """They are called ``alpha`` and ``beta``, and each hostname leads to the address of its cable.

    Raises:
        SystemExit: They cannot be made here; says why.
    """
    with rate_limited(2, MBIT_PER_SECOND) as hosts:
        machines = [
            Machine(name, host, folder / name)
            for name, host in zip(("alpha", "beta"), hosts, strict=True)
        ]
        for machine in machines:
            machine.folder.mkdir()
            machine.name_itself(machine.host.address)
        try:
            yield machines
        finally:
            for machine in machines:
                machine.kill_all()


def fleetrun(
    machines: Sequence[Machine],
    *overrides: str,
    of: Sequence[Sequence[str]] = ((), ()),
    options: Sequence[str] = (),
    with_host: bool = False,
    timeout: float = 120.0,
    **env: str,
) -> list[Ended]:
    """``fleetrun ... paddle-recompute train --config run.yaml`` on every machine, one rank each.

    Args:
        machines: The first one is machine 0.
        *overrides: Of the configuration, on all machines.
        of: Of the configuration, for each machine.
        options: Of the launcher.
        with_host: Whether the launcher is told the address of its machine (``--host``).
        timeout: Seconds for all of it; what still runs then is killed.
        **env: Variables.
    """
    began = time.monotonic()
    started = [
        machine.start(
            "-m", "paddle.distributed.launch",
            "--master", f"{machines[0].host.address}:{PORT}", "--nnodes", len(machines),
            "--rank", number, "--nproc_per_node", 1, "--log_dir", "logs", *options,
            *(["--host", machine.host.address] if with_host else []),
            ROOT / "paddle_recompute" / "__main__.py", "train", "--config", "run.yaml",
            f"launch.num_nodes={len(machines)}", "launch.num_ranks=1", *overrides, *own,
            log="said", **env,
        )
        for number, (machine, own) in enumerate(zip(machines, of, strict=True))
    ]  # fmt: skip
    ended: dict[int, float] = {}
    while len(ended) < len(started):
        now = time.monotonic() - began
        if now > timeout:
            for machine in machines:
                machine.kill_all()
        for number, one in enumerate(started):
            if number not in ended and one.poll() is not None:
                ended[number] = now
        time.sleep(0.05)
    return [
        Ended(one.returncode, (machine.folder / "said").read_text(errors="replace"), ended[i])
        for i, (one, machine) in enumerate(zip(started, machines, strict=True))
    ]
