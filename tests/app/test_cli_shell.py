"""The command in a shell: what ``--help`` shows, what Tab completes, when there are colours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from paddle_recompute.app.cli import main
from paddle_recompute.app.launch import styled
from paddle_recompute.app.launch._rank_process import ON_TERMINAL
from tests.app.commands import command


def commands(one: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in one.commands.items() if isinstance(one, click.Group) else ():
        yield from commands(inner, (*path, name))


@pytest.mark.parametrize("path", [*commands(main)], ids=" ".join)
def test_every_help_has_an_example_of_its_command(path: tuple[str, ...]) -> None:
    shown = command(*path, "--help")
    assert "For example: " + " ".join(("paddle-recompute", *path)) in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("words", "completion"),
    [
        ("trai", ("train", "plain")),
        ("config va", ("validate", "plain")),
        ("train --config run.yaml train.max_s", ("train.max_steps=", "plain")),
        ("train --config ru", ("ru", "file")),
        ("report outputs/", ("outputs/", "file")),
        ("plan --j", ("--json", "plain")),
    ],
)
def test_the_shell_completes_words_and_files(
    words: str, completion: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Click writes the functions of the shells; all of them ask this."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    *before, begun = words.split()
    found = ShellComplete(main, {}, "paddle-recompute", "_").get_completions(before, begun)
    assert [(one.value, one.type) for one in found] == [completion]


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styled("Training", bold=True) == "Training"
    monkeypatch.setenv(ON_TERMINAL, "1")  # a rank of a launcher on a terminal
    assert styled("Training", bold=True) == "\x1b[1mTraining\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("Training", bold=True) == "Training"
