"""Give an environment that has the wheel alone what it requires, from .venv and not the network.

Usage: .venv/bin/python tests/wheel_environment.py ENVIRONMENT REQUIREMENT...

Links the files of every distribution that a requirement names, directly or by what that one
requires. What the wheel forgets to require is not there.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement


def needed(requirements: list[str], target: Path) -> list[Distribution]:
    """What `requirements` name that is not in `target`, and what it requires in its turn."""
    there = {one.name: one for one in distributions(path=[str(target)])}
    found: dict[str, Distribution] = {}
    seen, waiting = set(), [(text, "") for text in requirements]
    while waiting:
        text, extra = waiting.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        one = there.get(requirement.name) or distribution(requirement.name)
        for extra in {"", *requirement.extras}:
            if (requirement.name, extra) not in seen:
                seen.add((requirement.name, extra))
                waiting += [(text, extra) for text in one.requires or ()]
        if requirement.name not in there:
            found[requirement.name] = one
    return [*found.values()]


def main(environment: Path, requirements: list[str]) -> None:
    (target,) = environment.glob("lib/python*/site-packages")
    for one in needed(requirements, target):
        for file in one.files or ():
            path = target / file
            if ".." not in file.parts and not path.exists():  # commands are outside
                path.parent.mkdir(parents=True, exist_ok=True)
                os.link(one.locate_file(file), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
