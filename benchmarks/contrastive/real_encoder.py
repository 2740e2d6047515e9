"""A real pretrained encoder, all-MiniLM-L6-v2: with sentence-transformers and with us.

First its vectors before training. Then both fine-tune it on the same pairs of Debian: the name of a
package and its description, read by `apt-cache` on the user's machine. Ours is the way of the
tutorial: `evaluate`, `init --from-model`, `train`, `convert`; no configuration is written by hand.
Both have the same batch, steps, temperature, learning rate with linear decay and dropout, and the
loss from query to positive; the order of the pairs and the masks of dropout differ. The folder that
`convert` writes is loaded again by both.

    make bench-real_encoder
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.record import table, torch_python, write_record
from paddle_recompute.app.config import default_cache_dir
from paddle_recompute.app.data.split import shuffling_key
from paddle_recompute.app.retrieval import encode_texts, load_encoder, retrieval_metrics

PAIRS, HELD_OUT, BATCH, EPOCHS, RATE = 3072, 1000, 64, 2, 5e-5
ALIKE = 1e-6
THEIRS = Path(__file__).with_name("_real_encoder_theirs.py")


def pairs_of_debian() -> list[tuple[str, str]]:
    """(name of a package, its description), each once, in an order that every machine has."""
    told = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True)
    found: dict[str, str] = {}
    for entry in told.stdout.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
        name, words = lines.get("Package", ""), lines.get("Description", "")
        if name and len(words.split()) > 3 and not name.startswith("lib"):
            found.setdefault(words, name.replace("-", " "))
    pairs = [(name, words) for words, name in found.items()]
    pairs.sort(key=lambda pair: shuffling_key("\t".join(pair), 0))
    if len(pairs) < PAIRS + HELD_OUT:
        raise SystemExit(f"apt-cache names {len(pairs)} packages; run apt-get update")
    return pairs[: PAIRS + HELD_OUT]


def ours(model: Path, folder: Path) -> dict[str, Any]:
    """Train as the tutorial does; CPU seconds and peak of the command `train`."""
    command = [sys.executable, "-m", "paddle_recompute"]
    evaluated = [*command, "evaluate", "--model", model, "--data", folder / "valid.tsv", "--json"]
    start = time.perf_counter()
    subprocess.run([*map(str, evaluated)], check=True, stdout=subprocess.DEVNULL)
    to_first = time.perf_counter() - start
    config = folder / "run.yaml"
    init = ("init", "--from-model", model, folder / "train.tsv", "--output", config)
    subprocess.run([*command, *map(str, init)], check=True)
    settings = {
        "contrastive.global_batch": BATCH, "contrastive.symmetric": "false",
        "contrastive.mask_false_negatives": "false", "recompute.enable": "false",
        "data.train_file": folder / "train.tsv", "data.valid_file": folder / "valid.tsv",
        "data.valid_pairs": 2000, "data.pool_size": HELD_OUT,
        "train.num_epochs": EPOCHS, "train.learning_rate": RATE, "train.clip_grad_norm": 1.0,
        "train.weight_decay": 0.01, "train.eval_before": "false", "train.resume": "false",
        "train.output_dir": folder / "run", "launch.num_ranks": 1,
    }  # fmt: skip
    train = ["train", "--config", config, *(f"{name}={one}" for name, one in settings.items())]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, *map(str, train)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    convert = ("convert", "--to", "huggingface", folder / "run", folder / "tuned")
    subprocess.run([*command, *map(str, convert)], check=True)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": seconds, "peak": after.ru_maxrss, "to_first": to_first}


def vectors(model: Path, sides: list[list[str]]) -> list[Any]:
    """Of queries and documents, with us; both cut where the folder of `convert` cuts them."""
    encoder = load_encoder(model)
    longest = encoder.longest("document")
    return [
        encode_texts(encoder, sides[0], side="query", max_tokens=longest),
        encode_texts(encoder, sides[1], side="document"),
    ]


def found(both: list[Any]) -> tuple[str, str]:
    """R@10 and nDCG@10, for the table."""
    metrics = retrieval_metrics(both[0], both[1], np.arange(len(both[0])))
    return f"{metrics['recall@10']:.4f}", f"{metrics['ndcg@10']:.4f}"


def main() -> None:
    """Run both programs and write the record."""
    folder = default_cache_dir().expanduser().resolve() / "real_encoder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pairs = pairs_of_debian()
    for name, some in (("train", pairs[:PAIRS]), ("valid", pairs[PAIRS:])):
        lines = "".join(f"{query}\t{words}\n" for query, words in some)
        (folder / f"{name}.tsv").write_text(lines, encoding="utf-8")
    sides = [list(side) for side in zip(*pairs[PAIRS:], strict=True)]
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    python = torch_python()

    def theirs(*arguments: str | Path) -> Any:
        plan = json.dumps({"batch": BATCH, "epochs": EPOCHS, "rate": RATE})
        done = subprocess.run(
            [python, str(THEIRS), plan, str(folder), *map(str, arguments)],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])

    model = Path(theirs("where"))
    theirs("encode", model, "before")
    mine, about = ours(model, folder), theirs("train", model, "after")
    theirs("encode", folder / "tuned", "tuned")
    of_theirs = {
        name: [np.load(folder / f"{name}-{side}.npy") for side in range(2)]
        for name in ("before", "after", "tuned")
    }
    before, after = vectors(model, sides), vectors(folder / "run", sides)
    again = vectors(folder / "tuned", sides)
    differences = {
        "before training, ours and theirs": (before, of_theirs["before"]),
        "trained by us, in our checkpoint and in the folder of `convert`": (after, again),
        "trained by us, in that folder, ours and theirs": (again, of_theirs["tuned"]),
    }
    largest = {
        name: max(float(abs(a - b).max()) for a, b in zip(*two, strict=True))
        for name, two in differences.items()
    }
    if max(largest.values()) > ALIKE:
        raise SystemExit(f"vectors differ by more than {ALIKE}: {largest}")
    count = PAIRS * EPOCHS
    figures = {
        "before training": (*found(before), "", ""),
        "sentence-transformers": (
            *found(of_theirs["after"]), f"{about['cpu'] / count * 1e3:.1f}",
            f"{about['peak'] / 2**10:.0f}",
        ),
        "paddle_recompute": (
            *found(after), f"{mine['cpu'] / count * 1e3:.1f}", f"{mine['peak'] / 2**10:.0f}",
        ),
    }  # fmt: skip
    body = [
        *(__doc__ or "").split("\n\n")[1].splitlines(),
        "",
        f"- {', '.join(f'{name} {one}' for name, one in about['versions'].items())}; one thread",
        f"- {PAIRS:,} pairs, batch {BATCH}, {EPOCHS} epochs; {HELD_OUT:,} held-out queries, each "
        f"among {HELD_OUT:,} descriptions",
        "- CPU time and peak (resident memory) are of the whole process: imports, tokens, "
        "training, and with ours the evaluation and the checkpoints",
        f"- `evaluate` on the folder took {mine['to_first']:.0f} s, imports included",
        "",
        *table(("", "R@10", "nDCG@10", "CPU ms per pair", "peak, MiB"),
               [(name, *row) for name, row in figures.items()]),
        "",
        *table(("vectors of length 1", "largest difference"),
               [(name, f"{one:.1e}") for name, one in largest.items()]),
    ]  # fmt: skip
    title = "A real encoder, fine-tuned: sentence-transformers and ours"
    write_record("real_encoder", title, "make bench-real_encoder", body)


if __name__ == "__main__":
    main()
