"""The list of a checkpoint's files with size and SHA-256: what is damaged is noticed.

``manifest.json`` is written last, when every other file has reached the disk. So a folder that has
one is complete, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from paddle_recompute._json_files import read_json
from paddle_recompute.errors import CheckpointError

MANIFEST = "manifest.json"
_VERSION = 1
_AT_ONCE = 1 << 20


def write_manifest(folder: Path) -> None:
    """List every file of `folder` in its ``manifest.json``, and bring that to the disk.

    Raises:
        OSError: It cannot be written.
    """
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    unfinished = folder / f".{MANIFEST}"
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump({"version": _VERSION, "files": files}, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    unfinished.chmod(0o644)
    unfinished.rename(folder / MANIFEST)


def check_manifest(folder: Path) -> str:
    """Compare every file of `folder` with its ``manifest.json``. Reads all bytes.

    Returns:
        The SHA-256 of the list: two folders with the same one hold the same.

    Raises:
        CheckpointError: A file is missing or damaged, or the list itself is. Names the file.
    """
    path = folder / MANIFEST
    try:
        listed = read_json(path)
        if listed["version"] != _VERSION:
            raise CheckpointError(
                f"{path}: has the version {listed['version']!r}, and this library reads {_VERSION}"
            )
        files = {
            str(name): (int(entry["size"]), str(entry["sha256"]))
            for name, entry in listed["files"].items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: is damaged ({_reason(error)})") from error
    for name, (size, digest) in files.items():
        _compare(folder, name, size, digest)
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _compare(folder: Path, name: str, size: int, digest: str) -> None:
    file = folder / name
    if Path(name).name != name:
        raise CheckpointError(f"{folder / MANIFEST}: names a file of another folder, {name!r}")
    try:
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(f"{file}: is damaged ({found} bytes, and {MANIFEST} says {size})")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file}: is damaged (its SHA-256 is not that of {MANIFEST})")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: is missing, and {MANIFEST} lists it") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error})") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while some := file.read(_AT_ONCE):
            digest.update(some)
    return digest.hexdigest()


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
