"""Copies what a wheel requires from the environment of this interpreter to another one.

`make wheel-install-test` runs it to save the downloads. Afterwards pip says whether the copies meet
the requirements.

Usage: python wheel_requirements.py SITE_PACKAGES WHEEL[EXTRA,...] REQUIREMENT...
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path
from zipfile import Path as ZipPath

from packaging.requirements import Requirement


def required_by(metadata: Distribution, extras: Iterable[str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, metadata.requires or ()):
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def copy(installed: Distribution, site_packages: Path) -> None:
    for file in installed.files or ():
        if ".." not in file.parts:  # scripts name their interpreter
            (site_packages / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(str(file.locate()), site_packages / file)


def main(site_packages: Path, wheel: str, *others: str) -> None:
    path, _, extras = wheel.removesuffix("]").partition("[")
    [info] = [entry for entry in ZipPath(path).iterdir() if entry.name.endswith(".dist-info")]
    pending = [*required_by(PathDistribution(info), extras.split(",")), *map(Requirement, others)]
    seen = set()
    while pending:
        requirement = pending.pop()
        wanted = (requirement.name, frozenset(requirement.extras))
        if wanted not in seen:
            seen.add(wanted)
            installed = distribution(requirement.name)
            copy(installed, site_packages)
            pending += required_by(installed, requirement.extras)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
