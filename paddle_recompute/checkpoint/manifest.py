"""The manifest of a checkpoint: size and SHA-256 of each file, so that damage is noticed.

``manifest.json`` is written last, after all other files are flushed to the disk. So a folder with a
manifest is complete, whatever its name.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from paddle_recompute._files import read_json, written_whole
from paddle_recompute._run_folder import MANIFEST
from paddle_recompute.errors import CheckpointError

_VERSION = 1
_AT_ONCE = 1 << 20  # bytes


def write_manifest(folder: Path) -> None:
    """Write ``manifest.json`` with an entry for each file of `folder`, and flush it to the disk.

    Raises:
        OSError: The file cannot be written.
    """
    files = {
        path.name: {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    with written_whole(folder / MANIFEST, alone=True) as unfinished:
        unfinished.write_text(json.dumps({"version": _VERSION, "files": files}, indent=2))


def check_manifest(folder: Path) -> str:
    """Compare every file of `folder` with ``manifest.json``. Reads all bytes.

    Returns:
        The SHA-256 of the entries. Folders with the same files have the same value.

    Raises:
        CheckpointError: A file or the manifest is missing or damaged. The message names it.
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
        raise CheckpointError(f"{folder / MANIFEST}: lists {name!r}, which is no file name")
    try:
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(f"{file}: is damaged ({found} bytes; {MANIFEST} says {size})")
        if _sha256(file) != digest:
            raise CheckpointError(f"{file}: is damaged (its SHA-256 is not the one in {MANIFEST})")
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
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
