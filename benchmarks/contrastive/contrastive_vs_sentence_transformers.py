"""Cached contrastive losses side by side: sentence-transformers on torch, and ours on Paddle.

Both train the encoder of fleet_configs/contrastive_ernie-tiny_2cpu.yaml (4 layers, hidden 128,
dropout 0.1, here with the same random weights) on the same pairs of CC-CEDICT, with the same loss
(InfoNCE in both directions, temperature 0.05), AdamW, number of threads and chunks. First, with
dropout off, all ways must give the same loss and the same norm of the gradient. A step is forward,
loss, backward and update. What counts is each library's cached step against its own plain step on
the same batch, in rounds in which every way takes one step on the same pairs, the libraries in
turn, each after one step that is not counted.

    make bench-contrastive_vs_sentence_transformers [ARGS="--rounds N --largest N ..."]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paddle_recompute.app.launch._rank_settings import quiet_settings, speed_settings

# Those of `paddle-recompute train`, for both sides; Paddle's import sets what is not set before.
os.environ.update(speed_settings(1, os.environ, device="cpu"))
os.environ.update(quiet_settings(os.environ))

import numpy as np
import paddle

from benchmarks.contrastive._side_by_side import WARM_UP_PAIRS, Array, Side, serve
from benchmarks.harness.record import ratios, table, write_record
from paddle_recompute import ContrastiveLoss, GradCache, load_config
from paddle_recompute._paddle import memory as _memory
from paddle_recompute.app.config import Config
from paddle_recompute.app.data import build_loader, prepare_data
from paddle_recompute.app.encoder import build_model
from paddle_recompute.train_step.optimizer import build_optimizer

CONFIG = "fleet_configs/contrastive_ernie-tiny_2cpu.yaml"
CHUNK_SIZE, CHUNK_TOKENS, TILE, LEARNING_RATE = 64, 1024, 512, 1e-4
TIMED = (256, 1024)
LARGEST_PLAIN = 1024  # beyond it the plain step's memory is not asked for
BATCHES_OF_A_PEAK = 2
TOLERANCE = 1e-4  # float32, other orders of summation
WAYS = ("plain", "chunk_size", "chunk_tokens")
OURS, THEIRS = "paddle_recompute", "sentence-transformers"
CALLED = {
    (THEIRS, "plain"): "`MultipleNegativesRankingLoss`",
    (THEIRS, "chunk_size"): f"`Cached…`, mini_batch_size={CHUNK_SIZE}",
    (THEIRS, "chunk_tokens"): f"`Cached…`, mini_batch_num_tokens={CHUNK_TOKENS}",
    (OURS, "plain"): "`ContrastiveLoss`",
    (OURS, "chunk_size"): f"`GradCache`, chunk_size={CHUNK_SIZE}",
    (OURS, "chunk_tokens"): f"`GradCache`, chunk_tokens={CHUNK_TOKENS}",
}
TORCH = Path(__file__).parents[2] / ".venv-torch" / "bin" / "python"
DOCUMENTED = (
    "sentence-transformers documents of `CachedMultipleNegativesRankingLoss` that it "
    '"trains roughly 2x to 2.4x slower than" `MultipleNegativesRankingLoss` '
    "([its page of losses](https://www.sbert.net/docs/package_reference/sentence_transformer/"
    "losses.html#cachedmultiplenegativesrankingloss); the same in the docstring of the version "
    "measured here). In this version it cuts the padding of every mini-batch and knows "
    "`mini_batch_num_tokens`, which counts tokens without padding and takes the texts as they "
    "come; `chunk_tokens` counts the padding and sorts the texts by length."
)


class PaddleLibrary:
    """See `benchmarks.contrastive._side_by_side.Library`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._vocab_size = json.loads((folder / "about.json").read_text())["vocab_size"]

    def versions(self) -> dict[str, str]:
        return {
            "paddle": paddle.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "threads": os.environ["OMP_NUM_THREADS"],
        }

    def make_step(self, way: str, *, dropout: bool) -> PaddleStep:
        paddle.seed(0)
        config = load_config(CONFIG)
        if not dropout:
            off = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
            config = config.model_copy(update={"model": config.model.model_copy(update=off)})
        model = build_model(config.model, self._vocab_size)
        weights = np.load(self._folder / "weights.npz")
        model.set_state_dict({name: paddle.to_tensor(value) for name, value in weights.items()})
        chunks = {"chunk_size": CHUNK_SIZE, "chunk_tokens": CHUNK_TOKENS}
        return PaddleStep(config, model, {way: chunks[way]} if way in chunks else {})

    def allocated_peak(self, run: Callable[[], object]) -> int:
        held = _memory.current_bytes()
        if _memory.can_reset_peak():
            _memory.reset_peak()
        run()
        return _memory.peak_bytes() - held


