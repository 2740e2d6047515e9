"""Whatever bytes a file holds, a reader returns or raises an error of the library's own.

`READER_EXAMPLES` sets the number of examples of each test: 25 in a test run;
``make fuzz-readers READER_EXAMPLES=100000`` for a night.
"""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paddle_recompute.app.config import load_config
from paddle_recompute.app.data import load_tokenizer, read_judged, read_pairs
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.planner import RecomputePlan
from paddle_recompute.weights import load_weights, read_pdparams
from tests.app.config.bad_files import BAD_FILES, GOOD
from tests.app.data.test_judged import FILES as JUDGED
from tests.app.data.test_limits import TOKENIZERS
from tests.test_checkpoint import STATES, save

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-readers-"))
bounded = settings(
    max_examples=int(os.environ.get("READER_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner),
    max_leaves=20,
)


def reads(reader: Callable[[], Any]) -> None:
    """Call `reader`; it may refuse, in words."""
    try:
        reader()
    except PaddleRecomputeError as error:
        assert str(error)


def changed(contents: list[bytes]) -> st.SearchStrategy[bytes]:
    """One of `contents` with a piece replaced, cut off, or doubled."""

    @st.composite
    def change(draw: st.DrawFn) -> bytes:
        content = draw(st.sampled_from(contents))
        first = draw(st.integers(0, len(content)))
        last = draw(st.integers(first, min(len(content), first + 16)))
        piece = draw(st.binary(max_size=8) | st.just(content[first:last] * 2))
        rest = b"" if draw(st.booleans()) and draw(st.booleans()) else content[last:]
        return content[:first] + piece + rest

    return change()


def written(name: str, content: bytes) -> Path:
    path = FOLDER / name
    path.write_bytes(content)
    return path


def encoded(texts: list[str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts if len(text) < 5000]


@bounded
@given(st.binary(max_size=300) | changed(encoded([GOOD, *BAD_FILES.values()])))
def test_configuration(content: bytes) -> None:
    reads(lambda: load_config(written("run.yaml", content)))


@bounded
@given(st.text(max_size=60) | st.tuples(st.sampled_from(
    ["train.seed", "train.output_dir", "model.preset", "data", "recompute.checkpoints"]
), values).map(lambda pair: f"{pair[0]}={json.dumps(pair[1])}"))  # fmt: skip
def test_override(text: str) -> None:
    file = written("run.yaml", GOOD.encode())
    reads(lambda: load_config(file, [text]))


LINES = [b"query\tpositive\ncat\tKatze\n", b"\xef\xbb\xbfa\tb\tc\n\n", b"a\t\n", b"\r\n"]
LINES += [b"query\ttitle\tpositive\tlabel\na\tb\tc\t1\n", b"a\tb\t0\nc\td\t1\n"]


@bounded
@given(st.binary(max_size=200) | changed(LINES), st.sampled_from(["raise", "skip"]), st.booleans())
def test_tsv(content: bytes, on_bad_line: Any, packs: bool) -> None:
    file = written("p.tsv.gz", gzip.compress(content)) if packs else written("p.tsv", content)
    reads(lambda: read_pairs(file, on_bad_line=on_bad_line, max_line=64, max_file=150))


@bounded
@given(changed([gzip.compress(b"cat\tKatze\n" * 50)]))
def test_gz(content: bytes) -> None:
    file = written("p.tsv.gz", content)
    reads(lambda: read_pairs(file, max_file=10_000))


@bounded
@given(values, st.sampled_from(["raise", "skip"]))
def test_jsonl(value: Any, on_bad_line: Any) -> None:
    good = {"query": value, "positive": "x", "negatives": value}
    lines = [json.dumps(value), json.dumps(good), json.dumps({"query": "a", "positive": value})]
    file = written("p.jsonl", "\n".join(lines).encode("utf-8", "surrogatepass"))
    for negatives in ((0, 0), (2, 9)):
        reads(lambda n=negatives: read_pairs(file, on_bad_line=on_bad_line, negatives=n))


DPR = b'[{"question": "a", "positive_ctxs": [{"title": "b", "text": "c"}], "answers": []}]'


@bounded
@given(
    changed([DPR, b'{"anchor": "a", "pos": ["b"], "label": 1}\n' * 2])
    | values.map(lambda value: json.dumps([value, {"query": "a", "pos": value}]).encode()),
    st.sampled_from(["raise", "skip"]),
)
def test_json(content: bytes, on_bad_line: Any) -> None:
    file = written("p.json", content)
    reads(lambda: read_pairs(file, on_bad_line=on_bad_line, max_file=1000))


@bounded
@given(st.sampled_from(sorted(JUDGED)), st.data())
def test_judged(name: str, data: st.DataObject) -> None:
    content = JUDGED[name].encode()
    entry = values.map(lambda value: json.dumps({"_id": value, "title": value, "text": "a"}))
    lines = changed([content]) | entry.map(lambda line: content + line.encode())
    folder = FOLDER / "judged"
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for other, text in JUDGED.items():
        (folder / other).write_bytes(data.draw(lines) if other == name else text.encode())
    reads(lambda: read_judged(folder))


@bounded
@given(
    changed(encoded(list(TOKENIZERS.values())))
    | values.map(lambda value: json.dumps({"model": {"vocab": value}}).encode())
)
def test_tokenizer(content: bytes) -> None:
    reads(lambda: load_tokenizer(written("tokenizer.json", content)))


@bounded
@given(
    changed([b"[PAD]\n[UNK]\n[CLS]\n[SEP]\ncat\n##s\n"]),
    changed([b'{"do_lower_case": true}']) | values.map(lambda value: json.dumps(value).encode()),
)
def test_vocabulary(content: bytes, beside: bytes) -> None:
    written("tokenizer_config.json", beside)
    reads(lambda: load_tokenizer(written("vocab.txt", content)))


@bounded
@given(
    changed(encoded([*STATES.values(), '{"step": 3, "config": {}}']))
    | values.map(lambda value: json.dumps({"step": value, "x": value}).encode())
)
def test_state(content: bytes) -> None:
    folder = FOLDER / "states"
    checkpoint = save(folder, 1).folder
    (checkpoint / "state.json").write_bytes(content)
    write_manifest(checkpoint)
    reads(lambda: find_checkpoint(folder))


@bounded
@given(values, st.binary(max_size=100))
def test_plan(value: Any, content: bytes) -> None:
    plan = {"format": 1, "checkpoints": value, "costs": value}
    for text in (json.dumps(plan).encode(), json.dumps(value).encode(), content):
        file = written("plan.json", text)
        reads(lambda file=file: RecomputePlan.load(file))


PICKLES = [
    pickle.dumps({"a": np.zeros((2, 3), "float32"), "b": np.ones(2, ">i8")}, protocol)
    for protocol in range(6)
]


@bounded
@given(st.binary(max_size=200) | changed(PICKLES))
def test_pdparams(content: bytes) -> None:
    reads(lambda: read_pdparams(written("a.pdparams", content)))


@bounded
@given(st.data())
def test_checkpoint(data: st.DataObject) -> None:
    folder = FOLDER / "checkpoints"
    checkpoint = save(folder, 1).folder
    file = checkpoint / data.draw(st.sampled_from(sorted(p.name for p in checkpoint.iterdir())))
    file.write_bytes(data.draw(changed([file.read_bytes()])))
    lists_it = data.draw(st.booleans())
    if lists_it:  # its writer has listed what it wrote
        write_manifest(checkpoint)

    def read() -> None:
        found = find_checkpoint(folder)
        load_weights(paddle.nn.Sequential(paddle.nn.Linear(4, 4)), found.weights_file)
        found.optimizer_state()

    reads(read)
