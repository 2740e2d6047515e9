"""Weights come back bit by bit, whole or not at all, and a wrong file is told what is wrong."""

from __future__ import annotations

import json
import stat
import struct
import warnings
from pathlib import Path

import numpy as np
import paddle
import pytest
import safetensors.numpy

from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights, save_weights
from paddle_recompute.weights import weights as weights_module

SUFFIXES = [".pdparams", ".safetensors"]


class Small(paddle.nn.Layer):
    """Two matrices, a scalar and an integer buffer; another seed gives other values."""

    def __init__(self, seed: int, width: int = 4) -> None:
        super().__init__()
        paddle.seed(seed)
        self.first = paddle.nn.Linear(3, width)
        self.second = paddle.nn.Linear(width, 2)
        self.scale = self.create_parameter(
            [], default_initializer=paddle.nn.initializer.Constant(1.5 + seed)
        )
        self.register_buffer("steps", paddle.to_tensor([seed, 7], dtype="int64"))


@pytest.fixture(params=SUFFIXES)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"model{request.param}"


def bits(model: paddle.nn.Layer) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of everything that a file holds."""
    return {
        name: (str(tensor.dtype), tuple(tensor.shape), tensor.numpy().tobytes())
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_weights_come_back_bit_by_bit(file: Path, dtype: str) -> None:
    saved, loaded, narrow = Small(1), Small(2), Small(2)
    rare = [np.nan, np.inf, -np.inf, -0.0, 1e-45, 3.4e38, 0.1, -1.0]
    saved.second.weight.set_value(np.array(rare, np.float32).reshape(4, 2))
    for one, kind in ((saved, dtype), (loaded, dtype), (narrow, "bfloat16")):
        one.to(dtype=kind)
    assert bits(saved) != bits(loaded)
    save_weights(saved, file)
    load_weights(loaded, str(file))
    assert len(bits(loaded)) == 6
    assert bits(loaded) == bits(saved)
    load_weights(narrow, file)  # in the type of the model
    saved.to(dtype="bfloat16")
    assert bits(narrow) == bits(saved)


def test_others_read_our_files(tmp_path: Path) -> None:
    """What Paddle writes is read in test_pdparams.py."""
    saved, loaded = Small(1), Small(2)
    save_weights(saved, tmp_path / "model.pdparams")
    loaded.set_state_dict(paddle.load(str(tmp_path / "model.pdparams")))
    assert bits(loaded) == bits(saved)
    save_weights(saved, tmp_path / "model.safetensors")
    found = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    for name, tensor in saved.state_dict().items():
        np.testing.assert_array_equal(found[name], tensor.numpy())
        assert found[name].shape == tuple(tensor.shape)


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """By the format's description: length of the header, header in JSON, bytes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_bfloat16_of_others_is_read(tmp_path: Path) -> None:
    model = paddle.nn.Linear(2, 2)
    content = np.array([0x3F80, 0xC000, 0x3E80, 0x0000], "<u2").tobytes()
    bias = np.array([0x4040, 0x3F00], "<u2").tobytes()
    write_safetensors(
        tmp_path / "other.safetensors",
        {"weight": ("BF16", [2, 2], content), "bias": ("BF16", [2], bias)},
    )
    load_weights(model, tmp_path / "other.safetensors")
    assert model.weight.dtype == paddle.float32
    np.testing.assert_array_equal(model.weight.numpy(), [[1.0, -2.0], [0.25, 0.0]])
    np.testing.assert_array_equal(model.bias.numpy(), [3.0, 0.5])


