"""The tokenizer: same texts, same vocabulary; matrices that say where a text ends."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from paddle_recompute.app.data import PairTokenizer, load_tokenizer, train_tokenizer
from paddle_recompute.app.data.tokenizer import SPECIAL_TOKENS
from paddle_recompute.app.data.tokenizer_cache import vocabulary_key
from paddle_recompute.errors import DataError
from tests.app.retrieval.make_models import tokenizer_of

TEXTS = ["a cat, a dog", "running cats", "Running dogs run", "猫跑", "狗和猫 run"] * 4
PAD, UNK, CLS, SEP = 0, 1, 2, 3


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(TEXTS, file, 500)
    return file


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> PairTokenizer:
    return load_tokenizer(path)


def pieces(path: Path, row: np.ndarray) -> list[str]:  # type: ignore[type-arg]
    library = tokenizers.Tokenizer.from_file(str(path))
    return [text_of(library.id_to_token(int(number))) for number in row]


def text_of(piece: str) -> str:
    """A piece is spelled in bytes, each a letter of its own: ``çĮ«`` is 猫."""
    if piece in SPECIAL_TOKENS:
        return piece
    prefix = "##" if piece.startswith("##") and len(piece) > 2 else ""
    return prefix + tokenizers.decoders.ByteLevel().decode([piece.removeprefix(prefix)])


def test_matrix(path: Path, tokenizer: PairTokenizer) -> None:
    matrix = tokenizer.encode(["猫跑 RÚN", "cats", ""], max_tokens=10)
    assert matrix.dtype == np.int64
    assert pieces(path, matrix[0]) == ["[CLS]", "猫", "跑", "run", "[SEP]"]
    assert matrix[1].tolist()[-1] == PAD
    assert matrix[2].tolist() == [CLS, SEP, PAD, PAD, PAD]


def test_long_texts_are_cut_and_counted(tokenizer: PairTokenizer) -> None:
    whole = tokenizer.encode(["a cat, a dog"], 99)
    assert whole.shape == (1, 7)
    for allowed in (2, 6, 7, 8):
        rows = tokenizer.tokenize(["a cat, a dog", "cat"], allowed)
        cut = rows.pad([0])
        assert cut.shape == (1, min(allowed, 7))
        assert cut[0, :-1].tolist() == whole[0, : cut.shape[1] - 1].tolist()
        assert cut[0, -1] == SEP
        assert rows.num_cut == (allowed < 7) + (allowed < 3)


def test_rows_are_padded_to_the_longest_of_them(
    tokenizer: PairTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tokenizer.encode([], 8).shape == (0, 0)
    texts = ["cat", "a cat, a dog", "", "a dog"]
    monkeypatch.setattr("paddle_recompute.app.data.tokenizer._TEXTS_AT_ONCE", 3)
    rows = tokenizer.tokenize(texts, 99)
    for places in ([0], [2, 1], [3, 3, 0], [0, 1, 2, 3]):
        expected = tokenizer.encode([texts[place] for place in places], 99)
        np.testing.assert_array_equal(rows.pad(places), expected)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_every_text_becomes_a_row_with_one_beginning_and_one_end(
    tokenizer: PairTokenizer, texts: list[str]
) -> None:
    assert tokenizer.tokenize(texts, 10_000).num_unknown == 0
    matrix = tokenizer.encode(texts, 8)
    assert matrix.shape[0] == len(texts)
    assert 2 <= matrix.shape[1] <= 8
    assert set(matrix.flatten().tolist()) <= set(range(tokenizer.vocab_size))
    for row in matrix.tolist():
        length = row.index(SEP) + 1
        assert row[0] == CLS
        assert row.count(CLS) == row.count(SEP) == 1
        assert PAD not in row[:length]
        assert set(row[length:]) <= {PAD}


def test_same_texts_give_the_same_file(tmp_path: Path) -> None:
    """Without care no two trainings agree, not even in one process."""
    texts = [
        " ".join(chr(97 + number * k % 26) + chr(97 + (number + k) % 26) for k in range(9))
        for number in range(400)
    ]
    for name in "abc":
        train_tokenizer(texts, tmp_path / name, 500)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


def test_vocabulary(path: Path) -> None:
    tree = json.loads(path.read_text(encoding="utf-8"))
    vocab = tree["model"]["vocab"]
    assert [vocab[token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert sorted(vocab.values()) == list(range(len(vocab)))
    spelled = {text_of(piece) for piece in vocab}
    assert {"猫", "run", "cat", "##n"} <= spelled
    assert "##猫" not in spelled  # a Chinese character is a word
    # No inner piece is a special token, as in what the library trains.
    added = [token["content"] for token in tree["added_tokens"]]
    assert added == list(SPECIAL_TOKENS)


def test_vocabulary_is_not_larger_than_asked_for(tmp_path: Path) -> None:
    many = ["".join(chr(0x4E00 + (place * 7 + k) % 900) for k in range(6)) for place in range(900)]
    many += ["the quick brown fox jumps over the lazy dog"] * 2000
    train_tokenizer(many, tmp_path / "tokenizer.json", 460)
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 460
    assert tokenizer.tokenize(["the quick fox", many[450]], 40).num_unknown == 0


def test_what_was_never_seen_is_told_apart(tokenizer: PairTokenizer) -> None:
    """A long word, too: it is split, and what comes behind the most tokens is cut as ever."""
    unseen = ["烨", "乫", "伥", "ж", "ß", "😀", "烨乫", "乫烨", "x烨"]
    words = ["ก" * 1000, "ก" * 999 + "ข", "n" * 5000]
    rows = tokenizer.encode(unseen + words, 20_000).tolist()
    assert len({tuple(row) for row in rows}) == len(rows)
    assert not any(UNK in row for row in rows)
    assert tokenizer.encode(words, 9).shape == (3, 9)


def test_saved_again(path: Path, tokenizer: PairTokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_bytes() == path.read_bytes()
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "copy.json"))
    text = "a running cat 猫 烨 😀"
    assert library.decode(library.encode(text).ids) == text
    # Truncation and padding in a file are not obeyed.
    library.enable_truncation(3)
    library.enable_padding(length=30)
    library.save(str(tmp_path / "other.json"))
    assert load_tokenizer(str(tmp_path / "other.json")).encode(TEXTS[:1], 99).shape == (1, 7)


def test_the_key_of_a_vocabulary_tells_texts_apart() -> None:
    assert len({vocabulary_key(texts, 100) for texts in (["a", "b"], ["ab"], ["b", "a"])}) == 3


def test_what_cannot_be_done_is_refused(tokenizer: PairTokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contain no word"):
        train_tokenizer(["", " "], tmp_path / "tokenizer.json", 100)
    for name in ("none.json", "vocab.txt"):
        with pytest.raises(
            DataError, match=rf"{name}: the tokenizer cannot be read \(No such file"
        ):
            load_tokenizer(tmp_path / name)


# ------------------------------------------------------------------------------------- vocab.txt

ENTRIES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "猫", "re", "!"]


def vocabulary(folder: Path, entries: list[str], config: str | None = None) -> Path:
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    path = folder / "vocab.txt"
    path.write_text("\n".join(entries) + "\n", encoding="utf-8")
    return path


def test_vocab_txt_is_read_as_bert_reads_it(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(vocabulary(tmp_path, ENTRIES))
    assert tokenizer.vocab_size == len(ENTRIES)
    found = tokenizer.encode(["The CATS猫!", "ré dog [SEP]"], 20)
    assert found[0].tolist() == [2, 4, 5, 6, 7, 9, 3]
    assert found[1].tolist()[:3] == [2, 8, 1]
    assert found[1].tolist().count(3) == 1  # [SEP] in a text is text
    # Python's `splitlines` would divide the second entry.
    divided = load_tokenizer(vocabulary(tmp_path, [*ENTRIES[:4], "a\u2028b", *ENTRIES[4:]]))
    assert divided.encode(["cat"], 9)[0].tolist() == [2, 6, 3]
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.sha256 == tokenizer.sha256
    np.testing.assert_array_equal(again.encode(["The CATS猫!"], 20), found[:1])


@pytest.mark.parametrize(
    ("config", "text", "expected"),
    [
        (None, "The", 10),  # an entry has a capital letter
        ('{"a": 1}', "The", 10),
        ('{"do_lower_case": null}', "The", 10),
        ('{"do_lower_case": true}', "The", 4),
        ('{"do_lower_case": false}', "THE", UNK),
        ('{"do_lower_case": true, "strip_accents": false}', "Ré", 11),
        ('{"tokenize_chinese_chars": false}', "猫猫", 12),
    ],
)
def test_the_settings_beside_a_vocab_txt_are_taken(
    config: str | None, text: str, expected: int, tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(vocabulary(tmp_path, [*ENTRIES, "The", "ré", "猫猫"], config))
    assert tokenizer.encode([text], 9)[0].tolist() == [2, expected, 3]


@pytest.mark.parametrize(
    ("entries", "config", "message"),
    [
        (
            ENTRIES,
            '{"do_lower_case": "false"}',
            "tokenizer_config.json: do_lower_case is 'false'",
        ),
        (ENTRIES, '{"do_lower_case": fal', "tokenizer_config.json: cannot be read"),
        (ENTRIES[1:], None, r"vocab.txt: not a vocab.txt .* has the entries \[PAD\]"),
        ([*ENTRIES, "cat\t4"], None, r"vocab.txt: not a vocab.txt .two entries have one id"),
        ([*ENTRIES, "cat\t-4"], None, r"vocab.txt: not a vocab.txt .a line is not entry<TAB>id"),
        (["a", *ENTRIES], None, r".* has \('\[PAD\]', 1\); the padding must be the entry 0"),
    ],
)
def test_bad_vocabularies_and_settings_beside_them_are_refused(
    entries: list[str], config: str | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}/{message}"):
        load_tokenizer(vocabulary(tmp_path, entries, config))


def test_a_tokenizer_that_cannot_read_every_text_is_refused(tmp_path: Path) -> None:
    load_tokenizer(vocabulary(tmp_path, [*ENTRIES, "a"])).save(file := tmp_path / "tokenizer.json")
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({**tree, "model": {**tree["model"], "unk_token": "[X]"}}))
    with pytest.raises(DataError, match=r"tokenizer.json: the tokenizer cannot read .*UNK"):
        load_tokenizer(file)


def test_one_capital_does_not_make_a_vocabulary_cased(tmp_path: Path) -> None:
    words = ["".join(chr(97 + (n * k) % 26) for k in (1, 3, 7)) for n in range(26)]
    path = vocabulary(tmp_path, [*ENTRIES, *dict.fromkeys(words), "McX", "猫咪", "12"])
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode(["The"], 9)[0].tolist() == [2, 4, 3]
    assert [note.removeprefix(str(path)) for note in tokenizer.notes] == [
        ": 1 of 31 entries have a capital letter, so texts become lower case; do_lower_case in a "
        "tokenizer_config.json beside it decides otherwise"
    ]
    (tmp_path / "tokenizer_config.json").write_text('\ufeff{"do_lower_case": false}')
    tokenizer = load_tokenizer(path)
    assert (tokenizer.encode(["The"], 9)[0].tolist(), tokenizer.notes) == ([2, UNK, 3], [])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_vocab_txt_as_ernie_publishes_it(mark: str, end: str, tmp_path: Path) -> None:
    """Entries with their ids; one twice, of which PaddleNLP takes the last."""
    lines = [f"{entry}\t{number}" for number, entry in enumerate([*ENTRIES, "cat", "a\u2028b"])]
    path = tmp_path / "vocab.txt"
    path.write_bytes((mark + end.join(lines) + end).encode())
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == len(ENTRIES) + 2
    assert tokenizer.encode(["the cat"], 9)[0].tolist() == [2, 4, len(ENTRIES), 3]
    assert tokenizer.notes[0].endswith("1 entries appear twice; the last id of each counts")


# ------------------------------------------------------------------------- tokenizers of others


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "qwen"])
def test_a_text_becomes_what_tokenizers_makes_of_it(kind: str, tmp_path: Path) -> None:
    library, names = tokenizer_of(kind, ["the cat", "a cat c a t", "caca tt"])
    pad_id = library.token_to_id(names["pad"])
    library.enable_padding(pad_id=pad_id, pad_token=names["pad"])
    library.add_special_tokens(["[WORLD]", tokenizers.AddedToken("<e1>", lstrip=True)])
    library.add_tokens(["caca", tokenizers.AddedToken("tt", single_word=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json", pad_id=pad_id)
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.no_padding()
    texts = ["[WORLD] cat", "a  <e1>cat <e1>", "caca tt att", "", " ", "the[WORLD]猫", "<e2>"]
    texts += ["[UNK] cat", "[world] <E1>"]
    for text in texts:
        found = tokenizer.encode([text, "cat " * 30], 99)[0]
        expected = plain.encode(text).ids
        assert found.tolist()[: len(expected)] == expected, text
        assert set(found[len(expected) :].tolist()) == {pad_id}
    tokenizer.save(tmp_path / "saved.json")
    again = load_tokenizer(tmp_path / "saved.json", pad_id=pad_id)
    np.testing.assert_array_equal(again.encode(texts, 9), tokenizer.encode(texts, 9))
    tokenizer.save_for_others(tmp_path / "other.json", 9)
    others = tokenizers.Tokenizer.from_file(str(tmp_path / "other.json"))
    others.encode_special_tokens = True
    assert [one.ids for one in others.encode_batch(texts)] == tokenizer.encode(texts, 9).tolist()
    around = tokenizer.encode([""], 9)[0].tolist()
    for literal in ("[CLS]", "[SEP]", "[PAD]", "<s>", "</s>", "<pad>"):
        inside = tokenizer.encode([f"cat {literal} cat"], 99)[0].tolist()
        assert sum(inside.count(one) for one in {*around, pad_id}) == len(around)


def test_added_tokens_beside_a_vocab_txt(tmp_path: Path) -> None:
    path = vocabulary(tmp_path, ENTRIES)
    added = tmp_path / "added_tokens.json"
    added.write_text(json.dumps({"<e1>": len(ENTRIES), "the": 4}))
    assert load_tokenizer(path).encode(["<e1> the"], 9)[0].tolist() == [2, len(ENTRIES), 4, 3]
    for tokens, message in [
        ({"<e1>": 99}, "'<e1>' is the entry 99; its place"),
        ({"a": "b"}, "id"),
    ]:
        added.write_text(json.dumps(tokens))
        with pytest.raises(DataError, match=f"^{added}: .*{message}"):
            load_tokenizer(path)
