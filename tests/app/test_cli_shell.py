"""The command in a shell: what ``--help`` shows, what Tab completes, when there are colours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from paddle_recompute.app.cli import main
from paddle_recompute.app.launch import styled
from paddle_recompute.app.launch._rank_process import ON_TERMINAL
from tests.app.commands import command
from tests.ranks import ROOT

WORDS = {
    "paddle-recompute trai": "train",
    "paddle-recompute config va": "validate",
    "paddle-recompute train --config run.yaml train.max_s": "train.max_steps=",
}
# Click writes the functions of zsh and fish, too, and they ask the same command.
IN_BASH = (
    "COMP_WORDS=({words}); COMP_CWORD={place}; COMPREPLY=(); "
    "_paddle_recompute_completion paddle-recompute; printf '%s\\n' \"${{COMPREPLY[@]}}\""
)


def commands(one: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in one.commands.items() if isinstance(one, click.Group) else ():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", [*commands(main)], ids=" ".join)
def test_every_help_has_an_example_of_its_command(path: tuple[str, ...]) -> None:
    shown = command(*path, "--help")
    assert "For example: " + " ".join(("paddle-recompute", *path)) in " ".join(shown.output.split())


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """With the command on the PATH, also where the package is not installed."""
    script = tmp_path / "bin" / "paddle-recompute"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\nfrom paddle_recompute.__main__ import main\nmain()\n")
    script.chmod(0o755)
    (tmp_path / "run.yaml").touch()
    return {
        **os.environ,
        "PATH": f"{script.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
    }


def test_bash_completes(environment: dict[str, str], tmp_path: Path) -> None:
    register = 'eval "$(env _PADDLE_RECOMPUTE_COMPLETE=bash_source paddle-recompute)"'
    asked = [IN_BASH.format(words=words, place=len(words.split()) - 1) for words in WORDS]
    command = ["bash", "-c", "\n".join([register, *asked])]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert {*WORDS.values()} <= {*done.stdout.split()}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "completes"),
    [("train --config ru", True), ("report outputs/", True), ("plan --j", False)],
)
def test_the_shell_completes_files(words: str, completes: bool) -> None:
    *before, begun = words.split()
    found = ShellComplete(main, {}, "paddle-recompute", "_").get_completions(before, begun)
    assert [one.type for one in found] == (["file"] if completes else ["plain"])


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styled("Training", bold=True) == "Training"
    monkeypatch.setenv(ON_TERMINAL, "1")  # a rank of a launcher on a terminal
    assert styled("Training", bold=True) == "\x1b[1mTraining\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("Training", bold=True) == "Training"
