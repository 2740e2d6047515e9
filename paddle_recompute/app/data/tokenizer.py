"""Turn texts into token ids: a WordPiece vocabulary, trained once and shared through a file.

The text is normalised as in BERT's uncased models: lower case, no accents, every Chinese character
is a word. Pieces consist of bytes (UTF-8), not of characters: a frequent word or character is one
piece, and a rare or new character is a few shared pieces. A vocabulary of characters would make it
``[UNK]``. Each byte is written as one visible letter, as in GPT-2's vocabulary. The file is the
``tokenizer.json`` of Hugging Face's `tokenizers`, which does the work, so other programs can read
it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paddle_recompute._files import LARGEST, parse_json, read_json, write_text
from paddle_recompute.app.data._cache_folder import write_whole
from paddle_recompute.errors import DataError, DependencyError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD_ID = 0
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>")
# In a text these are letters, so that no text can end itself early or hide a part of itself.
_LITERAL = {"[PAD]", "[CLS]", "[SEP]", "[MASK]", "<pad>", "<s>", "</s>", "<mask>"}

# Part of the key in `tokenizer_cache`; raise it when training makes another vocabulary.
TRAINING_VERSION = 3
_INNER = "##"  # prefix of a piece that does not begin its word
_TEXTS_AT_ONCE = 10_000
_LONGEST_WORD = 100
"""Characters; longer words are divided. WordPiece takes time that grows with the square."""
_BYTES_OF_A_CHARACTER = 4  # at most
_MOST_ENTRIES = 1 << 24
_CASED = 0.1
"""The share of entries with a capital, of all entries with case, from which a list is cased."""
_PROBE = "\ua66e \U00013000 " + "x" * 1000
"""Rare letters and a long word: most vocabularies replace them by ``[UNK]``."""
_SETTINGS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


@dataclass(frozen=True)
class TokenRows:
    """The token ids of many texts in one array.

    Attributes:
        ids: [all tokens] int32.
        starts: [texts + 1] int64; text ``i`` is ``ids[starts[i] : starts[i + 1]]``.
        num_cut: Number of texts that were cut.
        num_unknown: Number of texts with a ``[UNK]`` token.
        pad_id: What `pad` fills up with.
    """

    ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    num_cut: int
    num_unknown: int
    pad_id: int = PAD_ID

    def pad(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The texts with indices `rows` as a matrix.

        Returns:
            [len(rows), tokens of the longest of them], int64, padded with `pad_id` at the end.
        """
        rows = np.asarray(rows, dtype=np.int64)
        first, lengths = self.starts[rows, None], self.starts[rows + 1] - self.starts[rows]
        columns = np.arange(lengths.max(initial=0))
        taken = columns < lengths[:, None]
        matrix = np.full(taken.shape, self.pad_id, dtype=np.int64)
        matrix[taken] = self.ids[(first + columns)[taken]]
        return matrix


