"""Weights of PaddleNLP and Hugging Face in our encoder: against a float64 BERT in NumPy, and
against PaddleNLP's own models where it is installed (``make test-nlp``).
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import safetensors.numpy
from click.testing import CliRunner
from numpy.typing import NDArray

from paddle_recompute.app.cli import main
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.encoder import build_model
from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights, save_weights

Array = NDArray[np.float64]
LAYERS, HEADS, HIDDEN, INNER, WORDS, POSITIONS, TYPES, TASKS = 3, 4, 32, 64, 60, 24, 3, 3
# float32 against float64 over three blocks.
TOLERANCE = 5e-6
IDS = np.array([[1, 5, 9, 33, 2], [1, 7, 59, 2, 4]])


def config(**more: Any) -> ModelConfig:
    return ModelConfig(
        hidden_size=HIDDEN, num_layers=LAYERS, num_heads=HEADS, intermediate_size=INNER,
        max_position_embeddings=POSITIONS, type_vocab_size=TYPES, **more,
    )  # fmt: skip


def hf_arrays(prefix: str = "") -> dict[str, NDArray[np.float32]]:
    """Random weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (TYPES, HIDDEN),
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
    }
    norms = ["embeddings.LayerNorm"]
    for n in range(LAYERS):
        block = f"encoder.layer.{n}"
        linear = {
            **{f"attention.self.{w}": (HIDDEN, HIDDEN) for w in ("query", "key", "value")},
            "attention.output.dense": (HIDDEN, HIDDEN),
            "intermediate.dense": (INNER, HIDDEN),  # [out, in], as in PyTorch
            "output.dense": (HIDDEN, INNER),
        }
        for name, (rows, columns) in linear.items():
            shapes[f"{block}.{name}.weight"] = (rows, columns)
            shapes[f"{block}.{name}.bias"] = (rows,)
        norms += [f"{block}.attention.output.LayerNorm", f"{block}.output.LayerNorm"]
    arrays = {name: rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
    for norm in norms:
        arrays[f"{norm}.weight"] = 1 + rng.normal(0, 0.1, HIDDEN)
        arrays[f"{norm}.bias"] = rng.normal(0, 0.1, HIDDEN)
    return {prefix + name: array.astype("float32") for name, array in arrays.items()}


def numpy_bert(arrays: dict[str, NDArray[np.float32]], ids: NDArray[np.int64]) -> Array:
    """BERT's pooled vector, in float64, from Hugging Face's names, as the paper has it."""
    w = {name: array.astype("float64") for name, array in arrays.items()}

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def heads(x: Array) -> Array:
        return x.reshape(*x.shape[:2], HEADS, -1).swapaxes(1, 2)

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for n in range(LAYERS):
        block = f"encoder.layer.{n}"
        q, k, v = (
            heads(linear(x, f"{block}.attention.self.{which}"))
            for which in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(1, 2).reshape(x.shape)
        x = norm(x + linear(mixed, f"{block}.attention.output.dense"),
                 f"{block}.attention.output.LayerNorm")  # fmt: skip
        inner = linear(x, f"{block}.intermediate.dense")
        inner = inner * 0.5 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{block}.output.dense"), f"{block}.output.LayerNorm")
    return np.tanh(linear(x[:, 0], "pooler.dense"))


def vectors(path: Path, **more: Any) -> NDArray[np.float32]:
    model = build_model(config(init_from=path, **more), WORDS)
    model.eval()
    with paddle.no_grad():
        found: NDArray[np.float32] = model(paddle.to_tensor(IDS)).numpy()
    return found


def write(path: Path, arrays: dict[str, Any]) -> Path:
    if path.suffix == ".safetensors":
        safetensors.numpy.save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()}, path
        )
    else:
        paddle.save({name: paddle.to_tensor(array) for name, array in arrays.items()}, str(path))
    return path


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_bert_of_hugging_face(prefix: str, tmp_path: Path) -> None:
    arrays = hf_arrays(prefix)
    if prefix:  # as the first releases call them
        arrays = {
            name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): array
            for name, array in arrays.items()
        }
    more = {
        "cls.predictions.bias": np.zeros(WORDS, "float32"),
        f"{prefix}embeddings.position_ids": np.arange(POSITIONS)[None],
    }
    path = write(tmp_path / "model.safetensors", {**arrays, **more})
    expected = numpy_bert(hf_arrays(), IDS)
    assert abs(vectors(path) - expected).max() < TOLERANCE < abs(expected).max() / 1e3


