"""The two READMEs say the same, and what they say is run."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import paddle
import pytest
from click.testing import CliRunner

import paddle_recompute
from paddle_recompute import cli, load_config
from paddle_recompute.errors import ConfigError
from tests.ranks import ROOT, run_ranks

ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README_cn.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.\d+")


def blocks(language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(ENGLISH) if name == language]


def section(heading: str) -> str:
    """The English text under that second-level heading."""
    found = ENGLISH.partition(f"\n## {heading}\n\n")[2]
    assert found, heading
    return found.partition("\n## ")[0]


def rows_of(text: str) -> list[dict[str, str]]:
    """The first table of `text`, a dict per row."""
    _, start, rest = text.partition("\n|")
    table = (start + rest).partition("\n\n")[0].strip().splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    return [dict(zip(header, row, strict=True)) for row in rows]


def record_of(text: str, name: str) -> str:
    """The record of that name to which `text` links."""
    (path,) = re.findall(rf"\((benchmarks/results/{name}_2\S+\.md)\)", text)
    return (ROOT / path).read_text(encoding="utf-8")


def first_number(cell: str) -> str:
    return cell.split()[0]


def kinds(text: str) -> list[str]:
    """What each line is: a heading of some level, an item, a row, text, code or nothing."""
    found, in_code = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            in_code = not in_code
        mark = re.match(r"#+ |- |  (?=\S)|\||```", line)
        found.append("code" if in_code else mark[0] if mark else "text" if line else "")
    return found


# ------------------------------------------------------------------------- the two languages


def test_both_languages_keep_in_step_line_by_line() -> None:
    assert kinds(CHINESE) == kinds(ENGLISH)
    assert len(ENGLISH.splitlines()) <= 360


def test_both_languages_have_the_same_code_and_numbers() -> None:
    assert BLOCK.findall(CHINESE) == BLOCK.findall(ENGLISH)
    assert len(BLOCK.findall(ENGLISH)) == ENGLISH.count("\n```") / 2
    for english, chinese in zip(ENGLISH.splitlines(), CHINESE.splitlines(), strict=True):
        assert NUMBER.findall(chinese) == NUMBER.findall(english)
        assert sorted(re.findall("`(.+?)`", chinese)) == sorted(re.findall("`(.+?)`", english))


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["en", "cn"])
def test_every_relative_link_leads_somewhere(text: str) -> None:
    links = [link for link in re.findall(r"\]\((.+?)\)", text) if "://" not in link]
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


# ----------------------------------------------------------------------------------- the code


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[1])
def test_python_runs(code: str) -> None:
    paddle.seed(0)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def sides(diff: str) -> tuple[str, str]:
    """The code before and after."""
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def run_scripts(scripts: list[str]) -> list[str]:
    """What each prints on this rank."""
    outputs = []
    for script in scripts:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(script, "README.md", "exec"), {"__name__": "__main__"})
        outputs.append(output.getvalue())
    return outputs


def test_the_changed_script_has_the_losses_of_the_unchanged_one() -> None:
    """On two ranks, with dropout: bit-equal as far as nine digits tell."""
    before, after = sides(blocks("diff")[0])
    without_sync = after.replace("with sync.last_backward():", "if True:")
    assert without_sync != after
    for printed in run_ranks(run_scripts, num_ranks=2, scripts=[before, after, without_sync]):
        plain, *recomputed = (re.findall(r"loss (\S+)", output) for output in printed)
        assert len(plain) == 3
        assert recomputed == [plain, plain]
        assert "recompute: 4 parts" in printed[1]


def test_each_other_change_is_of_imports_that_exist() -> None:
    for diff in blocks("diff")[1:]:
        for side in sides(diff):
            exec(side, {})


# -------------------------------------------------------------------------- the configuration


@pytest.fixture
def run_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The configuration of the README, as a file in the current folder."""
    (configuration,) = blocks("yaml")
    (tmp_path / "run.yaml").write_text(configuration, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return "run.yaml"


def test_the_configuration_loads_and_its_batch_is_the_product_beside_it(run_yaml: str) -> None:
    config = load_config(run_yaml)
    (product,) = re.findall(r"global_batch: \d+ +# (.+)", blocks("yaml")[0])
    ranks, micro_batches, pairs = map(int, re.findall(r"\d+", product))
    assert (config.world_size, config.micro_batch) == (ranks, pairs)
    assert ranks * micro_batches * pairs == config.contrastive.global_batch


def test_the_command_with_overrides_is_accepted(run_yaml: str) -> None:
    (overrides,) = re.findall(r"^`paddle-recompute train --config run.yaml (.+)`", ENGLISH, re.M)
    config = load_config(run_yaml, overrides.split())
    assert (config.train.max_steps, config.recompute.policy) == (50, "every_n")


def test_the_error_is_the_one_that_the_command_gives(run_yaml: str) -> None:
    (shown,) = blocks("console")
    command, _, message = shown.partition("\n")
    arguments = command.removeprefix("$ paddle-recompute ").split()
    result = CliRunner().invoke(cli.main, arguments)
    assert (result.exit_code, result.stderr) == (2, message)


def test_what_is_called_unsupported_is_refused(run_yaml: str) -> None:
    refused = section("Not supported").split("\n\n")[1]
    settings = re.findall(r"`([\w.]+=\w+)`", refused)
    assert len(settings) >= 9
    for setting in settings:
        path = setting.partition("=")[0]
        with pytest.raises(ConfigError, match=rf"1 fault:\n  - {re.escape(path)} "):
            load_config(run_yaml, [setting])


def test_shell_commands_name_files_and_targets_that_exist() -> None:
    shell = "\n".join(blocks("bash"))
    files = re.findall(r"\S+\.(?:yaml|py)\b", shell)
    assert len(files) >= 4
    assert [file for file in files if not (ROOT / file).exists()] == []
    targets = re.findall(r"^make (\w+)", shell, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.M)] == []


