"""A ``.pdparams`` file of a stranger: arrays are read, code is refused by name and never run."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute.errors import CheckpointError
from paddle_recompute.weights import load_weights, read_pdparams, save_weights


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
    shell, makes = f"touch {ran}", f"open({str(ran)!r}, 'w').close()"
    array = np.zeros(2, "float32")
    whole = {"weight": array, "bias": Calls(os.system, shell)}
    found = {
        "os.system": (pickle.dumps(Calls(os.system, shell), 4), "posix.system"),
        "inside a dict of arrays": (pickle.dumps(whole, 4), "posix.system"),
        "protocol 0": (pickle.dumps(whole, 0), "posix.system"),
        "protocol 2": (pickle.dumps(whole, 2), "posix.system"),
        "protocol 5": (pickle.dumps(whole, 5), "posix.system"),
        "eval": (pickle.dumps(Calls(eval, makes), 4), "builtins.eval"),
        "exec": (pickle.dumps(Calls(exec, makes), 4), "builtins.exec"),
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
    return found


@pytest.mark.parametrize("name", files_that_run_code(Path("/nowhere")))
def test_a_file_that_would_run_code_is_refused_by_name(tmp_path: Path, name: str) -> None:
    content, named = files_that_run_code(tmp_path)[name]
    file = tmp_path / "model.pdparams"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_weights(paddle.nn.Linear(2, 2), file)
    assert not (tmp_path / "ran").exists()
    assert str(caught.value).startswith(f"{file}: ")
    if named:
        assert f"names {named}" in str(caught.value)
        assert "nothing of it was run" in str(caught.value)


def test_those_files_do_run_code(tmp_path: Path) -> None:
    """Guards the test above."""
    pickle.loads(files_that_run_code(tmp_path)["os.system"][0])
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_paddle_writes_is_read(tmp_path: Path, protocol: int) -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.BatchNorm1D(5))
    file = tmp_path / "model.pdparams"
    paddle.save(model.state_dict(), str(file), protocol=protocol)
    other = paddle.nn.Sequential(paddle.nn.Linear(3, 5), paddle.nn.BatchNorm1D(5))
    load_weights(other, file)
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), other.state_dict()[name].numpy())


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


def test_nested_values_are_read(tmp_path: Path) -> None:
    content = {"n": 3, "of": {"a": paddle.ones([2]), "list": [1.5, "x", None, True]}}
    paddle.save(content, str(tmp_path / "a.pdparams"))
    found = read_pdparams(tmp_path / "a.pdparams")
    np.testing.assert_array_equal(found["of"].pop("a"), np.ones(2, "float32"))
    assert found == {"n": 3, "of": {"list": [1.5, "x", None, True]}}


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


def test_changed_bytes_end_in_our_error_or_in_arrays(tmp_path: Path) -> None:
    file = tmp_path / "model.pdparams"
    save_weights(paddle.nn.Linear(3, 2), file)
    whole = file.read_bytes()
    chance = random.Random(0)
    for _ in range(int(os.environ.get("FUZZ_FILES", "500"))):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            content[chance.randrange(len(content))] = chance.randrange(256)
        file.write_bytes(content)
        try:
            read_pdparams(file)
        except CheckpointError as error:
            assert "\n" not in str(error)
