"""``python -m paddle_recompute``: the command ``paddle-recompute``, where it is not on the PATH."""

from __future__ import annotations

import sys

from paddle_recompute._installed import of_application
from paddle_recompute.errors import DependencyError


def main() -> None:
    """Run the command."""
    try:
        with of_application("the command paddle-recompute"):
            from paddle_recompute.app.cli import main as command
    except DependencyError as error:
        sys.exit(f"Error: {error}")
    command()


if __name__ == "__main__":
    main()