class PairTokenizer:
    """Turns texts into token ids, as `tokenizers` does; made by `load_tokenizer`.

    One difference: ``[CLS]``, ``[SEP]``, ``[PAD]``, ``[MASK]`` and what else the tokenizer puts
    around a text stay letters in a text (or become ``[UNK]``, where the vocabulary has no letters
    for them), so that no text can imitate its own end or padding.

    Attributes:
        vocab_size: Rows that a word embedding needs.
        pad_id: The id of the padding.
        pad_token: The token that other programs pad with.
        unknown: The id of ``[UNK]``; None if there is none.
        special_tokens: Those of `SPECIAL_TOKENS` that it has.
        notes: Sentences for the user about how the file was read.
        sha256: Of its file.
    """

    def __init__(
        self, tokenizer: Any, text: str, pad_id: int, pad_token: str, notes: Sequence[str] = ()
    ) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True
        self._before, self._after = _frame(tokenizer)
        self.pad_id, self.pad_token, self.notes = pad_id, pad_token, list(notes)
        unknown = getattr(tokenizer.model, "unk_token", None) or "<unk>"
        self.unknown: int | None = tokenizer.token_to_id(unknown)
        self._barred = {pad_id, *self._before, *self._after}
        known = tokenizer.get_vocab()
        self.special_tokens = [token for token in SPECIAL_TOKENS if token in known]
        self.vocab_size: int = max(known.values()) + 1
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()

    def encode(self, texts: Sequence[str], max_tokens: int) -> npt.NDArray[np.int64]:
        """Token ids, padded to the longest text.

        Args:
            texts: Any number of texts.
            max_tokens: The most tokens of one text, ``[CLS]`` and ``[SEP]`` included; at least 2.

        Returns:
            [len(texts), tokens of the longest], int64, 0 after the end of a text.
        """
        return self.tokenize(texts, max_tokens).pad(np.arange(len(texts)))

    def tokenize(self, texts: Sequence[str], max_tokens: int) -> TokenRows:
        """Token ids without padding, 4 bytes per token, for many texts.

        Args:
            texts: Any number of texts; about 70,000 short ones take a second on one core.
            max_tokens: The most tokens of one text, ``[CLS]`` and ``[SEP]`` included; at least 2.

        Raises:
            DataError: The tokenizer's file does not say what a part of a text becomes.
        """
        added = len(self._before) + len(self._after)
        room = max(0, max_tokens - added)
        num_cut, num_unknown, lengths, parts = 0, 0, [0], []
        for some in _in_lots(texts):
            ids: list[int] = []
            with _as_data_error("the tokenizer cannot read a text"):
                encodings = self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
            for encoding in encodings:
                found = encoding.ids
                # Unigram knows "<s>" as a piece, too.
                if self.unknown is not None and not self._barred.isdisjoint(found):
                    found = [self.unknown if number in self._barred else number for number in found]
                num_cut += len(found) > room
                num_unknown += self.unknown in found
                ids += [*self._before, *found[:room], *self._after]
                lengths.append(min(len(found), room) + added)
            parts.append(np.array(ids, dtype=np.int32))
        return TokenRows(
            ids=np.concatenate(parts) if parts else np.empty(0, np.int32),
            starts=np.cumsum(lengths, dtype=np.int64),
            num_cut=num_cut,
            num_unknown=num_unknown,
            pad_id=self.pad_id,
        )

    def vocabulary(self) -> str:
        """A SHA-256 of all entries and their ids; it does not depend on the form of the file."""
        entries = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json`` to `path`, atomically: the file that `load_tokenizer` read."""
        write_text(Path(path), self._text, "name another file or folder")

    def save_for_others(self, path: str | Path, max_tokens: int) -> None:
        """Write a ``tokenizer.json`` with which `tokenizers` alone makes the ids of `encode`.

        It adds ``[CLS]`` and ``[SEP]``, cuts at `max_tokens` and pads. The file cannot hold
        ``encode_special_tokens = True``, which makes a text ``[SEP]`` ordinary text; tokens that
        others call special are not special in it, so they stay whole.
        """
        copy = tokenizers_package().Tokenizer.from_str(self._tokenizer.to_str())
        copy.enable_truncation(max_tokens)
        pad_id = copy.token_to_id(self.pad_token)
        copy.enable_padding(pad_id=pad_id, pad_token=self.pad_token)
        write_text(Path(path), copy.to_str(pretty=True), "name another file or folder")


def load_tokenizer(path: str | Path, *, pad_id: int = PAD_ID) -> PairTokenizer:
    """Read a ``tokenizer.json``, or a ``vocab.txt`` of BERT or ERNIE.

    A ``vocab.txt`` has an entry per line, or ``entry<TAB>id``; of an entry that is there twice the
    last id counts, as in PaddleNLP. It does not say whether texts become lower case. A file
    ``tokenizer_config.json`` beside it does (``do_lower_case``); without one they do if less than
    a tenth of the entries with case have a capital letter. Its ``strip_accents`` and
    ``tokenize_chinese_chars``, and the tokens of ``added_tokens.json``, are taken, too.

    Args:
        path: The file.
        pad_id: The id of the padding in the model.

    Raises:
        DataError: There is no such file, or it is not a tokenizer with the padding `pad_id` and
            with ``[CLS]`` and ``[SEP]``, or what else it puts around a text.
        DependencyError: The package `tokenizers` is not installed.
    """
    tokenizers, path, notes = tokenizers_package(), Path(path), list[str]()
    is_list = path.suffix == ".txt"
    try:
        if is_list:
            text = _from_entries(tokenizers, path, notes)
        else:
            text = path.read_text(encoding="utf-8-sig")
        tree = parse_json(text)
    except OSError as error:
        raise DataError(f"{path}: the tokenizer cannot be read ({error.strerror})") from error
    except DataError:
        raise
    except ValueError as error:
        raise DataError(
            f"{path}: not a {'vocab.txt' if is_list else 'tokenizer.json'} ({error})"
        ) from error
    # The library reports every fault of a file as a bare Exception: check first.
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise DataError(f"{path}: not a tokenizer.json (no model.vocab in it)")
    with _as_data_error(f"{path}: not a tokenizer.json"):
        tokenizer = tokenizers.Tokenizer.from_str(text)
        if added := [
            token
            for token in tree.get("added_tokens") or ()
            if token["special"] and token["content"] not in _LITERAL
        ]:
            # encode_special_tokens would divide them; the others stay special.
            for token in added:
                token["special"] = False
            tokenizer = tokenizers.Tokenizer.from_str(json.dumps(tree))
    tokenizer.no_truncation()
    of_file = tokenizer.padding or {}
    tokenizer.no_padding()
    names = [of_file.get("pad_token"), *_PADDING]
    found = [(name, tokenizer.token_to_id(name)) for name in names if name is not None]
    padding = next((pair for pair in found if pair[1] is not None), ("no [PAD]", None))
    with _as_data_error(f"{path}: not a tokenizer.json"):
        around = [token for side in _frame(tokenizer) for token in side]
    # Qwen ends a text by what it pads with; then the padding is a row that no text has.
    added = [None, *(token["content"] for token in tree.get("added_tokens") or ())]
    is_free = pad_id not in around and tokenizer.id_to_token(pad_id) in added
    if padding[1] != pad_id and not (padding[1] in around and is_free):
        raise DataError(f"{path}: has {padding}; the padding must be the entry {pad_id}")
    if not around:
        if None in map(tokenizer.token_to_id, ("[CLS]", "[SEP]")):
            raise DataError(
                f"{path}: puts nothing around a text (post_processor), and has no [CLS] and [SEP]"
            )
        tokenizer.post_processor = _around(tokenizers, tokenizer.get_vocab())
    highest = max(tokenizer.get_vocab().values())
    if highest >= _MOST_ENTRIES:
        raise DataError(
            f"{path}: numbers an entry {highest}; a vocabulary has at most {_MOST_ENTRIES} entries"
        )
    loaded = PairTokenizer(tokenizer, text, pad_id, padding[0], notes)
    try:
        loaded.tokenize([_PROBE], 2)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    return loaded


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and behind a text."""
    around = tokenizer.post_process(tokenizer.encode("a", add_special_tokens=False))
    ids, is_added = around.ids, around.special_tokens_mask
    first = is_added.index(0) if 0 in is_added else len(ids)
    last = len(ids) - (is_added[::-1].index(0) if 0 in is_added else 0)
    return ids[:first], ids[last:]


