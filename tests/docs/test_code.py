"""Every code block of the documentation runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import click
import paddle
import pytest
import yaml
from click.testing import CliRunner

from paddle_recompute import load_config
from paddle_recompute._paddle.memory import can_reset_peak
from paddle_recompute.app import cli
from paddle_recompute.errors import ConfigError
from paddle_recompute.static_graph import check_static
from tests.app.trainer.trained_run import make_run
from tests.docs.pages import ENGLISH, Page, all_blocks
from tests.ranks import ROOT, run_ranks

CONFIGURATION = Page("docs/configuration.md")
BASE = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"


def test_every_block_is_of_a_language_that_is_run() -> None:
    run = ("bash", "console", "diff", "python", "yaml")
    assert sum(len(page.blocks()) for page in ENGLISH) == sum(len(all_blocks(one)) for one in run)


# -------------------------------------------------------------------------------------- Python


@pytest.mark.parametrize(
    ("page", "code"),
    all_blocks("python"),
    ids=[f"{page.path}-{number}" for number, (page, _) in enumerate(all_blocks("python"))],
)
def test_python_runs(
    page: Page, code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    if "outputs/run" in code:
        make_run(tmp_path / "outputs")
        shutil.copytree(tmp_path / "outputs/run/checkpoint", tmp_path / "outputs/run/best")
        monkeypatch.chdir(tmp_path)
    paddle.seed(0)
    if re.search(r"\b(estimate|plan)\(", code) and not can_reset_peak():
        pytest.skip("the planner measures with Paddle 3 only on a CPU, as the pages say")
    if "import paddle.inference" in code:
        pytest.skip("tests/app/retrieval/test_serving.py runs it, in a process of its own")
    if "import paddlenlp" in code:
        pytest.skip("tests/docs/test_trainers.py runs it, in a process of its own")
    try:
        exec(compile(code, page.path, "exec"), {"__name__": "documentation"})
    finally:
        paddle.disable_static()


def sides(diff: str) -> tuple[str, str]:
    """The code before and after."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def is_script(diff: str) -> bool:
    return "init_parallel_env" in diff


def run_scripts(scripts: list[str]) -> list[str]:
    """What each prints on this rank."""
    outputs = []
    for script in scripts:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(script, "documentation", "exec"), {"__name__": "__main__"})
        outputs.append(output.getvalue())
    return outputs


def test_the_changed_scripts_have_the_losses_of_the_unchanged_ones() -> None:
    """On two ranks, with dropout: bit-equal as far as nine digits tell."""
    pairs = [sides(code) for _, code in all_blocks("diff") if is_script(code)]
    assert len(pairs) == 2
    without_sync = [after.replace("with sync.last_backward():", "if True:") for _, after in pairs]
    assert all(one != after for one, (_, after) in zip(without_sync, pairs, strict=True))
    scripts = [*(side for pair in pairs for side in pair), *without_sync]
    for printed in run_ranks(run_scripts, num_ranks=2, scripts=scripts):
        losses = [re.findall(r"loss (\S+)", output) for output in printed]
        assert [len(one) for one in losses] == [3] * len(scripts)
        before, after, plain = losses[0:4:2], losses[1:4:2], losses[4:]
        assert after == before
        assert plain == before
        assert any("recompute: 4 parts" in output for output in printed)


def test_the_other_changes_print_the_same_before_and_after() -> None:
    diffs = [code for _, code in all_blocks("diff") if not is_script(code)]
    assert diffs
    for diff in diffs:
        before, after = run_scripts([*sides(diff)])
        assert after == before


# -------------------------------------------------------------------------------------- YAML


def merged(below: Any, above: Any) -> Any:
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    return {**below, **{key: merged(below.get(key), value) for key, value in above.items()}}


@pytest.mark.parametrize(
    ("page", "fragment"),
    [(page, code) for page, code in all_blocks("yaml") if "model:" not in code],
    ids=lambda one: one.path if isinstance(one, Page) else "",
)
def test_a_part_of_a_configuration_fits_into_a_whole_one(
    page: Page, fragment: str, tmp_path: Path
) -> None:
    whole = merged(yaml.safe_load(BASE.read_text(encoding="utf-8")), yaml.safe_load(fragment))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(whole), encoding="utf-8")
    config = load_config(tmp_path / "run.yaml")
    if config.mode == "static":
        check_static(config)


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The complete configuration, as a file in the current folder."""
    (configuration,) = (code for code in CONFIGURATION.blocks("yaml") if "model:" in code)
    (tmp_path / "run.yaml").write_text(configuration, encoding="utf-8")
    (tmp_path / "fleet_configs").symlink_to(ROOT / "fleet_configs")
    monkeypatch.chdir(tmp_path)
    return "run.yaml"


def test_the_configuration_loads_and_its_batch_is_the_product_beside_it(run_yaml: str) -> None:
    config = load_config(run_yaml)
    text = Path(run_yaml).read_text(encoding="utf-8")
    (product,) = re.findall(r"global_batch: \d+ +# (.+)", text)
    ranks, micro_batches, pairs = map(int, re.findall(r"\d+", product))
    assert (config.world_size, config.micro_batch) == (ranks, pairs)
    assert ranks * micro_batches * pairs == config.contrastive.global_batch


def test_the_error_is_the_one_that_the_command_gives(run_yaml: str) -> None:
    ((_, shown),) = all_blocks("console")
    command, _, message = shown.partition("\n")
    arguments = command.removeprefix("$ paddle-recompute ").split()
    result = CliRunner().invoke(cli.main, arguments)
    assert (result.exit_code, result.stderr) == (2, message)


def test_what_is_called_refused_is_refused(run_yaml: str) -> None:
    settings = re.findall(r"`([\w.]+=\w+)`", Page("docs/limits.md").text)
    assert len(settings) >= 8
    for setting in settings:
        path = setting.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"1 fault:\n  - {re.escape(path)} "):
            load_config(run_yaml, [setting])


# -------------------------------------------------------------------------------------- commands

COMMANDS = sorted(
    {
        line.partition("  #")[0].rstrip()
        for _, code in all_blocks("bash")
        for line in code.splitlines()
        if line and not line.startswith("#")
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_accepted(line: str, run_yaml: str) -> None:
    """Their options, their files, and the settings that they change."""
    program, *arguments = shlex.split(line)
    if program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{arguments[0]}:", makefile, re.MULTILINE)
        return
    if program == "cut":
        assert line == "cut -f 2 pairs.tsv > texts.txt"  # test_story.py runs it
        return
    if program == "source":
        assert arguments == [".venv/bin/activate"]  # of the environment that make has made
        return
    if program == "fleetrun":
        while arguments[0] in ("--master", "--nnodes", "--rank", "--nproc_per_node"):
            arguments = arguments[2:]
        program, *arguments = arguments
    if program.endswith(".py"):
        assert (ROOT / program).exists()
        load_config(arguments[0], arguments[1:])
        return
    assert program == "paddle-recompute"
    command: click.Command = cli.main
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    context = command.make_context(command.name, arguments)
    if "config_file" in context.params:
        load_config(context.params["config_file"], context.params["overrides"])
