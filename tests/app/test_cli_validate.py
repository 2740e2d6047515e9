"""``config validate`` finds what ``train`` would refuse before its first step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute.app.cli import _process
from paddle_recompute.app.trainer import Trainer
from paddle_recompute.errors import CheckpointError
from tests.app.commands import command
from tests.app.retrieval.pretrained import make_folder
from tests.app.trainer.test_trainer import tiny, write_pairs
from tests.app.trainer.trained_run import make_run

NEGATIVES = {"contrastive__hard_negatives": 90, "contrastive__fill": "random"}
PRECISION = {"strategy__amp": True, "strategy__amp_configs__dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def _settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command would choose another path of MKL, for this process and all tests after it."""
    monkeypatch.setattr(_process, "speed_settings", lambda *_, **__: {})


def validated(folder: Path, *, code: int = 0, **changes: Any) -> dict[str, Any]:
    file = folder / "run.yaml"
    file.write_text(json.dumps(tiny(folder, **changes).to_dict()), encoding="utf-8")
    found = command("config", "validate", "--json", "--config", file, code=code)
    record: dict[str, Any] = json.loads(found.stdout)
    return record


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data__valid_pairs": 1000}, "data.valid_pairs is 1000, but there are only"),
        ({"data__pool_size": 1000}, "data.pool_size is 1000, and the pairs have"),
        ({"contrastive__global_batch": 1024}, "do not fill one batch of contrastive.global_batch"),
        (NEGATIVES, "contrastive.fill: random:"),
        (PRECISION, "strategy.amp: true: Paddle has no mixed precision on a CPU in dygraph"),
        ({"strategy__amp": True}, "or mode: static with strategy.amp_configs.dtype=bfloat16"),
    ],
)
def test_what_the_pairs_and_the_device_do_not_allow(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    assert validated(tmp_path) == {"valid": True, "notes": []}
    found = validated(tmp_path, code=2, **changes)
    assert found["valid"] is False and words in found["faults"][0]


MATCHES_NOTHING = "the pattern 'none.*' matches no sublayer"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recompute__checkpoints": ["none.*"]}, f"recompute.checkpoints: {MATCHES_NOTHING}"),
        ({"recompute__keep": ["none.*"]}, f"recompute.keep: {MATCHES_NOTHING}"),
        (
            {
                "recompute__policy": "budget",
                "recompute__memory_budget": 1,
                "recompute__keep": ["x"],
            },
            "recompute.keep: the pattern 'x' matches no sublayer",
        ),
        (
            {"recompute__offload_parameters": "host", "recompute__checkpoints": ["none.*"]},
            f"recompute.checkpoints: {MATCHES_NOTHING}",
        ),
        (
            {"model": {"name": "no_such_module:Mean"}},
            "the module no_such_module cannot be imported",
        ),
        ({"train__output_dir": "FILE"}, "train.output_dir: FILE: FILE is a file; name a folder"),
        ({"train__output_dir": "FILE/run"}, "train.output_dir: FILE/run: FILE is a file"),
        ({"data__cache_dir": "FILE"}, "data.cache_dir: FILE: FILE is a file; name a folder"),
    ],
)
def test_what_the_model_and_the_folders_do_not_allow(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    file = str(tmp_path / "a file")
    Path(file).write_text("")
    given = {
        key: value.replace("FILE", file) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    found = validated(tmp_path, code=2, **given)
    assert words.replace("FILE", file) in found["faults"][0]


CLASSES = {
    "Built": "def __init__(self):\n        super().__init__()\n        self.words = missing",
    "Called": "def forward(self, ids):\n        return paddle.reshape(ids,\n            [5, 5])",
}


@pytest.mark.parametrize("name", CLASSES)
def test_what_the_code_of_the_model_raises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    module = tmp_path / f"module_of_{name.lower()}.py"
    module.write_text(f"import paddle\n\nclass {name}(paddle.nn.Layer):\n    {CLASSES[name]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    [fault] = validated(tmp_path, code=2, model={"name": f"{module.stem}:{name}"})["faults"]
    place = f"{module}:{6 if name == 'Built' else 5}"
    assert f"model.name: {module.stem}:{name} cannot be built or called: {place} raises " in fault
    assert ("NameError: name 'missing' is" if name == "Built" else "ValueError: (Inv") in fault


def test_without_paddle_the_model_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    monkeypatch.setattr("paddle_recompute._installed._installed_version", lambda: None)
    [note] = validated(tmp_path, recompute__keep=["none"])["notes"]
    assert note.startswith("model, recompute: not compared with each other: PaddlePaddle is not")


def test_a_budget_that_is_not_compared_is_a_note(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    budget = {"recompute__policy": "budget", "recompute__memory_budget": 1}
    [note] = validated(tmp_path, **budget)["notes"]
    assert note.startswith("recompute.memory_budget: not compared with what a step takes")


def test_folders_of_two_encoders(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.tsv")
    make_folder(tmp_path / "one")
    file = tmp_path / "run.yaml"
    tree = tiny(tmp_path).to_dict()
    tree["model"] = {"init_from": str(tmp_path / "one"), "towers": "separate"}
    tree["model"]["positive_from"] = str(tmp_path / "other")
    file.write_text(json.dumps(tree))
    missing = f"model.positive_from: {tmp_path / 'other'}: there is no such file"
    assert missing in command("config", "validate", "--config", file).stdout
    config = tiny(tmp_path).model_validate(tree)
    with pytest.raises(CheckpointError, match="there is no such file or folder"):
        Trainer(config).run()
    make_folder(tmp_path / "other")
    command("config", "validate", "--config", file)
    weights = tmp_path / "other" / "model.safetensors"
    weights.rename(weights.with_name("other.safetensors"))  # which training does not read
    told = command("config", "validate", "--config", file, code=2).stderr
    assert "model.positive_from: " in told and "this folder holds none of" in told


def test_a_run_of_two_encoders_is_not_the_encoder_of_positives(tmp_path: Path) -> None:
    config = make_run(tmp_path, model__towers="separate")
    write_pairs(tmp_path / "pairs.tsv")
    tree = {**config.to_dict(), "train": {**config.to_dict()["train"], "resume": "auto"}}
    run = str(tmp_path / "run")
    tree["model"] = {"init_from": run, "positive_from": run, "towers": "separate"}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tree))
    told = command("config", "validate", "--config", file, code=2).stderr
    assert "model.positive_from" in told and "holds two encoders, and one is needed" in told


def test_a_run_in_the_folder_is_a_note(tmp_path: Path) -> None:
    make_run(tmp_path)
    write_pairs(tmp_path / "pairs.tsv")
    [note] = validated(tmp_path)["notes"]
    assert f"{tmp_path / 'run'} holds a run of 3 steps; go on with it by train.resume=auto" in note
    assert validated(tmp_path, train__resume="auto")["notes"] == []