class PaddleStep:
    """See `benchmarks.contrastive._side_by_side.Step`."""

    def __init__(self, config: Config, model: paddle.nn.Layer, chunks: dict[str, int]) -> None:
        self._model = model
        self._optimizer = build_optimizer(config.optimizer, model, LEARNING_RATE)
        # Theirs is in stripes too where it is cached, and one matrix where it is not.
        tile = TILE if chunks else None
        self._loss = ContrastiveLoss(config.contrastive.temperature, tile=tile, normalize=True)
        self._cache = GradCache(model, self._loss, **chunks) if chunks else None

    def backward(self, query: Array, positive: Array) -> float:
        sides = paddle.to_tensor(query), paddle.to_tensor(positive)
        if self._cache is not None:
            return float(self._cache.backward(*sides))
        loss = self._loss(*map(self._model, sides))
        loss.backward()
        return float(loss)

    def update(self) -> None:
        self._optimizer.step()
        self._optimizer.clear_grad(set_to_zero=False)

    def gradient_norm(self) -> float:
        squares = [p.grad.square().sum() for p in self._model.parameters() if p.grad is not None]
        return float(paddle.add_n(squares).sqrt())


def prepare(folder: Path, batches: dict[int, int]) -> dict[str, Any]:
    """Write what both sides read: inputs, weights, dimensions and the vocabulary.

    Args:
        folder: Where.
        batches: How many batches of each size; the i-th of size b is called ``"b-i"``.

    Returns:
        What the texts are like: mean tokens per text, with padding and without.
    """
    config = load_config(CONFIG, ["launch.num_ranks=1", "train.seed=0"])
    data = prepare_data(config, 0, lambda: None)
    arrays: dict[str, Array] = {}
    for size, count in batches.items():
        loader = build_loader(config, data, 0, local_batch=size)
        for number, batch in zip(range(count), loader, strict=False):
            for side in ("query", "positive"):
                arrays[f"{size}-{number}.{side}"] = batch[side].numpy()
    np.savez(folder / "batches.npz", **arrays)
    data.tokenizer.save(folder / "tokenizer.json")
    paddle.seed(0)
    model = build_model(config.model, data.tokenizer.vocab_size)
    np.savez(folder / "weights.npz", **{k: v.numpy() for k, v in model.state_dict().items()})
    about = {
        **config.model.model_dump(mode="json"),
        "vocab_size": data.tokenizer.vocab_size,
        "temperature": config.contrastive.temperature,
        "weight_decay": config.train.weight_decay,
        "learning_rate": LEARNING_RATE,
        "chunk_size": CHUNK_SIZE,
        "chunk_tokens": CHUNK_TOKENS,
    }
    (folder / "about.json").write_text(json.dumps(about))
    lengths = {}
    for side in ("query", "positive"):
        every = [array for name, array in arrays.items() if name.endswith(side)]
        rows = sum(map(len, every))
        lengths[side] = {
            "tokens": float(sum((array != 0).sum() for array in every) / rows),
            "with_padding": float(sum(array.size for array in every) / rows),
        }
    return lengths


