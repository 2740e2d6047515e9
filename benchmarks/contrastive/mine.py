"""``mine`` in a pool of 1,000,000 made-up vectors of 128 numbers: memory, time, the same bytes.

The encoder is untrained: it makes the vectors of 512 queries and positives. The pool is random
vectors of length 1 with a made-up text each, saved as ``encode`` saves them. ``mine`` runs in a
process of its own; another one is killed (SIGKILL) after its first block and started again.
``Index.top`` is compared with the flat index of faiss, each on one thread, in turn: the time of 256
queries, and the rows that they find. faiss needs a Python that has it: ``--faiss PYTHON``.

    python -m benchmarks.contrastive.mine [--faiss PYTHON] [--texts N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from benchmarks.harness.record import ROOT, in_own_process, table, write_record
from benchmarks.harness.resident import resident
from paddle_recompute import Index, build_model, encode_texts, load_config, load_encoder
from paddle_recompute.app.data import load_tokenizer, train_tokenizer
from paddle_recompute.app.retrieval import mine
from paddle_recompute.checkpoint import save_checkpoint

DIM, PAIRS, QUERIES, TOP_K, ROUNDS = 128, 512, 256, 100, 3
CONFIG = ROOT / "fleet_configs" / "contrastive_ernie-tiny_2cpu.yaml"

# Runs with a Python that has faiss: told a number of rounds, it answers each line with the seconds
# of one search; then it writes the rows.
FAISS = """
import sys, time, faiss, numpy as np
folder, k = sys.argv[1], int(sys.argv[2])
faiss.omp_set_num_threads(1)
pool = np.load(f"{folder}/pool.npy")
index = faiss.IndexFlatIP(pool.shape[1]); index.add(pool)
query = np.load(f"{folder}/query.npy")
print(faiss.__version__, flush=True)
for line in sys.stdin:
    start = time.perf_counter(); scores, rows = index.search(query, k)
    print(time.perf_counter() - start, flush=True)
