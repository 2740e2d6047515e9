"""``config`` and ``init``: where a value comes from, what differs, a configuration that fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result

from paddle_recompute import Config, load_config
from paddle_recompute.app.cli import _init as module
from paddle_recompute.app.cli._init import _Machine, _shipped
from paddle_recompute.app.data import PreparedData, build_loader, prepare_data
from tests.app.commands import command
from tests.ranks import ROOT

TINY = str(ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml")


def write_pairs(file: Path, lines: list[list[str]]) -> str:
    file.write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return str(file)


def trained_with(file: Path) -> tuple[Config, PreparedData]:
    """The configuration, and the data as training reads them; there is a batch."""
    config = load_config(file, [f"data.cache_dir={json.dumps(str(file.parent / 'cache'))}"])
    data = prepare_data(config, 0, lambda: None)
    assert len(build_loader(config, data, 0))
    return config, data


def sources(*arguments: str) -> dict[str, tuple[object, str]]:
    found = json.loads(command("config", "show", "--json", "--config", *arguments).stdout)
    return {one["path"]: (one["value"], one["source"]) for one in found}


def test_show_says_where_each_value_comes_from() -> None:
    # An override of a section replaces its lines: the file gives data.vocab_size.
    overrides = ("train.max_steps=7", "strategy={amp: true}", "data={max_query_tokens: 11}")
    found = sources(TINY, *overrides)
    assert found["data.max_query_tokens"] == (11, "override data={max_query_tokens: 11}")
    assert found["data.vocab_size"][0] == 20_000
    assert found["train.max_steps"] == (7, "override train.max_steps=7")
    assert found["model.num_layers"] == (4, "preset tiny")
    assert found["model.hidden_dropout"] == (0.1, "default")
    assert found["strategy.amp"] == (True, "override strategy={amp: true}")
    shown = command("config", "show", "--changed", "--config", TINY).stdout
    assert "hidden_size: 128" in shown and "# default" not in shown
    value, source = found["model.hidden_size"]
    line = int(source.removeprefix("line "))
    assert (
        value == 128 and "hidden_size: 128" in Path(TINY).read_text("utf-8").split("\n")[line - 1]
    )


@pytest.mark.parametrize("name", sorted(_shipped()))
def test_what_is_shown_is_the_same_configuration(name: str, tmp_path: Path) -> None:
    file = _shipped()[name]
    whole = tmp_path / "whole.yaml"
    whole.write_text(command("config", "show", "--config", str(file)).stdout, encoding="utf-8")
    assert load_config(whole) == load_config(file)


@pytest.mark.parametrize("prompt", ["Instruct: find\nQuery: ", "1e5", "1:30", "010", "a\u2028b"])
def test_a_text_is_shown_as_it_is_read(prompt: str, tmp_path: Path) -> None:
    given = [f"model.query_prompt={json.dumps(prompt)}"]
    whole = tmp_path / "whole.yaml"
    whole.write_text(command("config", "show", "--config", TINY, *given).stdout, encoding="utf-8")
    assert load_config(whole) == load_config(TINY, given)


def test_validate_tells_every_fault_in_words_and_as_json() -> None:
    good = command("config", "validate", "--config", TINY, "mode=static")
    assert "valid; mode static, 2 ranks, 128 pairs" in good.stdout
    faulty = ("validate", "--json", "--config", TINY, "train.max_steps=0", "mode=eager")
    bad = command("config", *faulty, code=2)
    assert "train.max_steps" in bad.stderr and "mode (override mode=eager)" in bad.stderr
    found = json.loads(bad.stdout)
    assert found["valid"] is False
    assert sorted(fault.split(" ")[0] for fault in found["faults"]) == ["mode", "train.max_steps"]
    static = ["mode=static", "recompute.engine=fleet", "sync.mode=fleet"]
    told = command("config", "validate", "--json", "--config", TINY, *static, code=2)
    faults = json.loads(told.stdout)["faults"]
    assert [one.split(" ")[0] for one in faults] == ["recompute.engine", "sync.mode"]
    none = command("config", "validate", "--json", "--config", "nowhere.yaml", code=2)
    assert "nowhere.yaml" in json.loads(none.stdout)["faults"][0]
    for name in ("nowhere.tsv", "x" * 300 + ".tsv"):  # a file that is not here is a note
        files = ["data.source=files", f"data.train_file={name}"]
        found = command("config", "validate", "--config", TINY, *files)
        assert f"note: data.train_file: {name}: there is no such file" in found.stdout


def test_the_list_of_commands_is_whole_and_in_the_order_of_use() -> None:
    shown = command("--help").stdout
    assert "..." not in shown.partition("Commands:")[2]
    assert shown.index("\n  init ") < shown.index("\n  train ") < shown.index("\n  search ")


def test_diff_exits_with_1_and_names_what_differs(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    text = Path(TINY).read_text("utf-8")
    other.write_text(text.replace("num_heads: 4 ", "num_heads: 8 "), encoding="utf-8")
    found = command("config", "diff", TINY, other, code=1)
    assert found.stdout.strip() == "model.num_heads: 4 (line 8) -> 8 (line 8)"
    command("config", "diff", TINY, TINY)


def init(folder: Path, lines: list[list[str]], output: str = "run.yaml", code: int = 0) -> Result:
    """The command for a file of these pairs, in `folder`."""
    pairs = write_pairs(folder / "pairs.tsv", lines)
    return command("init", pairs, "--output", folder / output, code=code)


PAIRS = [[f"q {n}", f"p {n}"] for n in range(60)]


def test_init_fits_the_pairs_and_overwrites_nothing(tmp_path: Path) -> None:
    pairs = tmp_path / "our: pairs #1.tsv"
    lines = [[f"query {number}", f"{'word ' * 30}{number}"] for number in range(400)]
    write_pairs(pairs, [*lines, ["no pair"]])
    file = tmp_path / "my runs" / "one.yml"
    made = command("init", str(pairs), "--output", str(file), "--json")
    told = json.loads(made.stdout)
    assert (told["written"], told["train"].split(" ", 3)[3]) == (str(file), f"'{file}'")
    config, text = load_config(file), file.read_text("utf-8")
    assert config.data.train_file == pairs
    assert config.data.on_bad_line == "skip" and "1 lines are no pairs" in text
    assert config.data.max_query_tokens == 8 and config.data.max_positive_tokens == 40
    assert 2 * config.contrastive.global_batch <= 400 - config.data.valid_pairs
    assert config.model.pooling == "mean"  # cls from random weights stays at the loss of chance
    assert f"config show --config '{file}'" in text  # as a shell takes it
    assert "exists already" in command("init", pairs, "--output", file, code=2).stderr


@pytest.mark.parametrize(
    ("counts", "hard_negatives", "fill"),
    [((2, 3), 2, "none"), ((9, 6), 4, "none"), ((0, 2), 1, "random")],
)
def test_init_trains_with_the_negatives(
    tmp_path: Path, counts: tuple[int, int], hard_negatives: int, fill: str
) -> None:
    lines = [[f"q {n}", f"p {n}", *(f"n {n} {k}" for k in range(counts[n % 2]))] for n in range(80)]
    made = init(tmp_path, [*lines, ["no pair"]])
    assert "1 lines are no pairs" in made.output and "pairs.tsv:81" in made.output
    config, data = trained_with(tmp_path / "run.yaml")
    assert config.contrastive.hard_negatives == hard_negatives and config.contrastive.fill == fill
    assert len(data.train) + len(data.valid) == 80


def test_init_takes_a_column_of_labels_for_what_it_is(tmp_path: Path) -> None:
    """PaddleNLP's and RocketQA's files: label 0 is no pair, and 0 and 1 are no hard negatives."""
    made = init(tmp_path, [[f"q {n // 2}", f"p {n}", str(n % 2)] for n in range(160)])
    assert "80 lines have label 0 and are no pairs" in made.output
    config, data = trained_with(tmp_path / "run.yaml")
    assert config.contrastive.hard_negatives == 0
    assert len(data.train) + len(data.valid) == 80
    assert all(pair.positive.endswith(tuple("13579")) for pair in data.train)


def test_init_masks_several_positives_of_a_query(tmp_path: Path) -> None:
    init(tmp_path, [[f"q {n // 2}", f"p {n}"] for n in range(160)])
    assert "80 queries have several" in (tmp_path / "run.yaml").read_text()
    assert trained_with(tmp_path / "run.yaml")[0].contrastive.positives == "mask"


def test_init_fits_groups_and_duplicates(tmp_path: Path) -> None:
    init(tmp_path, [[f"q {n % 150}", f"p {n % 50}"] for n in range(600)])
    _, data = trained_with(tmp_path / "run.yaml")
    assert len(data.pool) == 50 and len(data.valid) == 15


@pytest.mark.parametrize(
    ("card", "budget"), [(1 << 30, None), (3 << 29, 1 << 30), (8 << 30, 6 << 30)]
)
def test_init_fits_the_memory_of_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, card: int, budget: int | None
) -> None:
    monkeypatch.setattr(module, "_this_machine", lambda: _Machine("gpu", 1, card))
    init(tmp_path, PAIRS)
    assert load_config(tmp_path / "run.yaml").contrastive.memory_budget == budget


@pytest.mark.parametrize(
    ("lines", "output", "words"),
    [
        ([[f"q {n}", "same"] for n in range(60)], "new/run.yaml", "60 pairs, which must be held"),
        ([[f"q {n % 20}", f"p {n % 20}"] for n in range(60)], "run.yaml", "20 different pairs"),
        *[(PAIRS, f"{end}run.yaml", "rename") for end in ("x\nmode: static\n#", "\u2028")],
        (PAIRS, "/proc/x/run.yaml", "cannot be written"),
        (PAIRS, "x" * 300, "cannot be written"),
    ],
)
def test_init_refuses_pairs_and_names(
    lines: list[list[str]], output: str, words: str, tmp_path: Path
) -> None:
    assert words in init(tmp_path, lines, output, code=2).stderr
    assert [one.name for one in tmp_path.iterdir()] == ["pairs.tsv"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "needs a file of pairs, or --from"),
        (("--from", "huge"), "huge: with one of: "),
        (("nowhere.tsv",), "nowhere.tsv"),
        (("x\u2028y.tsv",), "rename"),
        (("pairs.tsv", "--from", Path(TINY).stem), "pairs.tsv has no effect; give one of them"),
        (("--from", "broken"), "mode"),
    ],
)
def test_init_refuses_arguments_and_leaves_nothing(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.yaml").write_text("mode: none")
    known = {**_shipped(), "broken": tmp_path / "broken.yaml"}
    monkeypatch.setattr(module, "_shipped", lambda: known)
    output = tmp_path / "new" / "run.yaml"
    assert words in command("init", *arguments, "--output", output, code=2).stderr
    assert not (tmp_path / "new").exists()
    command("init", "--from", Path(TINY).stem, "--output", tmp_path / "run.yaml")
    assert (tmp_path / "run.yaml").read_bytes() == Path(TINY).read_bytes()