def _from_entries(tokenizers: types.ModuleType, path: Path, notes: list[str]) -> str:
    """The ``tokenizer.json`` of a ``vocab.txt``."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"larger than {LARGEST} bytes")
    # Not splitlines(): an entry may be another line separator, such as U+2028.
    lines = path.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    entries = [line.removesuffix("\r").partition("\t") for line in lines]
    if not all(number.isdecimal() for _, tab, number in entries if tab):
        raise ValueError("a line is not entry<TAB>id")
    vocab = {
        entry: int(number) if tab else index for index, (entry, tab, number) in enumerate(entries)
    }
    if missing := [token for token in SPECIAL_TOKENS[:4] if token not in vocab]:
        raise ValueError(f"a vocab.txt of BERT or ERNIE has the entries {', '.join(missing)}")
    if len(set(vocab.values())) < len(vocab):
        raise ValueError("two entries have one id")
    if more := len(entries) - len(vocab):
        notes.append(f"{path}: {more} entries appear twice; the last id of each counts")
    tokenizer = tokenizers.BertWordPieceTokenizer(vocab, **_settings(path, vocab, notes))
    added = path.with_name("added_tokens.json")
    if added.exists():
        tokens = _read_beside(added)
        if not all(isinstance(number, int) for number in tokens.values()):
            raise DataError(f"{added}: is not a token with its id each")
        names = sorted(tokens, key=lambda name: tokens[name])
        tokenizer.add_tokens([token for token in names if token not in vocab])
        if wrong := [token for token in names if tokenizer.token_to_id(token) != tokens[token]]:
            raise DataError(
                f"{added}: {wrong[0]!r} is the entry {tokens[wrong[0]]}; its place behind those of "
                f"{path.name} is {tokenizer.token_to_id(wrong[0])}"
            )
    return str(tokenizer.to_str(pretty=True))


def _settings(path: Path, entries: Iterable[str], notes: list[str]) -> dict[str, bool]:
    """How texts are changed, from ``tokenizer_config.json`` beside a ``vocab.txt`` if it is there.

    Raises:
        DataError: It cannot be read, or a setting is neither true, false nor null.
    """
    beside, settings = path.with_name("tokenizer_config.json"), dict[str, bool]()
    if beside.exists():
        found = _read_beside(beside)
        for key, name in _SETTINGS.items():
            value = found.get(key)
            if isinstance(value, bool):
                settings[name] = value
            elif value is not None:
                raise DataError(
                    f"{beside}: {key} is {value!r:.40}; allowed are true, false and null"
                )
    if "lowercase" not in settings:
        cased = [
            entry for entry in entries if entry.lower() != entry.upper() and entry[:1] not in "[<"
        ]
        capital = sum(entry != entry.lower() for entry in cased)
        settings["lowercase"] = capital <= _CASED * len(cased)
        notes.append(
            f"{path}: {capital} of {len(cased)} entries have a capital letter, so texts "
            f"{'become' if settings['lowercase'] else 'do not become'} lower case; do_lower_case "
            "in a tokenizer_config.json beside it decides otherwise"
        )
    return settings


def _read_beside(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def _as_data_error(fault: str) -> Iterator[None]:
    """Inside, what the library finds wrong with a file is a `DataError`."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        # It is a bare Exception, and a panic of its Rust code derives from BaseException
        # (tokenizers 0.22, 0.23).
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{fault} ({str(error)[:200]})") from None