def test_a_wrapper_for_data_parallel_leaves_no_trace(tmp_path: Path) -> None:
    model, loaded = Small(1), Small(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "not in a parallel environment"
        parallel = paddle.DataParallel(model)
        other = paddle.DataParallel(loaded)
    save_weights(parallel, tmp_path / "model.pdparams")
    load_weights(other, tmp_path / "model.pdparams")
    assert bits(loaded) == bits(model)


def test_every_fault_is_named_and_nothing_is_loaded(file: Path) -> None:
    saved = Small(1, width=5)
    saved.third = paddle.nn.Linear(2, 2)
    del saved.scale
    saved.register_buffer("steps", paddle.to_tensor([1.0, 7.0]))
    save_weights(saved, file)
    model = Small(2)
    before = bits(model)
    with pytest.raises(CheckpointError, match="does not fit the model") as caught:
        load_weights(model, file)
    message = str(caught.value)
    for part in (
        "missing: scale;",
        "unexpected: third",
        "first.weight [3, 5] (the model: [3, 4])",
        "first.bias [5] (the model: [4])",
        "second.weight [5, 2] (the model: [4, 2])",
        "floating point where the model has integers: steps.",
        "Build the model with the dimensions that the file was saved with",
    ):
        assert part in message
    assert bits(model) == before
    many = paddle.nn.LayerList([paddle.nn.Linear(2, 2) for _ in range(6)])
    with pytest.raises(CheckpointError, match=r"2\.weight and 7 more; unexp.*The names differ"):
        load_weights(many, file)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"weight": ("U16", [1], b"\x01\x00")})
    (tmp_path / "folder.safetensors").mkdir()
    save_weights(Small(1), tmp_path / "half.safetensors")
    whole = (tmp_path / "half.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    for name in ("model.pt", "model.PDPARAMS"):
        (tmp_path / name).touch()
    (tmp_path / "page.pdparams").write_bytes(b"<html><body>404</body></html>")
    for number, content in enumerate(([1, 2], {"weight": {"nested": 1}}, {"weight": "text"})):
        paddle.save(content, str(tmp_path / f"other{number}.pdparams"))
    for name, told in (
        ("m.safetensors", r"types that Paddle's layers do not have: weight \("),
        *[(f"other{number}.pdparams", "contains no weights") for number in range(3)],
        ("half.safetensors", r"half\.safetensors: "),
        ("page.pdparams", r"page\.pdparams: "),
        ("none.pdparams", r"none\.pdparams: there is no such file"),
        ("folder.safetensors", "this folder holds none of"),
        ("model.pt", r"allowed are \.pdparams and \.safetensors"),
        ("model.PDPARAMS", r"allowed are \.pdparams and \.safetensors"),
    ):
        with pytest.raises(CheckpointError, match=told):
            load_weights(paddle.nn.Linear(1, 1), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"allowed are \.pdparams and \.safetensors"):
        save_weights(Small(1), tmp_path / "model")
    assert not (tmp_path / "model").exists()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_weights(Small(1), tmp_path / "m.safetensors" / "model.pdparams")


def test_a_write_that_fails_leaves_what_was_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_weights(Small(1), file)
    before = file.read_bytes()

    def half(path: Path | str, *_: object) -> None:
        with Path(path).open("wb") as unfinished:
            unfinished.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(weights_module.paddle, "save", lambda state, path: half(path))
    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)"):
        save_weights(Small(2), file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_new_file_lies_in_a_new_folder_and_others_may_read_it(file: Path) -> None:
    plain = file.parent / "plain"
    plain.touch()
    file = file.parent / "a" / "b" / file.name
    save_weights(Small(1), file)
    expected = stat.S_IMODE(plain.stat().st_mode)
    assert stat.S_IMODE(file.stat().st_mode) == expected
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("function", "error"),
    [("is_dir", PermissionError(13, "Permission denied")), ("read_bytes", MemoryError())],
    ids=["a folder of others", "memory"],
)
def test_what_the_system_refuses_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: BaseException
) -> None:
    file = tmp_path / "model.safetensors"
    save_weights(Small(1), file)

    def refuse(_: Path) -> None:
        raise error

    monkeypatch.setattr(Path, function, refuse)
    with pytest.raises(CheckpointError, match=r"cannot be read \(.*(denied|out of memory)"):
        load_weights(Small(2), file)
