"""The commands that a newcomer sees first are those that the check runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.ranks import ROOT

LINES_OF_A_SCREEN = 40


@pytest.mark.parametrize("name", ["README.md", "README_cn.md"])
def test_the_first_screen_names_commands_that_the_check_runs(name: str, tmp_path: Path) -> None:
    screen = (ROOT / name).read_text(encoding="utf-8").splitlines()[:LINES_OF_A_SCREEN]
    named = {line for line in screen if re.fullmatch("make [a-z]+", line)}
    assert named == {"make train", "make test"}
    assert named <= {" ".join(call.split()[:2]) for call in calls_of_the_check(tmp_path)}


def calls_of_the_check(folder: Path) -> list[str]:
    """What ``.ci/run`` gives to make, without running it."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    make = folder / "make"
    make.write_text(f'#!/bin/sh\necho make "$@" >> {folder}/calls\n', encoding="utf-8")
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run([folder / ".ci/run"], env=environment, check=True, capture_output=True)
    return (folder / "calls").read_text(encoding="utf-8").splitlines()
