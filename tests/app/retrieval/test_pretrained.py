"""A folder is a model: what Hugging Face, sentence-transformers and a run have written is loaded.

The comparison with `transformers` needs PyTorch, in an environment without Paddle
(``make test-torch``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
import tokenizers
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from paddle_recompute.app.config import Config, ModelConfig, load_config
from paddle_recompute.app.data import check_vocabulary
from paddle_recompute.app.retrieval import (
    encode_texts,
    load_encoder,
    write_hugging_face,
    write_onnx,
)
from paddle_recompute.app.trainer import Trainer, seeded_model
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.errors import CheckpointError, ConfigError, DataError
from tests.app.commands import command
from tests.app.retrieval.make_models import CASES
from tests.app.retrieval.pretrained import KINDS, add_modules, make_folder, model_of
from tests.app.retrieval.test_hugging_face import (
    needs_converter,
    needs_torch,
    run_torch,
    vectors_of,
)
from tests.app.trainer.test_trainer import tiny
from tests.app.trainer.trained_run import make_run, texts

Array = NDArray[np.float64]
TEXTS = ["big cat", "small dog tree river", "cloud", *texts(12)]
# float32 in two libraries or orders, over two blocks; vectors of length 1.
TOLERANCE = 1e-6


def ids_of(kind: str) -> NDArray[np.int64]:
    """Three texts of 7 words, 3 and 1, padded behind."""
    pad = model_of(kind).pad_token_id
    ids = np.random.default_rng(1).integers(5, 12, [3, 7])
    for row, length in enumerate((7, 3, 1)):
        ids[row, length:] = pad
    return ids


# ------------------------------------------------------------------------------------ architectures


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_the_vectors_of_its_model(kind: str, tmp_path: Path) -> None:
    """Of each architecture, under a prefix, and rewritten by `convert`."""
    model = make_folder(tmp_path / "a", kind)
    file = tmp_path / "a" / "model.safetensors"
    save_file({f"model.{name}": one for name, one in load_file(file).items()}, file)
    encoder = load_encoder(tmp_path / "a")
    assert (encoder.config.name, encoder.step) == (kind, 0)
    assert np.array_equal(vectors_of(encoder.model, ids_of(kind)), vectors_of(model, ids_of(kind)))
    write_hugging_face(encoder, tmp_path / "b")
    again = load_encoder(tmp_path / "b")
    vectors = encode_texts(encoder, TEXTS)
    assert np.array_equal(encode_texts(again, TEXTS), vectors)
    assert abs(vectors - vectors.mean(axis=0)).max() > 0.1  # texts get different vectors


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "mean"), ("roberta", "max"), ("mpnet", "first"), ("qwen3", "last")],
)
def test_padding_before_a_text_changes_nothing(kind: str, pooling: str, tmp_path: Path) -> None:
    model, ids = make_folder(tmp_path, kind, pooling=pooling), ids_of(kind)
    lengths = (ids != model.pad_token_id).sum(axis=1)
    before = np.stack([np.roll(row, 7 - length) for row, length in zip(ids, lengths, strict=True)])
    assert not np.array_equal(before, ids)
    behind = vectors_of(model, ids)
    np.testing.assert_allclose(vectors_of(model, before), behind, rtol=0, atol=TOLERANCE * 3)
    for row, length in enumerate(lengths):
        alone = vectors_of(model, ids[row : row + 1, :length])
        np.testing.assert_allclose(alone[0], behind[row], rtol=0, atol=TOLERANCE * 3)


def test_a_decoder_computes_what_is_published(tmp_path: Path) -> None:
    """Qwen3 in NumPy: each position attends to itself and those before it."""
    model, config = make_folder(tmp_path, "qwen3"), model_of("qwen3")
    weights = {name: one.numpy().astype("float64") for name, one in model.state_dict().items()}
    ids = ids_of("qwen3")[0]
    assert config.head_dim and config.rope_theta and config.num_key_value_heads

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weights[f"{name}.weight"]

    def turned(x: Array) -> Array:  # the halves of a head are the parts of complex numbers
        half = config.head_dim // 2  # type: ignore[operator]
        steps = config.rope_theta ** -(np.arange(half) / half)  # type: ignore[operator]
        turn = np.exp(1j * np.arange(len(x))[:, None] * steps)
        both = (x[:, :half] + 1j * x[:, half:]) * turn
        return np.concatenate([both.real, both.imag], axis=1)

    x = weights["embeddings.word.weight"][ids]
    for number in range(config.num_layers):
        block = f"encoder.layers.{number}."
        inner, heads = norm(x, f"{block}input_layernorm"), []
        query, key, value = (
            np.split(inner @ weights[f"{block}self_attn.{one}_proj.weight"], count, axis=1)
            for one, count in (("q", 4), ("k", 2), ("v", 2))
        )
        for head in range(config.num_heads):
            group = head // 2
            scores = (
                turned(norm(query[head], f"{block}self_attn.q_norm"))
                @ turned(norm(key[group], f"{block}self_attn.k_norm")).T
                / np.sqrt(config.head_dim)
            )
            powers = np.tril(np.exp(scores))
            heads.append(powers / powers.sum(1, keepdims=True) @ value[group])
        x = x + np.concatenate(heads, axis=1) @ weights[f"{block}self_attn.o_proj.weight"]
        inner = norm(x, f"{block}post_attention_layernorm")
        gate, up = (inner @ weights[f"{block}mlp.{one}_proj.weight"] for one in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{block}mlp.down_proj.weight"]
    expected = norm(x, "encoder.norm")[-1]
    found = vectors_of(model, ids[None])[0]
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * 10)


def test_the_distances_of_mpnet(tmp_path: Path) -> None:
    """Rows 0 to 7 are near tokens before it, to 15 further ones; 16 to 31 are those behind it."""
    model = make_folder(tmp_path, "mpnet", max_position_embeddings=302)
    model.relative.table.weight.set_value(np.tile(np.arange(32.0, dtype="float32")[:, None], 4))
    with paddle.no_grad():
        rows = model.relative(paddle.ones([1, 300], "int64")).numpy()[0, 0]
    near, far = [*range(8)], {8: 8, 15: 9, 16: 10, 127: 15, 128: 15, 299: 15}
    assert [rows[20, 20 - distance] for distance in near] == near
    assert {distance: rows[299, 299 - distance] for distance in far} == far
    assert rows[0, 1] == 17 and rows[0, 16] == 26 and rows[5, 5] == 0


# ------------------------------------------------------------------------------------------ folders


def test_every_folder_of_a_run_and_what_it_exports(tmp_path: Path) -> None:
    make_run(tmp_path, biased=True, model__query_prompt="q: ", model__pooling="cls")
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint", run / "best")
    want = encode_texts(load_encoder(run), TEXTS, side="query")
    for suffix in ("safetensors", "pdparams"):
        out = tmp_path / suffix / f"encoder.{suffix}"
        command("export", "--model", run, "--format", suffix, "--output", out)
    places = [run / "checkpoint", run / "checkpoint" / "step-3", run / "best"]
    for place in (*places, tmp_path / "safetensors", tmp_path / "pdparams"):
        encoder = load_encoder(place)
        assert np.array_equal(encode_texts(encoder, TEXTS, side="query"), want), place
        assert (encoder.max_query_tokens, encoder.max_positive_tokens) == (10, 12)
    with pytest.raises(CheckpointError, match=r"no trained model; .* no config\.json"):
        load_encoder(tmp_path)


@pytest.mark.parametrize("kind", ["roberta", "qwen3"])
def test_init_writes_a_configuration_that_trains(kind: str, tmp_path: Path) -> None:
    """With a decoder the last product of a block, which costs no memory, is not run again."""
    folder, file = tmp_path / "hf", tmp_path / "run.yaml"
    make_folder(folder, kind)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{one}\t{one} cloud\n" for one in texts(80)))
    command("init", "--from-model", folder, pairs, "--output", file)
    output = f"train.output_dir={tmp_path / 'run'}"
    short = (output, "launch.num_ranks=1", "contrastive.global_batch=8", "train.max_steps=1")
    command("config", "validate", "--config", file, *short)
    command("train", "--config", file, *short, "train.eval_every=1", "train.learning_rate=1e-20")
    encoder = load_encoder(tmp_path / "run")
    assert (encoder.config.name, encoder.config.pad_token_id) == (kind, model_of(kind).pad_token_id)
    kept = load_config(file).recompute.keep
    assert kept == (["encoder.layers.*.mlp.down_proj"] if kind == "qwen3" else [])
    assert np.array_equal(encode_texts(encoder, TEXTS), encode_texts(load_encoder(folder), TEXTS))
    # No step was better than none, and the best is the model as it came.
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (record["best_step"], find_checkpoint(tmp_path / "run" / "best").step) == (0, 0)
    (folder / "tokenizer.json").unlink()
    said = command("config", "validate", "--config", file, *short, code=2).output
    assert "has no tokenizer.json or vocab.txt beside it" in said


def change(file: str, **changes: Any) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / file
        tree = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**tree, **changes}))

    return changed


def add_module(kind: str, **config: Any) -> Callable[[Path], None]:
    def added(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_text())
        entries.insert(2, {"path": "2_More", "type": f"sentence_transformers.models.{kind}"})
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "2_More").mkdir()
        (folder / "2_More" / "config.json").write_text(json.dumps(config))

    return added


def drop_normalize(folder: Path) -> None:
    entries = json.loads((folder / "modules.json").read_text())[:2]
    (folder / "modules.json").write_text(json.dumps(entries))
    change("config_sentence_transformers.json", similarity_fn_name="dot")(folder)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "another type": (change("config.json", model_type="t5"), "of the type t5; allowed are ernie"),
    "activation": (change("config.json", hidden_act="gelu_new"), "its activation is gelu_new"),
    "positions": (
        change("config.json", position_embedding_type="relative_key"), "position_embedding_type is",
    ),
    "quantized": (change("config.json", quantization_config={}), "quantization_config is"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{") and None, "cannot be read"),
    "a list": (lambda f: (f / "config.json").write_text("[]") and None, "must hold a JSON object"),
    "no dimensions": (lambda f: (f / "config.json").write_text('{"model_type": "bert"}') and None,
                      "hidden_size"),
    "pooling": (
        change("1_Pooling/config.json", pooling_mode="weightedmean"), "pooling is weightedmean",
    ),
    "two poolings": (
        change("1_Pooling/config.json", pooling_mode_max_tokens=True), "pooling is m.* and m",
    ),
    "no prompt": (change("1_Pooling/config.json", include_prompt=False), "include_prompt is false"),
    "lower case": (change("sentence_bert_config.json", do_lower_case=True), "do_lower_case is"),
    "LayerNorm": (add_module("LayerNorm"), "modules Transformer, Pooling, LayerNorm, Normalize"),
    "Dense": (
        add_module("Dense", in_features=16, out_features=4, activation_function="torch.nn.ReLU"),
        "a Dense with the activation ReLU",
    ),
    "dot product": (drop_normalize, "similarity is dot of vectors that are not normalized"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_encoder_does_not_compute_is_refused(name: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    add_modules(tmp_path)
    load_encoder(tmp_path)
    spoil, said = REFUSED[name]
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=said):
        load_encoder(tmp_path)


def test_what_sentence_transformers_says_is_taken(tmp_path: Path) -> None:
    make_folder(tmp_path)
    add_modules(tmp_path, pooling_mode_max_tokens=True)
    prompts = {"query": "big ", "passage": "small ", "other": "cat "}
    change("config_sentence_transformers.json", prompts=prompts)(tmp_path)
    change("sentence_bert_config.json", max_seq_length=9)(tmp_path)
    encoder = load_encoder(tmp_path)
    assert encoder.config.pooling == "max"
    assert encoder.prompts == {"query": "big ", "document": "small "}
    assert encoder.longest("query") == encoder.longest("document") == 9
    # Of a default prompt, if a side has none.
    change("config_sentence_transformers.json", prompts={"o": "cat "}, default_prompt_name="o")(
        tmp_path
    )
    assert load_encoder(tmp_path).prompts == {"query": "cat ", "document": "cat "}


def test_a_configuration_that_contradicts_the_folder(tmp_path: Path) -> None:
    make_folder(tmp_path)
    given = {"init_from": tmp_path}
    assert ModelConfig.model_validate({**given, "hidden_dropout": 0.0}).hidden_size == 16
    assert ModelConfig.model_validate({**given, "pooling": "cls"}).pooling == "cls"  # it says none
    with pytest.raises(ValueError, match=r"model.num_layers is 3, and .*config.json says 2"):
        ModelConfig.model_validate({**given, "num_layers": 3})
    with pytest.raises(ValueError, match=r"model.hidden_size is 768, and .*config.json says 16"):
        ModelConfig.model_validate({**given, "preset": "base"})
    add_modules(tmp_path)
    with pytest.raises(ValueError, match=r"model.pooling is 'cls', and .*says 'mean'"):
        ModelConfig.model_validate({**given, "pooling": "cls"})
    # The fault is that of init_from, beside those of other sections.
    tree = {**tiny(tmp_path).to_dict(), "model": {**given, "init_from": str(tmp_path / "none")}}
    tree["train"]["max_steps"] = "many"
    with pytest.raises(ValidationError) as told:
        Config.model_validate(tree)
    places = {".".join(map(str, error["loc"])): error["msg"] for error in told.value.errors()}
    assert places.keys() == {"model.init_from", "train.max_steps"}
    assert places["model.init_from"] == "there is no such file or folder"


def test_a_model_of_paddlenlp(tmp_path: Path) -> None:
    """Its ``model_config.json`` names a class; its weights have Paddle's layout and names."""
    model = make_folder(tmp_path)
    tree = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    del tree["model_type"], tree["architectures"]
    written = {"init_args": [tree], "init_class": "ErnieModel"}
    (tmp_path / "model_config.json").write_text(json.dumps(written))
    (tmp_path / "model.safetensors").rename(tmp_path / "hf.safetensors")
    state, file = tmp_path / "model_state.pdparams", tmp_path / "hf.safetensors"
    command("convert", "--to", "paddlenlp", "--leave-out", "x", file, state, code=2)
    command("convert", "--to", "paddlenlp", file, state)
    encoder = load_encoder(tmp_path)
    assert encoder.config.name == "ernie"
    assert np.array_equal(
        vectors_of(encoder.model, ids_of("bert")), vectors_of(model, ids_of("bert"))
    )