def train_tokenizer(texts: Sequence[str], path: str | Path, vocab_size: int) -> None:
    """Learn a vocabulary from `texts` and write it to `path`, atomically.

    The same texts give the same file. (By default the library numbers the pieces inside words in
    the order of a hash table and breaks ties by number, so two trainings differ.) No text has
    ``[UNK]``.

    Args:
        texts: The training texts, without the held-out texts.
        path: The ``tokenizer.json`` to write.
        vocab_size: The most entries, at least 453: the special tokens and the bytes, at the
            beginning of words and inside them.

    Raises:
        DataError: The texts contain nothing to learn from.
        OutputError: The file cannot be written.
        DependencyError: The package `tokenizers` is not installed.
    """
    if not any(text.strip() for text in texts):
        raise DataError("the training texts contain no word, so there is no vocabulary to learn")
    tokenizers = tokenizers_package()
    tokenizer = _untrained(tokenizers, {token: i for i, token in enumerate(SPECIAL_TOKENS)})
    every = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # No word begins with a byte that continues a character, 0x80 to 0xBF. The trainer needs them.
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    continuing = {byte_level.pre_tokenize_str(chr(code))[0][0][1] for code in range(0x80, 0xC0)}
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=vocab_size + len(continuing),
        min_frequency=2,
        show_progress=False,
        # Numbered here, in this order, instead of by the hash table.
        special_tokens=[*SPECIAL_TOKENS, *(_INNER + byte for byte in every)],
        initial_alphabet=every,
        limit_alphabet=len(every),
        continuing_subword_prefix=_INNER,
    )
    tokenizer.train_from_iterator(texts, trainer, length=len(texts))
    # Built anew: in the trained tokenizer the pieces "##x" are special tokens.
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    kept = [piece for piece, _ in pieces if piece not in continuing]
    vocab = {piece: number for number, piece in enumerate(kept[:vocab_size])}
    write_whole(Path(path), _untrained(tokenizers, vocab).to_str(pretty=True))


def _untrained(tokenizers: types.ModuleType, vocab: dict[str, int]) -> Any:
    model = tokenizers.models.WordPiece(
        vocab,
        unk_token="[UNK]",
        continuing_subword_prefix=_INNER,
        max_input_chars_per_word=_LONGEST_WORD * _BYTES_OF_A_CHARACTER,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True
    )
    pre_tokenizers, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    some_characters = tokenizers.Regex(rf"[\s\S]{{1,{_LONGEST_WORD}}}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.BertPreTokenizer(),
            pre_tokenizers.Split(some_characters, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(prefix=_INNER, cleanup=False),
            decoders.Replace(" ", "Ġ"),  # the letter of the space byte
            decoders.ByteLevel(),
        ]
    )
    tokenizer.post_processor = _around(tokenizers, vocab)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _around(tokenizers: types.ModuleType, vocab: dict[str, int]) -> Any:
    """What puts ``[CLS]`` before a text and ``[SEP]`` behind it."""
    return tokenizers.processors.BertProcessing(
        ("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"])
    )


def _in_lots(texts: Sequence[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while some := list(itertools.islice(iterator, _TEXTS_AT_ONCE)):
        yield some


def tokenizers_package() -> types.ModuleType:
    """The package `tokenizers`, set to one thread unless the user decides otherwise.

    Its threads do not survive a fork, and it prints a warning (up to 0.22) in every process that
    was forked. One thread costs little: the ranks of a machine share its cores.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise DependencyError(
            "data needs the package tokenizers, which is not installed; pip "
            "install tokenizers (or 'paddle-recompute[train]')"
        ) from None
    return tokenizers