np.save(f"{folder}/faiss.npy", rows)
"""


def words(number: int) -> str:
    """A made-up text, another for each number."""
    return " ".join(f"w{number // 1000**place % 1000}" for place in range(3))


def make(folder: Path, num_texts: int) -> None:
    """The run, the pairs and the pool."""
    text = [words(number) for number in range(2000)]
    train_tokenizer(text, folder / "tokenizer.json", 2000)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    config = load_config(CONFIG, [f"model.projection_size={DIM}"])
    paddle.seed(0)
    save_checkpoint(
        folder / "run" / "checkpoint",
        model=build_model(config.model, tokenizer.vocab_size),
        optimizer_state={},
        save_tokenizer=tokenizer.save,
        state={"step": 1, "untrained": {}, "config": config.to_dict()},
    )
    lines = [f"{words(7 * i + 1)}\t{words(num_texts + i)}\n" for i in range(PAIRS)]
    (folder / "pairs.tsv").write_text("".join(lines), encoding="utf-8")
    vectors = np.random.default_rng(0).standard_normal((num_texts, DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    encoder = load_encoder(folder / "run")
    pool = Index(vectors, [words(number) for number in range(num_texts)], encoder=encoder)
    pool.save(folder / "pool.npy")
    queries = [words(7 * i + 1) for i in range(QUERIES)]
    np.save(folder / "query.npy", encode_texts(encoder, queries, side="query"))


def mined(folder: Path, output: str, kill: bool) -> None:
    """Mine in this process; prints what it took."""
    encoder = load_encoder(folder / "run")
    before, times = resident("VmHWM"), []

    def progress(what: str, done: int, total: int) -> None:
        times.append(time.perf_counter())
        if kill and done:
            os.kill(os.getpid(), signal.SIGKILL)

    mine(encoder, folder / "pairs.tsv", folder / "pool.npy", folder / output, progress=progress)
    digest = hashlib.sha256((folder / output).read_bytes())
    digest.update(Path(f"{folder / output}.json").read_bytes())
    seconds = (times[-1] - times[0]) / PAIRS
    print(json.dumps({"before": before, "peak": resident("VmHWM"), "per_query": seconds,
                      "blocks": len(times) - 1, "sha256": digest.hexdigest()}))  # fmt: skip


def beside_faiss(folder: Path, python: str) -> dict[str, Any]:
    """Both searches, in turn."""
    command = [python, "-c", FAISS, str(folder), str(TOP_K)]
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=plain
    )
    assert other.stdin is not None and other.stdout is not None
    version = other.stdout.readline().strip()
    index, query = Index.load(folder / "pool.npy"), np.load(folder / "query.npy")
    own, theirs = [], []
    for _ in range(ROUNDS):
        start = time.process_time(), time.perf_counter()
        _, rows = index.top(query, TOP_K)
        own.append(time.perf_counter() - start[1])
        print("go", file=other.stdin, flush=True)
        theirs.append(float(other.stdout.readline()))
    other.stdin.close()
    if other.wait():
        raise SystemExit("faiss failed")
    found = np.load(folder / "faiss.npy")
    same = [len(np.intersect1d(a, b)) for a, b in zip(rows, found, strict=True)]
    ratio = float(np.median(np.divide(own, theirs)))
    return {
        "version": version,
        "own": float(np.median(own)) / QUERIES,
        "faiss": float(np.median(theirs)) / QUERIES,
        "ratio": ratio,
        "recall": sum(same) / rows.size,
    }


def main() -> None:
    """Run all, print it and write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--faiss")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=3)
    arguments = parser.parse_args()
    if arguments.child:
        folder, output, kill = arguments.child
        mined(Path(folder), output, kill == "kill")
        return
    with tempfile.TemporaryDirectory() as name:
        folder, module = Path(name), "benchmarks.contrastive.mine"
        make(folder, arguments.texts)
        whole = in_own_process(module, "--child", name, "whole.jsonl", "run")
        child = [module, "--child", name, "parts.jsonl"]
        killed = subprocess.run([sys.executable, "-m", *child, "kill"], check=False)
        assert killed.returncode == -signal.SIGKILL
        again = in_own_process(*child, "run")
        assert (whole["blocks"], again["blocks"]) == (2, 1)
        pool_bytes = (folder / "pool.npy").stat().st_size
        rows: list[tuple[str, str]] = [
            ("pool on disk, MB", f"{pool_bytes / 1e6:.0f}"),
            ("peak RSS before `mine` (Paddle and the encoder), MB", f"{whole['before'] / 1e6:.0f}"),
            ("peak RSS of `mine`, MB", f"{whole['peak'] / 1e6:.0f}"),
            ("`mine`, ms per query", f"{whole['per_query'] * 1e3:.1f}"),
            ("killed and resumed: same bytes", str(again["sha256"] == whole["sha256"])),
        ]
        if arguments.faiss:
            both = beside_faiss(folder, arguments.faiss)
            rows += [
                (f"`Index.top`, top {TOP_K}, ms per query", f"{both['own'] * 1e3:.1f}"),
                (f"faiss {both['version']} `IndexFlatIP`, ms", f"{both['faiss'] * 1e3:.1f}"),
                (f"`Index.top` / faiss (median of {ROUNDS})", f"{both['ratio']:.2f}"),
                ("rows of `Index.top` that faiss finds too", f"{both['recall']:.6f}"),
            ]
    body = [
        f"{arguments.texts:,} vectors of {DIM} numbers; {PAIRS} pairs, in blocks of 256; one "
        "thread each. The machine was busy with other work: times by the clock are upper bounds, "
        "ratios are of neighbours in a round.",
        "",
        *table(("", ""), rows),
    ]
    if arguments.texts == 1_000_000:
        write_record("mine", "Mining in a million texts", "make bench-mine", body)
    else:
        print("\n".join(body))


if __name__ == "__main__":
    main()
