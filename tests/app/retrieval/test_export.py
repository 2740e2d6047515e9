"""``paddle-recompute export``: the weights of a checkpoint for Paddle's own tools, and back."""

from __future__ import annotations

import json
import os
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


@pytest.fixture(autouse=True)
def outside_of_any_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets variables; they are put back after each test."""
    for name in ("OMP_NUM_THREADS", "MKL_DEBUG_CPU_TYPE", "FLAGS_use_stride_kernel"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_run(tmp_path)
    return tmp_path / "run"


def export(folder: Path, file_format: str, output: Path, *more: str) -> Result:
    of_run = ["export", "--model", str(folder), *more]
    arguments = [*of_run, "--format", file_format, "--output", str(output)]
    return CliRunner().invoke(cli.main, arguments)


@pytest.mark.parametrize("file_format", ["pdparams", "safetensors"])
def test_the_file_holds_the_weights_under_the_names_of_the_model(
    file_format: str, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / f"encoder.{file_format}"
    result = export(run, file_format, output)
    assert result.exit_code == 0, result.output
    trained = load_encoder(run).model.state_dict()
    assert f"{len(trained)} tensors" in result.output
    told = json.loads(export(run, file_format, output, "--json").stdout)
    assert told["written"] == str(output) and told["tensors"] == len(trained)
    found = (
        {name: tensor.numpy() for name, tensor in paddle.load(str(output)).items()}
        if file_format == "pdparams"
        else load_file(output)
    )
    assert set(found) == set(trained)
    for name, tensor in trained.items():
        assert np.array_equal(found[name], tensor.numpy()), name


@pytest.mark.parametrize("file_format", ["pdparams", "safetensors"])
def test_a_new_model_reads_it(file_format: str, run: Path, tmp_path: Path) -> None:
    output = tmp_path / f"encoder.{file_format}"
    export(run, file_format, output)
    trained = load_encoder(run)
    config = tiny(tmp_path, model__init_from=str(output))
    for model in (
        build_model(config.model, trained.tokenizer.vocab_size),
        build_model(tiny(tmp_path).model, trained.tokenizer.vocab_size),
    ):
        load_weights(model, output)  # strict: no name more, no name less
        for name, tensor in trained.model.state_dict().items():
            assert np.array_equal(model.state_dict()[name].numpy(), tensor.numpy()), name


def test_paddle_sets_it_as_the_state_of_a_layer(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "encoder.pdparams"
    export(run, "pdparams", output)
    trained = load_encoder(run)
    model = build_model(tiny(tmp_path).model, trained.tokenizer.vocab_size)
    missing, unexpected = model.set_state_dict(paddle.load(str(output)))
    assert (missing, unexpected) == ([], [])
    ids = paddle.to_tensor([[2, 5, 6, 3]])
    model.eval()
    assert np.array_equal(model(ids).numpy(), trained.model(ids).numpy())


def test_a_suffix_of_the_other_format_is_refused(run: Path, tmp_path: Path) -> None:
    result = export(run, "pdparams", tmp_path / "encoder.safetensors")
    assert result.exit_code == 2
    assert "must end in .pdparams" in result.output
    assert not (tmp_path / "encoder.safetensors").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = export(tmp_path, "pdparams", tmp_path / "encoder.pdparams")
    assert result.exit_code == 2
    assert "contains no trained model" in result.output
