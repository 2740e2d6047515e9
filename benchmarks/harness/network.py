"""A network of rate-limited links inside one machine: a namespace per rank, joined by a switch.

Each rank's end of a ``veth`` pair lies in a namespace of its own, the other ends in a namespace
that holds a bridge. A token bucket (``tc ... tbf``) at both ends of each pair limits the rate in
both directions, as a cable between two network cards would: full duplex, independent links.

Needs Linux, root and ``ip`` and ``tc`` of iproute2. Namespaces, and with them all that is in them,
are deleted however the program ends; those of a program that was killed with SIGKILL go when this
is used the next time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paddle_recompute.app.launch import signals_as_exit

PREFIX = "gradient-sync-"
BUCKET_SECONDS = 0.002
"""A token bucket may send this much at once: several of the 64 KiB packets that TCP hands down."""
MIN_BUCKET_BYTES = 128 * 1024
QUEUE_MILLISECONDS = 100
CONGESTION_CONTROL = "reno"
"""Built into every kernel. BBR, where it is the default, drains the link every 10 s to measure its
round trip, which would show as noise."""


@dataclass(frozen=True)
class Host:
    """Where a rank runs.

    Attributes:
        address: IP address that the other ranks reach it at.
        namespace: The network namespace; None is the machine's own.
        interface: What gloo should listen on; None leaves the choice to it.
    """

    address: str
    namespace: str | None = None
    interface: str | None = None

    @property
    def command(self) -> list[str]:
        """What to put before a command that shall run here."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []


def loopback(num_hosts: int) -> list[Host]:
    """All ranks on the machine's own network, unlimited."""
    return [Host("127.0.0.1")] * num_hosts


def require_root_and_iproute2() -> None:
    """Exit with what is missing, where namespaces cannot be made."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if not sys.platform.startswith("linux"):
        raise SystemExit("rate-limited networks need Linux: network namespaces and tc")
    if missing:
        raise SystemExit(
            f"{' and '.join(missing)} not found; install iproute2 (Debian: apt-get install "
            "iproute2) and run this again as root"
        )
    if os.geteuid() != 0:
        raise SystemExit("network namespaces need root; run this again as root (sudo make ...)")


@contextlib.contextmanager
def rate_limited(num_hosts: int, mbit_per_second: float) -> Iterator[list[Host]]:
    """`num_hosts` namespaces, each at the end of a link of its own to one switch.

    Args:
        num_hosts: How many, at most 250.
        mbit_per_second: Rate of each link in each direction, in 10^6 bits; headers count.
    """
    require_root_and_iproute2()
    _delete_leftovers()
    name = f"{PREFIX}{os.getpid()}-"
    switch = f"{name}switch"
    hosts = [Host(f"10.77.0.{i + 1}", f"{name}{i}", "wire") for i in range(num_hosts)]
    with signals_as_exit():
        try:
            _run("ip", "netns", "add", switch)
            _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", switch, "link", "set", "bridge", "up")
            for index, host in enumerate(hosts):
                _connect(host, switch, f"port{index}")
            set_rate(hosts, mbit_per_second)
            yield hosts
        finally:
            _delete(name)


def set_rate(hosts: Sequence[Host], mbit_per_second: float) -> None:
    """Give the links of `rate_limited` another rate; a rank may call it while nothing is sent."""
    bucket = max(MIN_BUCKET_BYTES, int(mbit_per_second * 1e6 / 8 * BUCKET_SECONDS))
    limit = ["tbf", "rate", f"{mbit_per_second}mbit", "burst", str(bucket)]
    limit += ["latency", f"{QUEUE_MILLISECONDS}ms"]
    for index, host in enumerate(hosts):
        assert host.namespace is not None
        switch = host.namespace.removesuffix(str(index)) + "switch"
        for namespace, device in ((host.namespace, "wire"), (switch, f"port{index}")):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *limit)


def _connect(host: Host, switch: str, port: str) -> None:
    assert host.namespace is not None
    here = ["ip", "-n", host.namespace]
    _run("ip", "netns", "add", host.namespace)
    _run(*here, "link", "set", "lo", "up")
    _run(
        *here, "link", "add", "name", "wire", "type", "veth", "peer", "name", port, "netns", switch
    )
    _run(*here, "addr", "add", f"{host.address}/24", "dev", "wire")
    _run(*here, "link", "set", "wire", "up")
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge")
    _run("ip", "-n", switch, "link", "set", port, "up")
    setting = "net.ipv4.tcp_congestion_control"
    write = f"echo {CONGESTION_CONTROL} > /proc/sys/{setting.replace('.', '/')}"
    _run("ip", "netns", "exec", host.namespace, "sh", "-c", write)


def _delete(prefix: str) -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for line in listed.splitlines():
        if line.startswith(prefix):
            subprocess.run(["ip", "netns", "delete", line.split()[0]], check=False)


def _delete_leftovers() -> None:
    """Those of programs that have ended without deleting them."""
    for path in Path("/run/netns").glob(f"{PREFIX}*"):
        process = path.name.removeprefix(PREFIX).partition("-")[0]
        if not Path(f"/proc/{process}").exists():
            _delete(f"{PREFIX}{process}-")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(
            f"'{' '.join(command)}' failed: {done.stderr.strip()}; rate-limited networks need root "
            "and the kernel's veth, bridge and tbf"
        )