@dataclasses.dataclass(frozen=True)
class Both:
    """Starts the processes of the two libraries."""

    folder: Path
    environment: dict[str, str]

    def side(self, library: str) -> Side:
        commands = {
            THEIRS: [str(TORCH), "-m", "benchmarks.contrastive._sentence_transformers_side"],
            OURS: [
                sys.executable,
                "-m",
                "benchmarks.contrastive.contrastive_vs_sentence_transformers",
                "--in",
            ],
        }
        return Side([*commands[library], str(self.folder)], self.environment)


def gradients(both: Both, batch: str) -> dict[str, dict[str, float]]:
    """Loss and norm of the gradient of every way, without dropout; refuses different ones."""
    found: dict[str, dict[str, float]] = {}
    for library in (THEIRS, OURS):
        with both.side(library) as side:
            for way in WAYS:
                found[f"{library} {way}"] = side.ask("gradient", way=way, batch=batch)
    for key in ("loss", "norm"):
        values = [result[key] for result in found.values()]
        if max(values) - min(values) > TOLERANCE * min(values):
            raise SystemExit(f"the ways do not compute the same {key}: {found}")
    return found


def times(both: Both, sizes: list[int], warm_up: int, rounds: int) -> dict[int, Any]:
    """Seconds of every step: per size, per library, per way, a list over the rounds."""
    found: dict[int, Any] = {}
    with both.side(THEIRS) as theirs, both.side(OURS) as ours:
        sides = {THEIRS: theirs, OURS: ours}
        for size in sizes:
            found[size] = {library: {way: [] for way in WAYS} for library in sides}
            for number in range(warm_up + rounds):
                for library, side in sides.items():
                    side.ask("seconds", way="plain", batch=f"{size}-{number}")
                    for way in WAYS:
                        taken = side.ask("seconds", way=way, batch=f"{size}-{number}")
                        if number >= warm_up:
                            found[size][library][way].append(taken)
            print(f"{size}: {rounds} rounds are done", flush=True)
    return found


def peaks(both: Both, sizes: list[int]) -> dict[int, Any]:
    """Bytes at the peak of a step, each case in a process of its own."""
    found: dict[int, Any] = {}
    for size in sizes:
        found[size] = {THEIRS: {}, OURS: {}}
        names = [f"{size}-{number}" for number in range(BATCHES_OF_A_PEAK)]
        for library in (THEIRS, OURS):
            for way in WAYS if size <= LARGEST_PLAIN else WAYS[1:]:
                with both.side(library) as side:
                    found[size][library][way] = side.ask("peak", way=way, names=names)
                print(f"{library} {way} {size}: {found[size][library][way]}", flush=True)
    return found


def time_table(found: dict[int, Any]) -> list[str]:
    """Each way against the plain one of its library."""
    rows = []
    for size, libraries in found.items():
        for library, seconds in libraries.items():
            for way, (middle, low, high) in ratios(seconds, "plain").items():
                rows.append(
                    (
                        f"{size:,}",
                        library,
                        CALLED[library, way],
                        "1" if way == "plain" else f"**{middle:.2f}** ({low:.2f} to {high:.2f})",
                        f"{statistics.median(seconds[way]) / size * 1e3:.3f}",
                    )
                )
    header = ("pairs", "library", "loss", "time / its own plain (quartiles)", "ms per pair")
    return table(header, rows)


def peak_table(found: dict[int, Any]) -> list[str]:
    """Each way, and against the plain one of its library."""
    rows = []
    for size, libraries in found.items():
        for library, ways in libraries.items():
            for way, peak in ways.items():
                cells = []
                for key in ("allocated", "resident"):
                    cells.append(f"{peak[key] / 2**20:.1f}")
                    share = peak[key] / ways["plain"][key] if "plain" in ways else None
                    cells.append("" if share is None else f"{share:.2f}")
                rows.append((f"{size:,}", library, CALLED[library, way], *cells))
    header = (
        *("pairs", "library", "loss"),
        *("tensors, MiB", "/ its own plain", "resident, MiB", "/ its own plain"),
    )
    return table(header, rows)


