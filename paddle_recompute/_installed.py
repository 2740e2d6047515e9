"""Are Paddle and the packages of the application installed, and how to get them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_recompute.errors import DependencyError

OLDEST_PADDLE = (2, 6, 2)

_REMEDY = (
    "for a CPU: pip install 'paddlepaddle>=2.6.2,<4'; for a GPU: pip install "
    "'paddlepaddle-gpu>=2.6.2,<4'"
)


def require_paddle() -> None:
    """Check the installed Paddle without importing it, or say what to install.

    Paddle is not imported, because that takes 2 s and changes the environment: the launcher has
    neither time nor use for it.

    Raises:
        DependencyError: There is no Paddle, or it is older than 2.6.2.
    """
    received = _installed_version()
    if received is None:
        raise DependencyError(f"PaddlePaddle is not installed; {_REMEDY}")
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", received)
    # A build of Paddle's development branch calls itself 0.0.0: it is newer than any release.
    if numbers and (0, 0, 0) < tuple(map(int, numbers.groups())) < OLDEST_PADDLE:
        raise DependencyError(f"PaddlePaddle {received} is too old; {_REMEDY}")


@contextmanager
def of_application(name: str) -> Iterator[None]:
    """Inside, a module of the application is imported; without its packages, say how to get them.

    Args:
        name: What was asked for.

    Raises:
        DependencyError: A package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise DependencyError(
            f"{name} belongs to the application, which needs {error.name}; "
            "pip install 'paddle-recompute[train]'"
        ) from error


def _installed_version() -> str | None:
    """``paddle.version.full_version``, read as text; empty where it is not found, None: no Paddle.

    The package metadata does not serve: Paddle is distributed under a name for each device.
    """
    spec = importlib.util.find_spec("paddle")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder) / "version" / "__init__.py"
        if file.exists():
            match = re.search(r"^full_version\s*=\s*'(.+)'", file.read_text("utf-8"), re.MULTILINE)
            return match[1] if match else ""
    return ""
