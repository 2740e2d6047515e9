"""The sentence pairs of LibreOffice: reading, and a split that repeats no page and no text."""

from __future__ import annotations

import struct

from benchmarks.contrastive._libreoffice import (
    PagePair,
    paragraphs,
    read_catalogue,
    split_by_page,
)
from paddle_recompute.app.data import Pair
from paddle_recompute.app.data.split import normal_form

PAGE = """
<h1 id="hd_id1">Spell&amp;ing</h1>
<p id="par_id2" class="paragraph">Choose <span class="emph">Tools
 - <span id="s" class="switchinline"><span hidden="true" id="MACx" class="MAC">Preferences</span>
<span hidden="true" id="defaultx">Options</span></span></span>.</p>
<p class="embedded">no id</p>
<p id="bm_module">an id of another kind</p>
<p id="par_id3">twice</p><td><p id="par_id3">twice</p></td>
"""


def catalogue(messages: dict[str, str], order: str = "<") -> bytes:
    texts = [text.encode() for text in (*messages, *messages.values())]
    at = 28 + 8 * len(texts)
    places, body = [], b""
    for text in texts:
        places += [len(text), at + len(body)]
        body += text + b"\0"
    count = len(messages)
    head = struct.pack(f"{order}7I", 0x950412DE, 0, count, 28, 28 + 8 * count, 0, 0)
    return head + struct.pack(f"{order}{len(places)}I", *places) + body


def found_pairs(num_pages: int, per_page: int) -> list[PagePair]:
    return [
        PagePair(f"page {page}", Pair(f"中文{page}之{place}", f"english {page} of {place}"))
        for page in range(num_pages)
        for place in range(per_page)
    ]


def texts_of(pairs: list[Pair]) -> set[str]:
    return {normal_form(text) for pair in pairs for text in (pair.query, pair.positive)}


def test_a_paragraph_is_found_by_its_id_without_what_one_system_alone_shows() -> None:
    assert paragraphs(PAGE) == {"hd_id1": "Spell&ing", "par_id2": "Choose Tools - Options."}


def test_a_catalogue_is_read() -> None:
    messages = {"": "header", "dialog|ok\x04_OK": "确定(_O)"}
    assert read_catalogue(catalogue(messages)) == messages


def test_no_page_and_no_text_is_on_two_sides() -> None:
    found = found_pairs(40, 5)
    # What several pages say, in another case and with a full stop.
    found += [
        PagePair(f"page {page}", Pair("另请参阅。", "See ALSO" + "." * (page % 2)))
        for page in range(40)
    ]
    found += [
        PagePair(f"other {page}", Pair(f"别的{page}", "english 3 of 1")) for page in range(20)
    ]
    split = split_by_page(found, held_out=30, seed=1)
    sides = [split.train, split.valid, split.test]
    pages = {one.pair: one.page for one in found if one.page.startswith("page")}
    del pages[Pair("另请参阅。", "See ALSO")], pages[Pair("另请参阅。", "See ALSO.")]  # on many
    for number, side in enumerate(sides):
        assert side
        for other in sides[number + 1 :]:
            assert texts_of(side).isdisjoint(texts_of(other))
            assert {pages.get(pair) for pair in side} & {pages.get(pair) for pair in other} <= {
                None
            }
    assert 30 <= len(split.test) < 36
    assert 30 <= len(split.valid) < 36
    queries = [normal_form(pair.query) for side in sides for pair in side]
    assert len(set(queries)) == len(queries)
