"""Lines, files and words that are far too large: told at once, in little memory."""

from __future__ import annotations

import gzip
import json
import resource
import time
from pathlib import Path

import pytest

from paddle_recompute.app.data import load_tokenizer, read_pairs
from paddle_recompute.app.data.tokenizer import train_tokenizer
from paddle_recompute.errors import DataError

GOOD = b"cat\tKatze\n"


def packed(path: Path, *parts: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for part in parts:
            file.write(part)
    return path


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_bomb_of_one_line_is_a_bad_line(tmp_path: Path) -> None:
    file = packed(tmp_path / "p.tsv.gz", GOOD, *[b"a" * (1 << 20)] * 128, b"\n", GOOD)
    assert file.stat().st_size < 1 << 20
    before = peak_mib()
    with pytest.raises(DataError, match=r"p\.tsv\.gz:2: longer than 1048576 bytes \(the lim"):
        read_pairs(file)
    found = read_pairs(file, on_bad_line="skip")
    assert (len(found.pairs), len(found.skipped)) == (2, 1)
    assert peak_mib() - before < 64


def test_a_bomb_is_too_large(tmp_path: Path) -> None:
    file = packed(tmp_path / "p.tsv.gz", *[b"a" * (1 << 20)] * 100)
    with pytest.raises(DataError, match=r"larger than 1000000 bytes \(data\.max_file\), unpacked"):
        read_pairs(file, max_file=1_000_000, on_bad_line="skip")


def test_the_longest_line_is_still_good(tmp_path: Path) -> None:
    file = tmp_path / "p.tsv"
    line = b"a\t" + b"b" * 95 + b"\n"
    # The mark does not count, nor hide the end; the last line may have none.
    for content in (line * 2, b"\xef\xbb\xbf" + line * 2, line + line[:-1]):
        file.write_bytes(content)
        assert len(read_pairs(file, max_line=len(line)).pairs) == 2
        for limit in range(92, 97):
            with pytest.raises(DataError, match=rf"p\.tsv:1: longer than {limit} bytes"):
                read_pairs(file, max_line=limit)


@pytest.mark.parametrize("number", ["9" * 100_000, "[" * 200_000])
def test_numbers_of_thousands_of_digits_are_bad_lines(tmp_path: Path, number: str) -> None:
    file = tmp_path / "p.jsonl"
    good = json.dumps({"query": "cat", "positive": "Katze"})
    file.write_text(f'{good}\n{{"query": {number}, "positive": "x"}}\n')
    with pytest.raises(DataError, match=r"p\.jsonl:2: not "):
        read_pairs(file)
    found = read_pairs(file, on_bad_line="skip")
    assert (len(found.pairs), len(found.skipped)) == (1, 1)


@pytest.mark.parametrize("letters", ["a", " x"], ids=ascii)
def test_time_is_linear_in_the_length_of_a_word(tmp_path: Path, letters: str) -> None:
    """Ten times the length takes about ten times as long, not a hundred times."""
    seconds = []
    for length in (10_000, 100_000):
        began = time.process_time()
        file = tmp_path / f"{length}.json"
        train_tokenizer(["cat dog", "cat dog", letters * length], file, 900)
        load_tokenizer(file).tokenize([letters * length], 64)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 40 * max(seconds[0], 0.02)


_SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}
_WORD_PIECE = {"type": "WordPiece", "unk_token": "[UNK]"}
_WORD_PIECE |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
TOKENIZERS = {
    "empty": "",
    "a list": "[]",
    "vocab is a number": '{"model": {"vocab": 3}}',
    "an empty vocab": '{"model": {"vocab": {}}}',
    "closed, nested 100,000 deep": '{"model": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "nested 200 deep": '{"model": {"vocab": {}}, "a": ' + "[" * 200 + "]" * 200 + "}",
    "a negative number": '{"model": {"type": "WordPiece", "vocab": {"a": -1}}}',
    "2**31 entries": json.dumps({"model": {**_WORD_PIECE, "vocab": {**_SPECIAL, "a": 2**31}}}),
    "5,000 digits": '{"model": {"vocab": {"a": ' + "9" * 5000 + "}}}",
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_bad_tokenizer_is_refused_at_once(tmp_path: Path, name: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(TOKENIZERS[name])
    began = time.process_time()
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        load_tokenizer(file)
    assert time.process_time() - began < 1