# ------------------------------------------------------------------------- names and numbers


def test_the_table_of_names_is_that_of_the_package() -> None:
    rows = re.findall(r"^\| (`.+?) \|", section("Public names"), re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted([*names, "__version__"]) == sorted(paddle_recompute.__all__)


def test_the_ratios_of_recompute_are_those_of_the_record() -> None:
    """Measured anew (make bench-recompute_cost)? Then put the record's ratios here too."""
    text = section("Select what to recompute")
    kept = ("peak / plain", "time / plain")
    shown = [[row[name] for name in kept] for row in rows_of(text)]
    assert shown == [
        [row[name] for name in kept] for row in rows_of(record_of(text, "recompute_cost"))
    ]


def test_the_table_of_large_batches_is_that_of_the_record() -> None:
    """Measured anew (make bench-contrastive)? Then put the record's columns here too."""
    text = section("A batch of any size")
    shown = rows_of(text)
    recorded = rows_of(record_of(text, "contrastive_memory"))
    assert shown == [{name: row[name] for name in shown[0]} for row in recorded]
    timed = {
        row["step"]: first_number(row["time per pair / plain"])
        for row in rows_of(record_of(text, "contrastive_time"))
    }
    (share,) = re.findall(r"takes (\S+) times as long", text)
    assert share == timed["GradCache, chunk_tokens=1024"]


def test_the_times_of_synchronization_are_those_of_the_record() -> None:
    """Measured anew (make bench-sync)? Then put the record's medians here too."""
    text = section("Synchronize gradients")
    record = record_of(text, "sync")
    for rate in ("100", "200", "1000"):
        of_rate = record.partition(f"\n## {rate} Mbit/s\n")[2].partition("\n## ")[0]
        medians = {row["way"]: first_number(row["seconds"]) for row in rows_of(of_rate)}
        for row in rows_of(text):
            assert row[f"{rate} Mbit/s"] == medians[row["way"].replace("`", "")], (rate, row)


def test_the_peaks_of_the_static_graph_are_those_of_the_record() -> None:
    """Measured anew (make bench-static_graph)? Then put the record's peaks and ratio here too."""
    text = section("Static graph")
    recorded = {row["variant"]: row for row in rows_of(record_of(text, "static_graph"))}
    (shown,) = re.findall(r"peaks at (\S+) MB and with it at (\S+) MB \(dygraph: (\S+)\)", text)
    variants = ("static, no recompute", "static, all blocks", "dygraph, all blocks")
    assert list(shown) == [
        f"{int(recorded[name]['peak, bytes'].replace(',', '')) / 1e6:.1f}" for name in variants
    ]
    (ratio,) = re.findall(r"in (\S+) times the time", text)
    (time,) = (name for name in recorded["static, all blocks"] if name.startswith("time / plain"))
    assert ratio == first_number(recorded["static, all blocks"][time])
