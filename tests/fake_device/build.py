"""Build the simulated device for the installed Paddle, with g++ alone, once per content.

    python -m tests.fake_device.build

prints the folder to set ``CUSTOM_DEVICE_ROOT`` to.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "plugin"
BUILT = Path(__file__).parents[2] / "build" / "fake_device"
LIBRARY = "libfake_device.so"
FLAGS = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-DPADDLE_WITH_CUSTOM_DEVICE",
    "-DPADDLE_WITH_CUSTOM_KERNEL",
]


def why_it_cannot_be_built() -> str | None:
    """What is missing here, in words; None: nothing."""
    if shutil.which("g++") is None:
        return "there is no g++ to build it with (Debian: apt-get install g++)"
    return None


def paddle_folder() -> Path:
    """Where Paddle is installed; it is not imported, as the device must be there before."""
    found = importlib.util.find_spec("paddle")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def build() -> Path:
    """The folder with the plugin for this Paddle; builds it if its sources have changed."""
    paddle = paddle_folder()
    header = paddle / "include/paddle/phi/backends/device_ext.h"
    core = paddle / "libs/libphi_core.so"
    if not core.exists():  # 2.6
        core = paddle / "base/libpaddle.so"
    flags = [*FLAGS, f"-I{paddle}/include", f"-I{paddle}/include/third_party"]
    if "is_float16_supported" in header.read_text():  # the table of functions of 3.x
        flags.append("-DFAKE_API_3")
    content = hashlib.sha256(repr([flags, str(core), header.read_text()]).encode())
    for path in sorted([*SOURCES.rglob("*.cc"), *SOURCES.rglob("*.h")]):
        content.update(path.read_bytes())
    folder = BUILT / content.hexdigest()[:16]
    if (folder / LIBRARY).exists():
        return folder
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as scratch:
        # Two units: to read the headers of Paddle takes longer than most of the files.
        objects = []
        for part in (SOURCES, SOURCES / "kernels"):
            unit = Path(scratch) / f"{part.name}.cc"
            unit.write_text("".join(f'#include "{one}"\n' for one in sorted(part.glob("*.cc"))))
            objects.append(str(unit.with_suffix(".o")))
            _run(["g++", *flags, "-c", str(unit), "-o", objects[-1]])
        library = Path(scratch) / LIBRARY
        link = ["-shared", "-o", str(library), *objects]
        _run(["g++", *link, "-Wl,--allow-shlib-undefined", str(core), "-pthread", "-lrt"])
        folder.mkdir(exist_ok=True)
        library.replace(folder / LIBRARY)  # whole, or not there: two processes may build at once
    return folder


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(build())
