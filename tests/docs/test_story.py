"""The tutorials for encoders: all their commands, from pairs to a second round with hard negatives,
and from a pretrained folder to a better one.
"""

from __future__ import annotations

import random
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from paddle_recompute.app import cli
from tests.app.retrieval.pretrained import add_modules, make_folder
from tests.app.trainer.trained_run import texts
from tests.docs.pages import Page
from tests.docs.test_code import merged

TUTORIAL = Page("docs/tutorial_encoders.md")
PAIRS = 400
# Added to the commands that train: the same way with less to compute, in this process.
SMALLER = [
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_layers=1"),
    *("model.num_heads=2", "train.max_steps=4", "contrastive.global_batch=16"),
    "launch.num_ranks=1",
]
SMALLER_CHUNKS = ["contrastive.chunk_tokens=64", "contrastive.tile=4"]


def write_pairs(file: Path) -> None:
    draw = random.Random(0)
    words = [f"word{number}" for number in range(200)]
    lines = [
        f"{one} of {other}\tthe {other} that is {one} and number {number}"
        for number, (one, other) in enumerate(draw.choices(words, k=2) for _ in range(PAIRS))
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(line: str, changes: list[str]) -> str:
    """What a line of the tutorial prints; `changes` are added to the commands that train."""
    program, *arguments = shlex.split(line)
    if program != "paddle-recompute":
        return subprocess.run(["sh", "-e", "-c", line], check=True, text=True).stdout or ""
    more = changes if arguments[0] in ("train", "doctor") else []
    result = CliRunner().invoke(cli.main, [*arguments, *more])
    assert result.exit_code == 0, f"{line}\n{result.output[-3000:]}\n{result.exception!r}"
    return result.output


@pytest.mark.timeout(300)
def test_the_story_goes_from_pairs_to_a_second_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PADDLE_RECOMPUTE_CACHE", str(tmp_path / "cache"))
    write_pairs(tmp_path / "pairs.tsv")
    configuration, changes, printed = tmp_path / "run.yaml", SMALLER, ""
    blocks = TUTORIAL.code()
    assert [language for language, _ in blocks] == [
        *("bash", "bash", "yaml", "bash", "bash"),
        "python",
    ]
    for language, code in blocks:
        if language == "bash":
            printed += "".join(run(line, changes) for line in code.splitlines())
        elif language == "yaml":
            before = yaml.safe_load(configuration.read_text(encoding="utf-8"))
            after = yaml.safe_dump(merged(before, yaml.safe_load(code)))
            configuration.write_text(after, encoding="utf-8")
            changes = [*SMALLER, *SMALLER_CHUNKS]
    texts = (tmp_path / "texts.txt").read_text(encoding="utf-8").splitlines()
    found = [line for line in printed.splitlines() if any(text in line for text in texts)]
    assert len(found) >= 3
    negatives = (tmp_path / "mined.jsonl").read_text(encoding="utf-8")
    assert '"negatives": ["' in negatives
    for run_folder in ("run", "second"):
        assert (tmp_path / "outputs" / run_folder / "report.html").exists()
    assert (tmp_path / "comparison.html").exists()


@pytest.mark.timeout(300)
def test_a_pretrained_folder_is_evaluated_trained_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "all-MiniLM-L6-v2")
    add_modules(tmp_path / "all-MiniLM-L6-v2")
    pairs = "".join(f"{one}\t{one} cloud\n" for one in texts(80))
    (tmp_path / "pairs.tsv").write_text(pairs, encoding="utf-8")
    smaller = ["train.max_steps=2", "train.eval_every=1", "launch.num_ranks=1"]
    smaller.append("contrastive.global_batch=8")
    blocks, names = Page("docs/tutorial_pretrained.md").code(), dict[str, object]()
    assert [language for language, _ in blocks] == ["bash", "bash", "bash", "python"]
    for language, code in blocks:
        if language == "bash":
            for line in code.splitlines():
                run(line, smaller)
        else:
            exec(code, names)
    assert getattr(names["vectors"], "shape", None) == (1, 16)