def convert(source: Path, target: Path, to: str, *more: str, refused: bool = False) -> str:
    """What the command says, in one line."""
    result = CliRunner().invoke(main, ["convert", "--to", to, *more, str(source), str(target)])
    assert result.exit_code == 2 * refused, result.output
    assert target.exists() != refused
    return " ".join(result.output.split())


@pytest.mark.parametrize("suffix", [".pdparams", ".safetensors"])
def test_convert_there_and_back(suffix: str, tmp_path: Path) -> None:
    start = write(tmp_path / "hf.safetensors", hf_arrays("bert."))
    expected = vectors(start)
    ours, nlp = tmp_path / f"ours{suffix}", tmp_path / f"nlp{suffix}"
    convert(start, ours, "paddle_recompute")
    told = CliRunner().invoke(main, ["convert", "--to", "paddlenlp", "--json", str(ours), str(nlp)])
    assert json.loads(told.stdout)["arrays"] == len(hf_arrays())
    convert(nlp, tmp_path / "back.safetensors", "huggingface")
    assert (vectors(ours) == expected).all() and (vectors(nlp) == expected).all()
    back = safetensors.numpy.load_file(tmp_path / "back.safetensors")
    assert back.keys() == hf_arrays().keys()
    assert all((back[name] == array).all() for name, array in hf_arrays().items())
    load_weights(build_model(config(), WORDS), ours)


def test_a_projection_and_another_pooling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "model.safetensors", hf_arrays())
    with caplog.at_level("INFO"):
        assert vectors(path, projection_size=8).shape == (2, 8)
        assert vectors(path, pooling="mean").shape == (2, HIDDEN)
    assert "has no projection.weight, which starts from its random values" in caplog.text
    assert "pooler.dense.weight is left out" in caplog.text


def test_task_types_are_added_to_the_token_types(tmp_path: Path) -> None:
    save_weights(build_model(config(), WORDS), tmp_path / "ours.safetensors")
    convert(tmp_path / "ours.safetensors", tmp_path / "nlp.safetensors", "paddlenlp")
    arrays = safetensors.numpy.load_file(tmp_path / "nlp.safetensors")
    tasks = np.random.default_rng(1).normal(size=(TASKS, HIDDEN)).astype("float32")
    arrays = {f"ernie.{name}": array for name, array in arrays.items()}
    arrays["ernie.embeddings.task_type_embeddings.weight"] = tasks
    path = write(tmp_path / "ernie.pdparams", arrays)
    state = build_model(config(init_from=path), WORDS).state_dict()
    types = arrays["ernie.embeddings.token_type_embeddings.weight"]
    assert (state["embeddings.token_type.weight"].numpy() == types + tasks[0]).all()


def positions(rows: int) -> NDArray[np.float32]:
    return np.random.default_rng(2).normal(0, 0.2, [rows, HIDDEN]).astype("float32")


@pytest.mark.parametrize(
    ("sign", "told"),
    [
        ("its name", "its names say so"),
        ("its head", "its names say so"),
        ("130 rows", "its table of positions has 130 rows"),
        ("row of the padding", "row 1 of its positions is zero"),
        ("one token type", "it has one token type"),
        ("config.json", "the configuration beside it says"),
        ("model_config.json", "the configuration beside it says"),
    ],
)
def test_a_roberta_is_refused(sign: str, told: str, tmp_path: Path) -> None:
    """Each sign alone, in a model with as many positions as the table has rows."""
    arrays = hf_arrays()
    table, rows = "embeddings.position_embeddings.weight", POSITIONS
    if sign.endswith("rows"):
        rows = int(sign.split()[0])
        arrays[table] = positions(rows)
    elif sign == "row of the padding":
        arrays[table] = arrays[table] * (np.arange(rows) != 1).astype("float32")[:, None]
    elif sign == "one token type":
        arrays["embeddings.token_type_embeddings.weight"] = positions(1)
    elif sign.endswith(".json"):
        kind = {"model_type": "xlm-roberta"} if sign == "config.json" else {}
        (tmp_path / sign).write_text(json.dumps({"init_class": "RobertaModel", **kind}))
    elif sign == "its head":
        arrays["lm_head.bias"] = np.ones(WORDS, "float32")
    else:
        arrays = {f"roberta.{name}": array for name, array in arrays.items()}
    path = write(tmp_path / "model.safetensors", arrays)
    said = rf"RoBERTa, which counts positions from 2 .*{told}"
    types = 1 if sign == "one token type" else TYPES
    fitting = config(init_from=path).model_copy(
        update={"max_position_embeddings": rows, "type_vocab_size": types}
    )
    if sign.endswith(".json"):  # the folder says what it is, and the encoder counts as it does
        assert build_model(fitting, WORDS).first_position == 2
    else:
        with pytest.raises(CheckpointError, match=said):
            build_model(fitting, WORDS)
    assert "RoBERTa" in convert(path, tmp_path / "b.safetensors", "paddle_recompute", refused=True)


