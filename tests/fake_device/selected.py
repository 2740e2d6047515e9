"""Whether the tests run on the simulated device; read before Paddle is imported."""

from __future__ import annotations

import os

from tests.fake_device.build import build, why_it_cannot_be_built

VARIABLE = "PADDLE_RECOMPUTE_TEST_DEVICE"
NAME = "fake_device"


def is_selected() -> bool:
    """Whether the tests of this process are to run on the simulated device."""
    wanted = os.environ.get(VARIABLE, "cpu")
    if wanted not in ("cpu", NAME):
        raise ValueError(f"{VARIABLE}={wanted} does not exist; it is cpu or {NAME}")
    return wanted == NAME


def why_not() -> str | None:
    """Why the simulated device, which was selected, cannot be had here; None: it can."""
    reason = why_it_cannot_be_built()
    return None if reason is None else f"no simulated device: {reason}"


def enter() -> None:
    """Make it the device of this process and of its children, which begin with Paddle's import."""
    os.environ["CUSTOM_DEVICE_ROOT"] = str(build())
    os.environ.setdefault("GLOG_minloglevel", "1")  # how the plugin was loaded, in six lines


def rank_settings(rank: int) -> dict[str, str]:
    """The variables with which Paddle makes a rank of the simulated device's collectives."""
    return {
        "PADDLE_DISTRI_BACKEND": "xccl",
        "PADDLE_XCCL_BACKEND": NAME,  # 2.6 asks for it
        f"FLAGS_selected_{NAME}s": str(rank),
    }
