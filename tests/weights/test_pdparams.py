"""A ``.pdparams`` file of a stranger: arrays are read, code is refused by name and never run."""

from __future__ import annotations

import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights, read_pdparams


class Calls:
    """Pickled, it calls `function` where it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.what


def written(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


def files_that_run_code(folder: Path) -> dict[str, tuple[bytes, str]]:
    """Files that make the file ``ran`` where they are loaded: name -> (bytes, what is named)."""
    ran = folder / "ran"
    shell = f"touch {ran}"
    array = np.zeros(2, "float32")
    whole = {"weight": array, "bias": Calls(os.system, shell)}
    return {
        "os.system": (pickle.dumps(Calls(os.system, shell), 4), "posix.system"),
        "protocol 0, beside an array": (pickle.dumps(whole, 0), "posix.system"),
        "getattr": (pickle.dumps(Calls(getattr, array, "tofile"), 4), "builtins.getattr"),
        "a class of our own": (
            b"cpaddle_recompute.app.launch\nlaunch\n(tR.",
            "paddle_recompute.app.laun",
        ),
        "a dotted name": (b"\x80\x04\x8c\x05numpy\x8c\x0cos.path.join\x93.", "numpy.os.path.join"),
        "a line feed": (b"\x80\x04\x8c\x05numpy\x8c\x05a\nb\x1bc\x93.", r"numpy.a\nb\x1bc"),
        "INST": (b"(S'" + shell.encode() + b"'\nios\nsystem\n.", ""),
        "OBJ": (b"(cos\nsystem\nS'" + shell.encode() + b"'\no.", "os.system"),
        "an extension code": (b"\x80\x02\x82\x01.", ""),
        "persistent id": (b"Psystem\n.", ""),
        "a state for a name": (b"cnumpy\nndarray\n}S'a'\nS'b'\nsb.", ""),
        "a call of ndarray": (b"cnumpy\nndarray\n(I9999999999\ntR.", ""),
        "an array of objects": (pickle.dumps({"a": np.array([object()])}, 4), ""),
    }


@pytest.mark.parametrize("name", files_that_run_code(Path("/nowhere")))
def test_a_file_that_would_run_code_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, named = files_that_run_code(tmp_path)[name]
    if name == "os.system":  # it does make the file where it is loaded
        pickle.loads(content)
        (tmp_path / "ran").unlink()
    file = tmp_path / "model.pdparams"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_weights(paddle.nn.Linear(2, 2), file)
    assert not (tmp_path / "ran").exists()
    assert str(caught.value).startswith(f"{file}: ")
    if named:
        assert f"names {named}" in str(caught.value)
        assert "nothing of it was run" in str(caught.value)


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_paddle_writes_is_read(tmp_path: Path, protocol: int) -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.BatchNorm1D(5))
    other = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.BatchNorm1D(5))
    file = tmp_path / "model.pdparams"
    paddle.save(model.state_dict(), str(file), protocol=protocol)
    load_weights(other, file)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), other.state_dict()[name].numpy())
    content = {"n": 3, "of": {"a": paddle.ones([2]), "list": [1.5, "x", None, True]}}
    paddle.save(content, str(file), protocol=protocol)
    found = read_pdparams(file)
    np.testing.assert_array_equal(found["of"].pop("a"), np.ones(2, "float32"))
    assert found == {"n": 3, "of": {"list": [1.5, "x", None, True]}}


@pytest.mark.parametrize("protocol", range(6))
def test_what_numpy_writes_is_read(tmp_path: Path, protocol: int) -> None:
    arrays = OrderedDict(
        matrix=np.arange(6, dtype="float64").reshape(2, 3),
        fortran=np.asfortranarray(np.arange(6, dtype="int32").reshape(2, 3)),
        big_endian=np.arange(3, dtype=">f4"),
        scalar=np.float32(2.5),
        none=np.zeros([0, 3], "bool"),
        point=np.array(7, "uint16"),
    )
    found = read_pdparams(written(tmp_path / "a.pdparams", arrays, protocol))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("="), name


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x04\x8e" + (2**60).to_bytes(8, "little"), id="announces 2**60 bytes"),
        pytest.param(b"\x80\x04\x95" + (2**40).to_bytes(8, "little"), id="a frame of 2**40 bytes"),
        pytest.param(b"N" + b"r\xff\xff\xff\xff" + b".", id="4,294,967,295th entry of the memo"),
        pytest.param(b"]" * 100_000 + b"a" * 99_999 + b".", id="100,000 lists in lists"),
        pytest.param(
            b"]q\x00." [:-1] + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq"
                                        + bytes([i + 1]) for i in range(100)) + b".",
            id="2**100 lists",
        ),
        pytest.param(b"I" + b"9" * 100_000 + b"\n.", id="100,000 digits"),
        pytest.param(b"", id="empty"),
        pytest.param(b".", id="ends at once"),
    ],
)  # fmt: skip
def test_bombs_are_refused_at_once(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "bomb.pdparams"
    file.write_bytes(content)
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"bomb\.pdparams: "):
        load_weights(paddle.nn.Linear(2, 2), file)
    assert time.process_time() - began < 1
