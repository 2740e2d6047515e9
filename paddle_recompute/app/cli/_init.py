"""``init``: a first configuration, fitted to the pairs and to this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

import paddle_recompute.app
from paddle_recompute._files import write_text
from paddle_recompute.app.cli._process import (
    as_json,
    command,
    prepare_one_process,
    tell_written,
    words_apart,
)
from paddle_recompute.app.config import ARCHITECTURES, load_config, model_folder
from paddle_recompute.app.templates import render
from paddle_recompute.errors import ConfigError, DataError

_TEMPLATE = Path(__file__).with_name("run.yaml.j2")
_FEWEST_PAIRS = 40
_MOST_NEGATIVES = 4
"""Of each pair in a batch; a batch encodes all of them."""
# A Chinese, Japanese or Korean character is about a token; of other writing, four letters are.
_TOKENS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_]{1,4}|[^\w\s]")


class _Machine(NamedTuple):
    """The devices of this machine; `card_bytes` is the memory of a GPU, 0 without one."""

    device: str
    ranks: int
    card_bytes: int


@command(
    click.argument("pairs", required=False, metavar="[PAIRS]"),
    click.option(
        "--from", "name", metavar="NAME", help="Copy a configuration of this package as it is."
    ),
    click.option(
        "--from-model",
        "model",
        metavar="FOLDER",
        help="Begin with a pretrained model: a run, or a folder of Hugging Face or PaddleNLP.",
    ),
    click.option("--output", default="run.yaml", show_default=True, metavar="FILE"),
    as_json,
)
def init(
    pairs: str | None, name: str | None, model: str | None, output: str, as_json: bool
) -> None:
    """Write a first configuration for your pairs.

    For example: paddle-recompute init pairs.tsv --output run.yaml

    Or: paddle-recompute init --from-model all-MiniLM-L6-v2 pairs.tsv

    It is commented, and made for the text pairs in PAIRS and this machine. Reads all of PAIRS (.tsv
    or .jsonl, also .gz) and counts GPUs or cores. --from copies one of the configurations that come
    with the package instead. Overwrites nothing.
    """
    file = Path(output)
    if pairs is not None and name is not None:
        raise ConfigError(
            f"--from {name}: is copied as it is, so {pairs} has no effect; give one of them"
        )
    if model is not None and pairs is None:
        raise ConfigError(f"--from-model {model}: needs a file of pairs to train on, too")
    if os.path.lexists(file):
        raise ConfigError(f"{file}: exists already; name another file with --output")
    known = _shipped()
    if pairs is not None:
        with words_apart(as_json):
            click.echo(f"reading {pairs}")
            text = _fitted(Path(pairs), file, Path(model) if model is not None else None)
    elif name in known:
        text = known[name].read_text(encoding="utf-8")
    else:
        unknown = "init needs a file of pairs, or --from" if name is None else f"--from {name}:"
        raise ConfigError(f"{unknown} with one of: {', '.join(sorted(known))}")
    with tempfile.TemporaryDirectory() as folder:
        tried = Path(folder) / "run.yaml"
        tried.write_text(text, encoding="utf-8")
        load_config(tried)
    write_text(file, text, "name another file with --output")
    train = f"paddle-recompute train --config {shlex.quote(str(file))}"
    tell_written(file, f"written: {file}; train with: {train}", as_json, train=train)


def _shipped() -> dict[str, Path]:
    """The configurations that come with the package, or lie beside it in a checkout, by name."""
    app = Path(paddle_recompute.app.__path__[0])
    folders = (app / "fleet_configs", app.parents[1] / "fleet_configs")
    return {file.stem: file for folder in folders for file in folder.glob("*.yaml")}


def _this_machine() -> _Machine:
    prepare_one_process("")
    import paddle

    gpus = paddle.device.cuda.device_count() if paddle.is_compiled_with_cuda() else 0
    if gpus:
        card = paddle.device.cuda.get_device_properties(0).total_memory
        return _Machine("gpu", gpus, int(card))
    return _Machine("cpu", min(2, len(os.sched_getaffinity(0))), 0)


def _fitted(path: Path, file: Path, model: Path | None) -> str:
    """The configuration for the pairs in `path`, which will be in `file`.

    Raises:
        ConfigError: A name cannot stand in it, or `model` is no folder of a model.
        DataError: The pairs cannot be read or held out.
    """
    from paddle_recompute.app.data import read_pairs, split_pairs

    if not f"{path.absolute()}{file}{model}".isprintable():
        raise ConfigError(
            f"{str(path)!r}, {str(file)!r}, {str(model)!r}: a character is not printable, such as "
            "a line break, which a configuration cannot hold; rename the file"
        )
    described = model_folder(model) if model is not None else None
    if described is None and model is not None:
        raise ConfigError(
            f"--from-model {model}: is no folder of a model: it has no checkpoint, no config.json"
        )
    longest = (described.limits if described is not None else None) or (512, 512)
    found = read_pairs(path, on_bad_line="skip")
    if found.skipped:
        click.echo(f"{len(found.skipped)} lines are no pairs, the first: {found.skipped[0]}")
    for note in found.notes:
        click.echo(note)
    pairs = list(dict.fromkeys(found.pairs))
    count = len(pairs)
    if count < _FEWEST_PAIRS:
        raise DataError(
            f"{path}: {count} different pairs; training and evaluation need {_FEWEST_PAIRS}"
        )
    valid = min(2000, count // 10)
    try:
        train = split_pairs(pairs, valid_pairs=valid, seed=0).train
    except DataError as error:
        raise DataError(f"{path}: training would refuse these pairs: {error}") from error
    machine = _this_machine()
    negatives = [len(set(pair.negatives)) for pair in pairs]
    per_rank = 1024 if machine.card_bytes else 128
    while per_rank > 2 and per_rank * machine.ranks * 4 > len(train):
        per_rank //= 2
    kind = described.settings.get("name", "ernie") if described is not None else ""
    return render(
        _TEMPLATE,
        pairs=path,
        file=shlex.quote(str(file)),
        count=count,
        least=min(negatives),
        most=max(negatives),
        hard_negatives=min(max(min(negatives), 1), _MOST_NEGATIVES),
        without=negatives.count(0),
        several=sum(count > 1 for count in Counter(pair.query for pair in pairs).values()),
        skipped=len(found.skipped),
        per_rank=per_rank,
        machine=machine,
        budget=machine.card_bytes * 3 // 4 // 2**30,
        queries=min(longest[0], _longest([pair.query for pair in pairs])),
        positives=min(
            longest[1],
            _longest([text for pair in pairs for text in (pair.positive, *pair.negatives)]),
        ),
        model=json.dumps(str(model.absolute()), ensure_ascii=False) if model is not None else "",
        kind=kind,
        is_decoder=kind in ARCHITECTURES and ARCHITECTURES[kind].is_decoder,  # or a user's Layer
        valid=valid,
        pool=min(10_000, len({pair.positive for pair in pairs})),
        train_file=json.dumps(str(path.absolute()), ensure_ascii=False),
        output_dir=json.dumps(f"outputs/{file.stem}", ensure_ascii=False),
    )


def _longest(texts: Sequence[str]) -> int:
    """Tokens of the longest text but for one in a hundred, as estimated; a multiple of 8."""
    counts = sorted(len(_TOKENS.findall(text)) for text in texts)
    return min(512, -(-(counts[len(counts) * 99 // 100] + 2) // 8) * 8)