# ------------------------------------------------------------ every tensor is used, or it is named


def mpnet_arrays() -> dict[str, NDArray[np.float32]]:
    """Other names for the attention, and a bias for relative positions."""
    arrays = {
        name.replace("attention.self.query", "attention.attn.q")
        .replace("attention.self.key", "attention.attn.k")
        .replace("attention.self.value", "attention.attn.v")
        .replace("attention.output.dense", "attention.attn.o")
        .replace("attention.output.LayerNorm", "attention.LayerNorm"): array
        for name, array in hf_arrays().items()
    }
    return {**arrays, "encoder.relative_attention_bias.weight": positions(HEADS)}


def test_an_encoder_with_other_tensors_is_not_converted(tmp_path: Path) -> None:
    source, target = write(tmp_path / "a.safetensors", mpnet_arrays()), tmp_path / "b.safetensors"
    said = convert(source, target, "paddlenlp", refused=True)
    assert "--to paddlenlp: no names for this encoder (mpnet) are known there" in said
    arrays = mpnet_arrays()
    del arrays["encoder.layer.0.attention.attn.k.weight"]
    write(source, arrays)
    said = convert(source, target, "huggingface", refused=True)
    assert "is not a whole encoder; it lacks encoder.layers.0.self_attn.k_proj.weight" in said
    write(source, {"a.weight": np.ones([2, 2], "float32")})
    assert "has the names of neither" in convert(source, target, "paddlenlp", refused=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bert.encoder.layer.1.attention.self.distance_embedding.weight", IDS),
        ("bert.embeddings.position_ids", np.arange(POSITIONS)[::-1]),
        ("bert.encoder.layer.99999999999.output.dense.bias", np.ones(HIDDEN, "float32")),
    ],
    ids=["relative positions", "positions in another order", "a number of eleven digits"],
)
def test_an_encoder_with_one_tensor_more_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    """All of BERT's tensors are there, and do not suffice."""
    source = write(tmp_path / "model.safetensors", {**hf_arrays("bert."), name: value})
    with pytest.raises(CheckpointError, match=rf"does not have: {name}"):
        vectors(source)
    assert name in convert(source, tmp_path / "b.safetensors", "paddlenlp", refused=True)


def test_a_head_is_left_out_if_that_is_asked_for(tmp_path: Path) -> None:
    heads = {"cls.predictions.bias": np.ones(WORDS, "float32"), "classifier.weight": positions(2)}
    buffers = {"bert.embeddings.position_ids": np.arange(POSITIONS)[None]}
    source = write(tmp_path / "hf.safetensors", {**hf_arrays("bert."), **heads, **buffers})
    target = tmp_path / "b.safetensors"
    said = convert(source, target, "paddlenlp", "--leave-out", "cls.*", refused=True)
    assert "1 tensors have no name in an encoder of paddlenlp: classifier.weight." in said
    said = convert(
        source, target, "paddlenlp", "--leave-out", "c*", "--leave-out", "x", refused=True
    )
    assert "--leave-out: 'x' matches none" in said
    said = convert(source, target, "paddlenlp", "--leave-out", "c*")
    assert all(name in said for name in heads)
    assert (vectors(target) == vectors(source)).all()


def test_a_projection_is_left_out_if_that_is_asked_for(tmp_path: Path) -> None:
    source, target = tmp_path / "ours.safetensors", tmp_path / "hf.safetensors"
    save_weights(build_model(config(projection_size=8), WORDS), source)
    said = convert(source, target, "huggingface", refused=True)
    assert "encoder of huggingface: projection.bias, projection.weight" in said
    convert(source, target, "huggingface", "--leave-out", "projection.*")
    assert safetensors.numpy.load_file(target).keys() == hf_arrays().keys()


