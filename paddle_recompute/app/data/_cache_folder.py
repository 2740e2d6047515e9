"""Files in the cache folder: a reader finds a complete file or none."""

from __future__ import annotations

from pathlib import Path

from paddle_recompute._files import write_text
from paddle_recompute.errors import DataError


def write_whole(path: Path, text: str) -> None:
    """Write a UTF-8 file under another name, then rename it, which is atomic.

    Raises:
        OutputError: The folder cannot be written to.
    """
    advice = "set data.cache_dir, or the variable PADDLE_RECOMPUTE_CACHE, to a writable folder"
    write_text(path, text, advice)


def require_file(path: Path) -> Path:
    """`path`, which the main rank has written or found.

    Raises:
        DataError: This rank does not see it.
    """
    if not path.exists():
        raise DataError(
            f"{path}: does not exist on this rank, although the main rank has it; all ranks must "
            "read the same data files, and data.cache_dir must be a folder that all nodes share"
        )
    return path