def record(
    lengths: dict[str, Any],
    versions: dict[str, dict[str, str]],
    agreement: dict[str, dict[str, float]],
    seconds: dict[int, Any],
    bytes_: dict[int, Any],
) -> list[str]:
    """The body of the record."""
    losses, norms = ([one[key] for one in agreement.values()] for key in ("loss", "norm"))
    body = [
        *(__doc__ or "").split("\n\n")[1].splitlines(),
        "",
        *[
            f"- {library}: {', '.join(f'{name} {value}' for name, value in about.items())}"
            for library, about in versions.items()
        ],
        "- the texts have on average "
        + " and ".join(
            f"{one['tokens']:.1f} tokens per {side} ({one['with_padding']:.1f} with the padding "
            "of a whole batch)"
            for side, one in lengths.items()
        ),
        f"- without dropout all {len(agreement)} ways have the loss {min(losses):.6f} to "
        f"{max(losses):.6f} and the gradient norm {min(norms):.6f} to {max(norms):.6f}",
        "",
        DOCUMENTED,
    ]
    if seconds:
        body += ["", "## Time", "", *time_table(seconds)]
    if bytes_:
        body += [
            "",
            "## Peak memory",
            "",
            "Beyond what is held between steps (parameters, moments), a process for each row. "
            "*Tensors*: what the allocator was asked for, exact; Paddle's counter, and for torch "
            "the sum of what its profiler is told of every allocation and release. *Resident*: "
            "how far the high-water mark of resident memory (VmHWM, started anew by "
            f"/proc/self/clear_refs after a step on {WARM_UP_PAIRS} pairs) rises in "
            f"{BATCHES_OF_A_PEAK} steps, measured alike on both sides; it contains what the "
            "allocators keep, buffers of the matrix libraries, and fragmentation.",
            "",
            *peak_table(bytes_),
        ]
    return body


def main() -> None:
    """Measure everything and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2; 0: no times")
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--timed", type=int, nargs="+", default=list(TIMED), help="pairs")
    parser.add_argument("--largest", type=int, default=4096, help="pairs; 0: no memory")
    parser.add_argument("--in", dest="folder", type=Path, help="internal: serve our side")
    options = parser.parse_args()
    if options.folder:
        serve(PaddleLibrary(options.folder), options.folder)
        return
    if options.rounds == 1:
        parser.error("--rounds: received 1; quartiles need at least 2, and 0 leaves the times out")
    if not TORCH.exists():
        raise SystemExit(f"{TORCH.parent.parent.name}: is not there; `make venv-torch` makes it")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes go, too
    sizes = [size for size in (256, 1024, 4096, 16384) if size <= options.largest]
    batches = dict.fromkeys(sizes, BATCHES_OF_A_PEAK)
    for size in options.timed:
        batches[size] = max(options.warm_up + options.rounds, batches.get(size, 0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lengths = prepare(folder, batches)
        both = Both(folder, dict(os.environ))
        versions = {}
        for library in (THEIRS, OURS):
            with both.side(library) as side:
                versions[library] = side.ask("versions")
        if len({about["threads"] for about in versions.values()}) > 1:
            raise SystemExit(f"the libraries do not have the same number of threads: {versions}")
        agreement = gradients(both, f"{min(batches)}-0")
        print("all ways compute the same gradient", flush=True)
        seconds = {}
        if options.rounds:
            seconds = times(both, options.timed, options.warm_up, options.rounds)
        bytes_ = peaks(both, sizes)
    path = write_record(
        "contrastive_vs_sentence_transformers",
        "Cached contrastive losses: sentence-transformers and ours, each against its own plain one",
        " ".join(["make bench-contrastive_vs_sentence_transformers", *_arguments()]),
        record(lengths, versions, agreement, seconds, bytes_),
    )
    raw = {
        "lengths": lengths,
        "versions": versions,
        "without_dropout": agreement,
        "seconds": seconds,
        "peak_bytes": bytes_,
    }
    path.with_suffix(".json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    print(path.read_text(encoding="utf-8"))


def _arguments() -> list[str]:
    return [f'ARGS="{" ".join(sys.argv[1:])}"'] if sys.argv[1:] else []


if __name__ == "__main__":
    main()
