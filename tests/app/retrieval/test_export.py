"""``paddle-recompute export``: the weights of a checkpoint for Paddle's own tools, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file

from paddle_recompute.app import cli
from paddle_recompute.app.encoder import build_model
from paddle_recompute.app.retrieval.trained import load_encoder
from paddle_recompute.weights import load_weights
from tests.app.trainer.test_trainer import tiny
from tests.app.trainer.trained_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    make_run(folder)
    return folder / "run"


def export(folder: Path, file_format: str, output: Path, *more: str) -> Result:
    of_run = ["export", "--model", str(folder), *more]
    arguments = [*of_run, "--format", file_format, "--output", str(output)]
    return CliRunner().invoke(cli.main, arguments)


@pytest.mark.parametrize("file_format", ["pdparams", "safetensors"])
def test_the_file_holds_the_weights_and_a_new_model_reads_it(
    file_format: str, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"encoder.{file_format}"
    result = export(run, file_format, output)
    assert result.exit_code == 0, result.output
    trained = load_encoder(run)
    state = {name: tensor.numpy() for name, tensor in trained.model.state_dict().items()}
    assert f"{len(state)} tensors" in result.output
    told = json.loads(export(run, file_format, output, "--json").stdout)
    assert told["written"] == str(output) and told["tensors"] == len(state)
    models = [
        build_model(config.model, trained.tokenizer.vocab_size)
        for config in (tiny(tmp_path, model__init_from=str(output)), tiny(tmp_path))
    ]
    load_weights(models[1], output)  # strict: no name more, no name less
    if file_format == "pdparams":  # Paddle itself sets it as the state of a Layer
        found = {name: tensor.numpy() for name, tensor in paddle.load(str(output)).items()}
        models.append(build_model(tiny(tmp_path).model, trained.tokenizer.vocab_size))
        assert models[2].set_state_dict(paddle.load(str(output))) == ([], [])
    else:
        found = load_file(output)
    read = [{name: one.numpy() for name, one in model.state_dict().items()} for model in models]
    for tensors in (found, *read):
        assert tensors.keys() == state.keys()
        for name, value in state.items():
            assert np.array_equal(tensors[name], value), name


def test_a_suffix_of_the_other_format_and_a_folder_without_a_run(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "encoder.safetensors"
    for folder, file_format, words in (
        (run, "pdparams", "must end in .pdparams"),
        (tmp_path, "safetensors", "contains no trained model"),
    ):
        result = export(folder, file_format, output)
        assert result.exit_code == 2 and words in result.output
    assert not output.exists()