# ---------------------------------------------------------------------------------- several files


def write_shards(folder: Path, arrays: dict[str, Any], shards: int = 3) -> Path:
    """As Hugging Face writes a large model."""
    folder.mkdir(exist_ok=True)
    names = sorted(arrays)
    places = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        here = names[number::shards]
        write(folder / file, {name: arrays[name] for name in here})
        places.update(dict.fromkeys(here, file))
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_a_folder_of_several_files(name: str, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "hf", hf_arrays("bert."))
    expected = vectors(write(tmp_path / "model.safetensors", hf_arrays("bert.")))
    assert (vectors(folder / name) == expected).all()
    assert (vectors(tmp_path) == expected).all()  # a folder of one file
    convert(folder / name, tmp_path / "ours.safetensors", "paddle_recompute")
    assert (vectors(tmp_path / "ours.safetensors") == expected).all()
    arrays = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    other = build_model(config(), WORDS)
    load_weights(other, write_shards(tmp_path / "own", arrays) / name)
    assert all((one.numpy() == arrays[key]).all() for key, one in other.state_dict().items())


def test_folders_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"this folder holds none of model\.safetensors\.ind"):
        vectors(tmp_path)
    folder = write_shards(tmp_path / "hf", hf_arrays())
    second = folder / "model-00002-of-00003.safetensors"
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    moved = dict(whole["weight_map"])
    name = next(name for name, file in moved.items() if file != second.name)
    moved[name] = second.name
    for content, told in (
        ("{", "is damaged"),
        ("[1]", "has no weight_map"),
        (json.dumps({"weight_map": {"a": "../model.safetensors"}}), "files in its folder"),
        (json.dumps({"weight_map": {"a": "other.safetensors"}}), "other.safetensors, which is not"),
        (json.dumps({"weight_map": moved}), "does not hold what model.safetensors.index.json says"),
    ):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=told):
            vectors(folder)
    index.write_text(json.dumps(whole))
    second.unlink()
    with pytest.raises(CheckpointError, match="which is not there; get all files"):
        vectors(folder)


def test_what_does_not_fit_is_told_in_our_names(tmp_path: Path) -> None:
    arrays = hf_arrays()
    del arrays["encoder.layer.2.output.dense.bias"]
    arrays["encoder.layer.1.intermediate.dense.weight"] = np.ones([INNER + 1, HIDDEN], "float32")
    path = write(tmp_path / "model.safetensors", arrays)
    told = r"missing: encoder\.layers\.2\.linear2\.bias"
    with pytest.raises(CheckpointError, match=told) as caught:
        vectors(path)
    assert "encoder.layers.1.linear1.weight [32, 65] (the model: [32, 64])" in str(caught.value)


@pytest.mark.skipif(
    importlib.util.find_spec("paddlenlp") is None,
    reason="PaddleNLP is not installed (make test-nlp installs it)",
)
@pytest.mark.parametrize("kind", ["Ernie", "Bert"])
@pytest.mark.parametrize("head", ["", "ForSequenceClassification"])
def test_the_model_of_paddlenlp(kind: str, head: str, tmp_path: Path) -> None:
    importlib.import_module("datasets")
    transformers = importlib.import_module("paddlenlp.transformers")
    more = {"use_task_id": True, "task_type_vocab_size": TASKS} if kind == "Ernie" else {}
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=WORDS, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        intermediate_size=INNER, max_position_embeddings=POSITIONS, type_vocab_size=TYPES,
        initializer_range=0.2, **more,
    )  # fmt: skip
    paddle.seed(3)
    model = getattr(transformers, f"{kind}{head or 'Model'}")(settings)
    model.eval()
    paddle.save(model.state_dict(), str(tmp_path / "model.pdparams"))
    encoder = getattr(model, kind.lower()) if head else model
    with paddle.no_grad():
        expected = encoder(paddle.to_tensor(IDS))[1].numpy()
    found = vectors(tmp_path / "model.pdparams")
    difference = abs(found - expected).max()
    print(f"{kind}{head}: largest difference {difference:.2g}")
    assert difference < 1e-6 < abs(expected).max() / 1e3