# --------------------------------------------------------------------------------------- vocabulary


def test_a_vocabulary_belongs_to_its_weights(tmp_path: Path) -> None:
    """Of a checkpoint's file and of an exported one, the tokenizer beside it is used."""
    make_run(tmp_path, biased=True)
    run, out = tmp_path / "run", tmp_path / "out"
    command("export", "--model", run, "--format", "safetensors", "--output", out / "a.safetensors")
    make_run(tmp_path / "other", seed=1)
    new = tmp_path / "other" / "tokenizer-1.json"
    vocabulary = json.loads(new.read_text())
    assert vocabulary == json.loads((out / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    last, first = max(words, key=words.get), [*words][5]
    words[first], words[last] = words[last], words[first]  # as large, with other entries
    new.write_text(json.dumps(vocabulary))
    sources = [run / "checkpoint" / "step-3" / "model.safetensors", out / "a.safetensors", out, run]
    for source in sources:
        config = tiny(tmp_path, model__init_from=str(source))
        file = config.tokenizer_file
        assert file is not None and file.read_bytes() == (out / "tokenizer.json").read_bytes()
        check_vocabulary(config)
        with pytest.raises(ConfigError, match=r"has other entries than the vocabulary"):
            check_vocabulary(tiny(tmp_path, model__init_from=str(source), data__tokenizer=str(new)))
    (tmp_path / "third").mkdir()
    make_run(tmp_path / "third", of_words=True)
    export = ("export", "--model", tmp_path / "third" / "run", "--format", "safetensors")
    assert "name a" in command(*export, "--output", out / "b.safetensors", code=2).output
    shutil.copy(new, out / "tokenizer.json")
    with pytest.raises(DataError, match="has other entries than the vocabulary"):
        load_encoder(out)


def test_added_tokens_get_rows(tmp_path: Path) -> None:
    make_folder(tmp_path / "bert")
    (tmp_path / "pairs.tsv").write_text("".join(f"{a}\t{a} stone\n" for a in texts(300)))
    file = tmp_path / "bert" / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.add_special_tokens(["[WORLD]", "<e1>"])
    start = {"model": {"init_from": str(tmp_path / "bert")}}

    def config(**changes: Any) -> Config:
        return Config.model_validate(
            {**tiny(tmp_path).to_dict(), "model": {**start["model"], **changes}}
        )

    with pytest.raises(ConfigError, match=r"15 rows are enough for the 15 entries"):
        check_vocabulary(config(resize_embeddings=True))
    tokenizer.save(str(file))
    for refused in (check_vocabulary, lambda given: seeded_model(given, 17)):
        with pytest.raises(ConfigError, match=r"received 15; .*model.resize_embeddings: true adds"):
            refused(config())
    resized = config(resize_embeddings=True)
    check_vocabulary(resized)
    one, again = (seeded_model(resized, 17).embeddings.word.weight.numpy() for _ in range(2))
    assert one.shape == (17, 16) and np.array_equal(one, again)
    theirs = load_file(tmp_path / "bert" / "model.safetensors")
    assert np.array_equal(one[:15], theirs["embeddings.word_embeddings.weight"])
    assert 0.1 < one[15:].std() < 0.6  # initializer_range is 0.3
    # A run, what it exports, and a run from it have these rows; none is drawn anew.
    Trainer(resized).run()
    export = ("export", "--model", tmp_path / "run", "--format", "safetensors")
    command(*export, "--output", tmp_path / "out" / "m.safetensors")
    trained = load_encoder(tmp_path / "run")
    vectors = encode_texts(trained, ["big [WORLD]", "<e1>"])
    assert np.array_equal(
        encode_texts(load_encoder(tmp_path / "out"), ["big [WORLD]", "<e1>"]), vectors
    )
    for source in (tmp_path / "run", tmp_path / "out"):
        start["model"]["init_from"] = str(source)
        rows = seeded_model(config(), 17).embeddings.word.weight.numpy()
        assert np.array_equal(rows, trained.model.embeddings.word.weight.numpy())


# ------------------------------------------------------------------------------------- transformers

LONG = "the river and the stone and the tree " * 40


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folders of all architectures, and their vectors."""
    folder = tmp_path_factory.mktemp("theirs")
    return folder, run_torch("make_models.py", "make", folder, given=[*TEXTS, LONG])


@pytest.mark.timeout(600)
@needs_torch
def test_the_vectors_of_sentence_transformers(theirs: tuple[Path, dict[str, Any]]) -> None:
    folder, made = theirs
    given = [*TEXTS, LONG]
    for name in CASES:
        encoder = load_encoder(folder / name)
        assert encoder.longest("query") == made[name]["max"]
        for side in ("query", "document"):
            vectors = encode_texts(encoder, given, side=side, batch_size=len(given))  # type: ignore[arg-type]
            difference = abs(vectors - np.array(made[name][side])).max()
            print(f"{name}, {side}: largest difference {difference:.2g}")
            assert difference < TOLERANCE
        write_hugging_face(encoder, folder / "written" / name)
    written = run_torch("make_models.py", "encode", folder / "written", given=given)
    for name in CASES:
        difference = abs(np.array(written[name]) - np.array(made[name]["document"])).max()
        print(f"{name}, written: largest difference {difference:.2g}")
        assert difference < TOLERANCE


@pytest.mark.timeout(600)
@needs_torch
@needs_converter
def test_onnxruntime_has_the_vectors_of_mpnet(
    theirs: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Whose positions paddle2onnx gives a wrong shape, which onnxruntime believes."""
    encoder = load_encoder(theirs[0] / "mpnet")
    write_onnx(encoder, tmp_path / "served")
    found = run_torch("with_transformers.py", "onnx", tmp_path / "served", given=TEXTS)
    assert list(found["inputs"]) == ["input_ids", "attention_mask"]
    difference = abs(np.array(found["sentence_embedding"]) - encode_texts(encoder, TEXTS)).max()
    assert difference < TOLERANCE
