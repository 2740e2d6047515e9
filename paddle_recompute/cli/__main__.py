"""``python -m paddle_recompute.cli``."""

from __future__ import annotations

from paddle_recompute.cli import main

if __name__ == "__main__":
    main()
