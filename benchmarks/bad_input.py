"""Give every reader of the library input that is none, and write down how each refuses it.

    python -m benchmarks.bad_input

The cases are those of the tests: configurations, overrides, ``state.json``, ``tokenizer.json``,
text pairs and plans. A case is good if it ends in an error of the library itself within a second.
Takes half a minute.
"""

from __future__ import annotations

import gzip
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._record import table, write_record
from paddle_recompute.checkpoint import find_checkpoint
from paddle_recompute.checkpoint.manifest import write_manifest
from paddle_recompute.config import load_config
from paddle_recompute.data import load_tokenizer, read_pairs
from paddle_recompute.errors import PaddleRecomputeError
from paddle_recompute.planner import RecomputePlan
from tests.config.bad_files import BAD_BYTES, BAD_FILES, BAD_OVERRIDES, GOOD
from tests.data.test_limits import TOKENIZERS
from tests.test_checkpoint import STATES, save

SECONDS = 1.0
PAIRS: dict[str, tuple[str, bytes]] = {
    "one column": ("p.tsv", b"cat\n"),
    "an empty column": ("p.tsv", b"cat\t\n"),
    "not UTF-8": ("p.tsv", b"cat\t\xff\n"),
    "a line of 2 MB": ("p.tsv", b"a" * (2 << 20)),
    "no line": ("p.tsv", b""),
    "a suffix of its own": ("p.csv", b"a,b\n"),
    "a gz bomb of 1 GB in one line": ("p.tsv.gz", gzip.compress(bytes(1 << 30), 1)),
    "half a gzip file": ("p.tsv.gz", gzip.compress(b"cat\tKatze\n" * 1000)[:50]),
    "no gzip file": ("p.tsv.gz", b"cat\tKatze\n"),
    "not JSON": ("p.jsonl", b"{\n"),
    "100,000 digits": ("p.jsonl", b'{"query": ' + b"9" * 100_000 + b', "positive": "x"}\n'),
    "nested 300,000 deep": ("p.jsonl", b"[" * 300_000),
    "half a surrogate pair": ("p.jsonl", b'{"query": "\\ud800", "positive": "x"}\n'),
    "a key twice": ("p.jsonl", b'{"query": "a", "query": "b", "positive": "x"}\n'),
    "null": ("p.jsonl", b"null\n"),
}
PLANS = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "no format": "{}",
    "another format": '{"format": "x"}',
    "nested 100,000 deep": "[" * 100_000,
    "infinite": '{"format": Infinity}',
}


def refuse(action: Callable[[], object]) -> tuple[str, float, str]:
    """What an action ends in: the class of the error, the seconds, the message."""
    began = time.perf_counter()
    try:
        action()
    except PaddleRecomputeError as error:
        return type(error).__name__, time.perf_counter() - began, str(error)
    except BaseException as error:
        return f"**{type(error).__name__}**", time.perf_counter() - began, str(error)
    return "**accepted**", time.perf_counter() - began, ""


def cases(folder: Path) -> dict[str, dict[str, Callable[[], object]]]:
    """Family -> case -> what is to be refused."""

    def written(name: str, content: bytes) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def bad_state(text: str) -> None:
        checkpoint = save(folder / "states", 1).folder
        (checkpoint / "state.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
        write_manifest(checkpoint)
        find_checkpoint(folder / "states")

    def pairs(name: str, content: bytes) -> object:
        return read_pairs(written(name, content))

    files = {name: text.encode("utf-8", "surrogatepass") for name, text in BAD_FILES.items()}
    return {
        "configuration": {
            name: lambda content=content: load_config(written("run.yaml", content))
            for name, content in {**files, **BAD_BYTES}.items()
        },
        "override": {
            name: lambda text=text: load_config(written("run.yaml", GOOD.encode()), [text])
            for name, text in BAD_OVERRIDES.items()
        },
        "state.json": {name: lambda text=text: bad_state(text) for name, text in STATES.items()},
        "tokenizer.json": {
            name: lambda text=text: load_tokenizer(written("tokenizer.json", text.encode()))
            for name, text in TOKENIZERS.items()
        },
        "text pairs": {name: lambda given=given: pairs(*given) for name, given in PAIRS.items()},
        "plan": {
            name: lambda text=text: RecomputePlan.load(written("plan.json", text.encode()))
            for name, text in PLANS.items()
        },
    }


def main() -> None:
    """Try all cases and write the table."""
    totals, rows = [], []
    with tempfile.TemporaryDirectory() as base:
        for family, named in cases(Path(base)).items():
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            results = {name: refuse(action) for name, action in named.items()}
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            own = sum(not kind.startswith("**") for kind, _, _ in results.values())
            slowest = max(seconds for _, seconds, _ in results.values())
            slow = sum(seconds > SECONDS for _, seconds, _ in results.values())
            totals.append([family, len(results), own, slow, f"{slowest:.2f}", f"{grown:.0f}"])
            for name, (kind, seconds, text) in results.items():
                shown = text.replace(base, "").splitlines()
                said = " ".join(shown[:2])[:110].replace("|", "\\|")
                said = json.dumps(said, ensure_ascii=True)[1:-1]
                rows.append([family, name, kind, f"{seconds:.3f}", f"`{said}`"])
            print(*totals[-1], sep=" | ", flush=True)
    path = write_record(
        "bad_input",
        "Input that is none, and how it is refused",
        "python -m benchmarks.bad_input",
        [
            *table(
                ["family", "cases", "refused by our own error", "over 1 s", "slowest, s",
                 "memory grown, MiB"], totals,
            ),
            "",
            *table(["family", "case", "error", "seconds", "it says"], rows),
        ],
    )  # fmt: skip
    print(path)


if __name__ == "__main__":
    main()
