"""Tests that cannot pass on the simulated device, each with the reason.

A key is the node id of a test without its parameters, or a folder or module of tests. Whatever is
not named here has to pass on the simulated device as it does on the CPU.
"""

from __future__ import annotations

KNOWN: dict[str, str] = {}
