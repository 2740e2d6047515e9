"""Words that the library had for things which the field names otherwise do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The word, and the term of docs/glossary.md instead.
GONE = {
    r"\btickets?\b": "handle",
    r"FrameTicket": "FrameHandle",
    r"\b(looks|look)_of\b|\beach_look\b": "metadata",
    r"\bput_back\w*": "restore",
    r"\bis_treated\b|\btreat_calls\b|\btreatment\b": "wrapping",
    r"\bgives?_up_outputs\b": "discard_outputs",
    r"_plainly\b": "without_recompute",
    r"\blet_travel\b|\baway_of\b|\btravelling\b": "offloaded",
    r"\bcomplaint\b": "failure message",
    r"\bwithdrawals?\b": "collective fallback",
    r"\bgoodbye\b|\blast words\b": "shutdown message",
    r"\bstrangers?\b": "unauthenticated connection, untrusted source",
    r"\bsomebody\b": "name who",
    r"without a word\b": "silently",
    r"\b(is|are|was|were) told\b": "is reported, receives, learns",
    r"\bsame bits\b": "bitwise identical",
    r"\baccuses?\b": "reports",
    r"\bjournal\b": "event log",
    r"\bunread_steps\b": "pending metrics",
    r"\btravel(s|led|ling)?\b": "sent, gathered, offloaded",
    r"\bin vain\b": "cannot complete",
    r"\bRngReplay\b|paddle_recompute[./]replay\b": "captured_state",
    r"\bshared_out\b|\bowner_of\b": "owner_ranks, offloaded_gradients_of",
    r"\bmeasure_step\b": "measure_peak, measure_costs",
    r"\bin-location\b": "in-place",
    r"\bfor (\w+, )*one in (?!a )": "what the loop variable is",
}


def found_in(text: str) -> list[str]:
    """The words of `GONE` in a text, each with the term to use."""
    return [
        f"{match[0]!r}: say {term!r}"
        for pattern, term in GONE.items()
        for match in re.finditer(pattern, text, re.IGNORECASE)
    ]


def sources() -> list[Path]:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    modules = [*(ROOT / "paddle_recompute").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    return [path for path in (*pages, *modules) if path.name != "recompute_cases.md"]


def test_code_and_pages_use_the_terms_of_the_field() -> None:
    faults = [
        f"{path.relative_to(ROOT)}:{number}: {fault}"
        for path in sources()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for fault in found_in(line)
    ]
    assert faults == []


@pytest.mark.parametrize(
    "planted", ["def put_back_flags(self):", "Drop it without a word.", "# what a ticket has"]
)
def test_a_planted_word_is_found(planted: str) -> None:
    assert found_in(planted)
