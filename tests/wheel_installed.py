"""Run by `make wheel-install-test` outside of the repo, in an environment made for it.

Usage: python wheel_installed.py alone|train
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("paddle-recompute")
WORDS = ("cat", "dog", "big", "small", "house", "tree", "river", "stone", "bird", "cloud")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True)


def alone() -> None:
    """With Paddle, numpy and safetensors: the library works, the command says what is missing."""
    refused = run("--version")
    assert refused.returncode == 1 and "paddle-recompute[train]" in refused.stderr, refused
    runpy.run_path(str(Path(__file__).with_name("library_alone.py")), run_name="__main__")


def train() -> None:
    """With the extra: from a file of pairs to a report and an answer."""
    with tempfile.TemporaryDirectory() as folder:
        pairs, words, config, run_folder = (
            Path(folder) / name for name in ("p.tsv", "words.txt", "r.yaml", "run")
        )
        texts = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[:4]]
        pairs.write_text("".join(f"{text}\tthe {text}\n" for text in texts))
        words.write_text("".join(f"the {text}\n" for text in texts))
        sizes = ("launch.num_ranks=2", "model.hidden_size=32", "model.intermediate_size=64")
        more = (*sizes, f"data.cache_dir={folder}/cache", f"train.output_dir={run_folder}")
        for arguments in (
            ("init", pairs, "--output", config),
            ("config", "validate", "--config", config),
            ("train", "--config", config, "train.max_steps=4", *more),
            ("encode", "--model", run_folder, "--output", f"{folder}/pool.npy", words),
            ("search", "--index", f"{folder}/pool.npy", "cat dog", "--json"),
        ):
            done = run(*arguments)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            if arguments[0] == "train":
                record = json.loads(done.stdout.splitlines()[-1])
                assert record == json.loads((run_folder / "result.json").read_text())
                assert record["world_size"] == 2 and "step 4/4" in done.stdout
                assert "Successfully connected" not in done.stdout
        assert len(json.loads(done.stdout)["results"]) == 10, done.stdout
        assert (run_folder / "report.html").stat().st_size > 10**6


if __name__ == "__main__":
    {"alone": alone, "train": train}[sys.argv[1]]()
    print(f"installed wheel, {sys.argv[1]}: works")
