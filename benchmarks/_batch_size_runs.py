"""One training run of the batch size study: its settings, its data, and what comes out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import paddle
from numpy.typing import NDArray
from paddle.optimizer import AdamW, lr

from benchmarks._libreoffice import mine_libreoffice, read_mined, split_by_page
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.app.data import (
    Pair,
    PairTokenizer,
    load_tokenizer,
    mine_cedict,
    read_pairs,
    split_pairs,
    train_tokenizer,
)
from paddle_recompute.app.data._cache_folder import write_whole
from paddle_recompute.app.data.tokenizer import TokenRows, vocabulary_key
from paddle_recompute.app.encoder.ernie import ErnieEncoder
from paddle_recompute.app.retrieval.evaluation import encode_batches, retrieval_metrics
from paddle_recompute.contrastive import ContrastiveLoss, GradCache
from paddle_recompute.train_step.optimizer import decayed_parameters

CORPORA = {"libreoffice": "LibreOffice zh-en", "cedict": "CC-CEDICT"}
# Part of a run's key: to be raised with every change to what a run computes.
_VERSION = 1
_TILE = 1024
# What a run that diverged is worth.
FAILED = {"recall@1": 0.0, "recall@10": 0.0, "mrr": 0.0}


@dataclass(frozen=True)
class Recipe:
    """What all runs of a study have in common."""

    num_layers: int = 2
    hidden_size: int = 64
    num_heads: int = 4
    intermediate_size: int = 128
    activation: Literal["gelu", "relu"] = "relu"
    dropout: float = 0.0
    vocab_size: int = 4000
    max_characters: int = 24  # of the Chinese text; longer pairs are left out
    max_words: int = 14  # of the English text
    max_tokens: int = 24
    temperature: float = 0.05
    weight_decay: float = 0.01
    clip_grad_norm: float = 1.0
    chunk_tokens: int = 4096
    held_out: int = 2000
    split_seed: int = 0
    warm_up_batch: int = 256
    warm_up_steps: int = 40
    warm_up_learning_rate: float = 3e-3

    def takes(self, pair: Pair) -> bool:
        """Whether a pair is short enough."""
        return (
            len(pair.query) <= self.max_characters and len(pair.positive.split()) <= self.max_words
        )


@dataclass(frozen=True)
class Run:
    """The settings of one run; with the recipe they decide everything that it computes."""

    corpus: str
    batch: int
    steps: int
    learning_rate: float
    seed: int

    def key(self, recipe: Recipe) -> str:
        """A file name that two runs share only if nothing differs between them."""
        settings = {
            "version": _VERSION,
            "paddle": paddle.__version__,
            "run": dataclasses.asdict(self),
            "recipe": dataclasses.asdict(recipe),
        }
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
        return (
            f"{self.corpus}-b{self.batch}-s{self.steps}-lr{self.learning_rate:g}-seed{self.seed}"
            f"-{digest}"
        )


@dataclass(frozen=True)
class Corpus:
    """The data of a study, tokenized once."""

    queries: TokenRows
    positives: TokenRows
    valid: list[Pair]
    test: list[Pair]
    tokenizer: PairTokenizer
    num_train: int
    about: str


def load_corpus(name: str, recipe: Recipe, cache_dir: Path) -> Corpus:
    """Mine (once), split and tokenize.

    Args:
        name: One of `CORPORA`.
        recipe: How much is held out, and the vocabulary.
        cache_dir: What is mined stays there.
    """
    if name == "libreoffice":
        found = read_mined(mine_libreoffice(cache_dir))
        short = [one for one in found if recipe.takes(one.pair)]
        by_page = split_by_page(short, held_out=recipe.held_out, seed=recipe.split_seed)
        train, valid, test = by_page.train, by_page.valid, by_page.test
        about = (
            f"{len(found)} pairs mined, {len(short)} of them short enough, on "
            f"{len({one.page for one in short})} pages; whole pages held out; "
            f"{by_page.num_left_out} left out that repeat a text"
        )
    else:
        pairs = read_pairs(mine_cedict(cache_dir)).pairs
        taken = [pair for pair in pairs if recipe.takes(pair)]
        split = split_pairs(taken, valid_pairs=2 * recipe.held_out, seed=recipe.split_seed)
        halves = split_pairs(split.valid, valid_pairs=recipe.held_out, seed=recipe.split_seed + 1)
        train, valid, test = split.train, halves.train, halves.valid
        about = (
            f"{len(pairs)} pairs mined, {len(taken)} of them short enough; no text is on two sides"
        )
    texts = [text for pair in train for text in (pair.query, pair.positive)]
    vocabulary = cache_dir / f"tokenizer-{vocabulary_key(texts, recipe.vocab_size)}.json"
    if not vocabulary.exists():
        train_tokenizer(texts, vocabulary, recipe.vocab_size)
    tokenizer = load_tokenizer(vocabulary)
    queries = tokenizer.tokenize([pair.query for pair in train], recipe.max_tokens)
    positives = tokenizer.tokenize([pair.positive for pair in train], recipe.max_tokens)
    about += (
        f"; {len(train)} to train on, {len(valid)} to choose by, {len(test)} to report; "
        f"{queries.ids.size / len(train):.1f} and {positives.ids.size / len(train):.1f} tokens on "
        f"average, {queries.num_cut} and {positives.num_cut} texts cut at {recipe.max_tokens}"
    )
    return Corpus(queries, positives, valid, test, tokenizer, len(train), about)


def batches(num_pairs: int, batch: int, steps: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """The places of the pairs of every batch, cut from one stream of shuffled epochs.

    The stream depends on the seed alone: at equal examples, all batch sizes read the same pairs
    in the same order, and none is left over at the end of an epoch.
    """
    epoch, stream = 0, np.empty(0, np.int64)
    for _ in range(steps):
        while len(stream) < batch:
            order = np.random.default_rng([seed, epoch]).permutation(num_pairs)
            stream, epoch = np.concatenate([stream, order]), epoch + 1
        yield stream[:batch]
        stream = stream[batch:]


def schedule(peak: float, steps: int) -> lr.LRScheduler:
    """Up to `peak` in the first tenth of the steps, then linearly down; 0 would be the next."""
    rise = max(2, steps // 10)
    decay = lr.PolynomialDecay(peak, decay_steps=max(1, steps - rise), end_lr=0.0, power=1.0)
    return lr.LinearWarmup(decay, warmup_steps=rise, start_lr=peak / rise, end_lr=peak)


def train(
    run: Run, recipe: Recipe, corpus: Corpus, model: paddle.nn.Layer, *, advance: Callable[[], Any]
) -> list[float]:
    """Train `model` in place as `run` says; returns the loss of every step."""
    paddle.seed(run.seed + 1)
    loss = ContrastiveLoss(
        recipe.temperature,
        normalize=True,
        mask_false_negatives=True,  # at the seam of two epochs a batch can hold a pair twice
        tile=_TILE if run.batch > _TILE else None,
    )
    cache = GradCache(model, loss, chunk_tokens=recipe.chunk_tokens)
    rate = schedule(run.learning_rate, run.steps)
    decayed = decayed_parameters(model)
    optimizer = AdamW(
        rate,
        parameters=model.parameters(),
        weight_decay=recipe.weight_decay,
        apply_decay_param_fun=decayed.__contains__,
        grad_clip=paddle.nn.ClipGradByGlobalNorm(recipe.clip_grad_norm),
    )
    model.train()
    losses = []
    for places in batches(corpus.num_train, run.batch, run.steps, run.seed):
        value = cache.backward(
            paddle.to_tensor(corpus.queries.pad(places)),
            paddle.to_tensor(corpus.positives.pad(places)),
            loss_arguments={"positive_ids": paddle.to_tensor(places)},
        )
        optimizer.step()
        optimizer.clear_grad()
        rate.step()
        losses.append(float(value.item()))
        advance()
    return losses


def evaluate(model: paddle.nn.Layer, corpus: Corpus, pairs: Sequence[Pair], max_tokens: int) -> Any:
    """Recall and MRR of the queries of `pairs` among all positives of `pairs`."""
    pool = list(dict.fromkeys(pair.positive for pair in pairs))
    place_of = {text: place for place, text in enumerate(pool)}
    queries, candidates = (
        encode_batches(model, corpus.tokenizer, texts, max_tokens=max_tokens, batch_size=128)
        for texts in ([pair.query for pair in pairs], pool)
    )
    target = np.array([place_of[pair.positive] for pair in pairs])
    return retrieval_metrics(queries, candidates, target)


def warmed_up(name: str, recipe: Recipe, corpus: Corpus, cache_dir: Path) -> Path:
    """The weights that all runs on a corpus start from; trained if they are not there."""
    run = Run(
        name, recipe.warm_up_batch, recipe.warm_up_steps, recipe.warm_up_learning_rate, seed=1000
    )
    path = cache_dir / f"warm-up-{run.key(recipe)}.pdparams"
    if not path.exists():
        model = new_model(recipe, corpus.tokenizer.vocab_size)
        train(run, recipe, corpus, model, advance=lambda: None)
        unfinished = path.with_name(f".unfinished-{path.name}")
        paddle.save(model.state_dict(), str(unfinished))
        unfinished.replace(path)
    return path


def new_model(recipe: Recipe, vocab_size: int) -> ErnieEncoder:
    """The encoder, with random weights, always the same."""
    paddle.seed(0)
    config = ModelConfig(
        hidden_size=recipe.hidden_size,
        num_layers=recipe.num_layers,
        num_heads=recipe.num_heads,
        intermediate_size=recipe.intermediate_size,
        max_position_embeddings=recipe.max_tokens,
        type_vocab_size=1,
        hidden_dropout=recipe.dropout,
        attention_dropout=recipe.dropout,
        activation=recipe.activation,
        pooling="mean",
    )
    return ErnieEncoder(config, vocab_size)


class Runs:
    """Runs that are done, one JSON file each, and the means to do more.

    Args:
        recipe: What the runs have in common.
        cache_dir: Where everything is kept.
        show: Called with one line for every run that has ended.
    """

    def __init__(self, recipe: Recipe, cache_dir: Path, show: Callable[[str], Any]) -> None:
        self.recipe = recipe
        self._cache_dir = cache_dir
        self._show = show
        self._corpora: dict[str, Corpus] = {}

    def corpus(self, name: str) -> Corpus:
        """The data, loaded when it is first asked for."""
        if name not in self._corpora:
            self._corpora[name] = load_corpus(name, self.recipe, self._cache_dir)
        return self._corpora[name]

    def found(self, run: Run) -> dict[str, Any] | None:
        """What came out of a run; None if it is still to be done."""
        path = self._path(run)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def do(self, run: Run, advance: Callable[[], Any]) -> dict[str, Any]:
        """What came out of a run, which is done now if it was not before."""
        if (found := self.found(run)) is not None:
            return found
        corpus, recipe = self.corpus(run.corpus), self.recipe
        model = new_model(recipe, corpus.tokenizer.vocab_size)
        start = warmed_up(run.corpus, recipe, corpus, self._cache_dir)
        model.set_state_dict(paddle.load(str(start)))
        began, began_cpu = time.perf_counter(), time.process_time()
        losses = train(run, recipe, corpus, model, advance=advance)
        trained = time.perf_counter() - began
        diverged = not bool(np.isfinite(losses).all())
        sides = {"valid": corpus.valid, "test": corpus.test}
        result = {
            "run": dataclasses.asdict(run),
            "recipe": dataclasses.asdict(recipe),
            "paddle": paddle.__version__,
            "diverged": diverged,
            **{
                name: FAILED if diverged else evaluate(model, corpus, pairs, recipe.max_tokens)
                for name, pairs in sides.items()
            },
            "first_loss": losses[0],
            "last_loss": None if diverged else float(np.mean(losses[-max(1, run.steps // 10) :])),
            "train_seconds": round(trained, 2),
            "seconds": round(time.perf_counter() - began, 2),
            "cpu_seconds": round(time.process_time() - began_cpu, 2),
        }
        write_whole(self._path(run), json.dumps(result, indent=1) + "\n")
        self._show(
            f"{run.corpus} B={run.batch} steps={run.steps} lr={run.learning_rate:g} "
            f"seed={run.seed}: valid MRR {result['valid']['mrr']:.4f}, "
            f"{result['seconds']:.0f} s{', diverged' if diverged else ''}"
        )
        return result

    def start(self, name: str) -> dict[str, Any]:
        """Recall and MRR of the shared warm-up, on the test side."""
        corpus = self.corpus(name)
        model = new_model(self.recipe, corpus.tokenizer.vocab_size)
        path = warmed_up(name, self.recipe, corpus, self._cache_dir)
        figures = path.with_suffix(".json")
        if not figures.exists():
            model.set_state_dict(paddle.load(str(path)))
            found = evaluate(model, corpus, corpus.test, self.recipe.max_tokens)
            write_whole(figures, json.dumps(found) + "\n")
        return dict(json.loads(figures.read_text(encoding="utf-8")))

    def _path(self, run: Run) -> Path:
        return self._cache_dir / "runs" / f"{run.key(self.recipe)}.json"
