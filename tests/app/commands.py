"""The command in this process, and the code with which it must end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from paddle_recompute.app.cli import main


def command(*arguments: str | Path, code: int = 0) -> Result:
    """What ``paddle-recompute *arguments`` says."""
    done = CliRunner().invoke(main, [str(one) for one in arguments])
    assert done.exit_code == code, done.output
    return done


def assert_refused(arguments: Sequence[str | Path], *words: str, after: str = "") -> None:
    """Code 2; on standard error one paragraph with all of `words`, and nothing on output.

    `after` begins the line that says what the command does; it comes first.
    """
    result = command(*arguments, code=2)
    message = result.stderr
    if after:
        doing, _, message = message.partition("\n")
        assert doing.startswith(after)
    assert message.startswith("paddle-recompute: ")
    for word in words:
        assert word in message
    assert "Traceback" not in message
    assert "\n\n" not in message
    assert not result.stdout.startswith("{")
