"""Train the runs that are compared, on this rank and the others."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.optimizer import AdamW

from paddle_recompute._files import write_json
from paddle_recompute.app.config import Config, schedule_of
from paddle_recompute.app.data import PairLoader, build_loader, prepare_data
from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    FLEET,
    PAIRS,
    RUNS,
    Arrays,
    Outcome,
    compare,
    tolerance_of,
)
from paddle_recompute.app.templates import render
from paddle_recompute.app.trainer import (
    Chunks,
    Objective,
    batches_of,
    build_step,
    check_mode,
    join_ranks,
    seeded_model,
    step_seed,
    total_steps,
    wrap,
)
from paddle_recompute.distributed import barrier, broadcast_from_rank0, values_of_ranks
from paddle_recompute.errors import (
    ConfigError,
    PaddleRecomputeError,
    RecomputeError,
    SelectionError,
)

_MOMENT = ":moment1"
_REFUSED = {
    "segments": "parity trains in dygraph, too, which refuses it",
    "budget": "parity makes no plan",
}
_WORDS = Path(__file__).with_name("report.txt.j2")


def train_and_compare(config: Config, *, steps: int, say: Callable[[str], Any]) -> dict[str, Any]:
    """Train `config` in both modes, with and without recompute, and compare.

    All runs begin with the same weights (``train.seed``) and read the same pairs. Both modes seed
    the generator in each step and draw in the order of the model, so they draw the same dropout
    masks. The host holds weights and gradients of all five runs at the end.

    Args:
        config: Has recompute, and what a static graph can honour. Its ``mode`` is ignored.
        steps: Optimizer steps of each run; differences grow with them.
        say: Shows the user, on rank 0, which run begins, and the result.

    Returns:
        The report as JSON; rank 0 writes it to ``parity.json`` in ``train.output_dir``.

    Raises:
        ConfigError: A mode cannot honour the configuration on this device.
        DataError: The pairs cannot be read, or are too few for a batch.
        OutputError: The report cannot be written.
    """
    if why := _REFUSED.get(config.recompute.policy):
        raise ConfigError(f"recompute.policy: {config.recompute.policy}: {why}; set policy: all")
    notes, why_not_fleet = _notes(config), _what_fleet_has_not(config)
    rank = join_ranks(config)
    configs = {run: _config_for(config, run) for run in RUNS if run != FLEET or not why_not_fleet}
    for each_config in configs.values():
        check_mode(each_config)
    data = prepare_data(config, rank, barrier)
    loader = build_loader(config, data, rank)
    vocab_size = data.tokenizer.vocab_size
    initial, outcomes, faults = _weights(config, vocab_size), {}, []
    for number, (run, own) in enumerate(configs.items(), 1):
        if rank == 0:
            say(f"{number}/{len(configs)}  {run}")
        try:
            found = _train(own, initial, loader, rank, vocab_size, steps)
        except (SelectionError, RecomputeError) as error:
            if run != FLEET:
                raise
            why_not_fleet = str(error)
            continue
        except PaddleRecomputeError as error:
            error.args = (f"{run}: {error}",)
            raise
        outcomes[run] = found
        faults += [f"{run}: {name} differs between the ranks" for name in _that_differ(found)[:1]]
    if why_not_fleet:
        kind = "Paddle's own recompute and synchronization (fleet)"
        notes.append(f"Not compared with {kind}: {why_not_fleet}")
    comparisons = [
        {
            "left": left,
            "right": right,
            **compare(outcomes[left], outcomes[right], initial, tolerance_of(left, right, config)),
        }
        for left, right in PAIRS
        if right in outcomes
    ]
    faults += [
        f"{comparison['left']} and {comparison['right']}: {comparison['fault']}"
        for comparison in comparisons
        if comparison["fault"]
    ]
    report = {
        "ok": not faults,
        "faults": faults,
        "notes": notes,
        "ranks": config.world_size,
        "runs": {
            run: {"losses": outcome.losses, "grad_norms": outcome.grad_norms}
            for run, outcome in outcomes.items()
        },
        "comparisons": comparisons,
    }
    if rank == 0:
        tolerances = [EXACT, BETWEEN_MODES, BETWEEN_RANKS]
        say(render(_WORDS, tolerances=tolerances, **report).rstrip())
        write_json(config.train.output_dir / "parity.json", report)
    return report


def _notes(config: Config) -> list[str]:
    notes = [f"{sentence}." for sentence in config.without_effect()]
    if config.model.is_own:
        notes.append(
            f"{config.model.name} is compared as it is: a static graph draws other dropout masks, "
            "so set its dropout to 0 in model.options."
        )
    if config.world_size == 1:
        notes.append("There is one rank: the synchronization of gradients is not compared.")
    return notes


def _what_fleet_has_not(config: Config) -> str:
    """A sentence that lists the settings that fleet's recompute lacks; empty: there are none."""
    settings = {
        "contrastive.chunk_size": config.contrastive.chunk_size,
        "contrastive.chunk_tokens": config.contrastive.chunk_tokens,
        "recompute.keep": config.recompute.keep,
    }
    given = [f"{path}: {value}" for path, value in settings.items() if value]
    return f"fleet does not support {', '.join(given)}." if given else ""


def _config_for(config: Config, run: str) -> Config:
    """The configuration of one run.

    It is validated in dygraph: what one mode alone has (``sync``, mixed precision) is no fault.
    """
    mode, kind = run.split()
    tree = {**config.to_dict(), "mode": "dygraph"}
    tree["recompute"]["enable"] = kind != "plain"
    if run == FLEET:
        tree["recompute"]["engine"] = tree["sync"]["mode"] = kind
    return Config.model_validate(tree).model_copy(update={"mode": mode})


def _weights(config: Config, vocab_size: int) -> Arrays:
    """Those of rank 0: a model may draw them from a source that ``train.seed`` does not reach."""
    model = seeded_model(config, vocab_size)
    objective = Objective(config, Chunks())
    for layer in (model, objective.loss):
        broadcast_from_rank0(layer)
    state = _state(model, objective)
    return {name: tensor.numpy() for name, tensor in state.items()}


def _train(
    config: Config, initial: Arrays, loader: PairLoader, rank: int, vocab_size: int, steps: int
) -> Outcome:
    model = seeded_model(config, vocab_size)
    section = config.contrastive
    objective = Objective(config, Chunks(section.chunk_size, section.chunk_tokens))
    state = _state(model, objective)
    for name, array in initial.items():
        state[name].set_value(array)
    if config.mode == "dygraph":
        wrap(model, config)
    schedule = schedule_of(config, total_steps(config, len(loader)))
    step = build_step(config, objective, model, schedule, vocab_size)
    found = Outcome()
    for number, _, micro_batches in batches_of(config, loader, 0, steps):
        paddle.seed(step_seed(config.train.seed, number, rank))
        result = step(micro_batches)
        found.losses.append(result.loss)
        found.grad_norms.append(result.grad_norm)
        found.learning_rates.append(float(schedule.get_lr()))
        if number == 1:
            found.gradients = _gradients(step.state_dict()["optimizer"])
        schedule.step()
    step.write_back()
    found.parameters = {name: tensor.numpy() for name, tensor in state.items()}
    return found


def _state(model: paddle.nn.Layer, objective: Objective) -> dict[str, paddle.Tensor]:
    """Parameters and buffers, by structured name; names of the loss begin with ``loss/``."""
    return {**model.state_dict(), **objective.parameters()}


def _gradients(moments: dict[str, Any]) -> Arrays:
    """The synchronized and clipped gradients of the first step, from the moments after it.

    AdamW's first moment is (1 - beta1) times the gradient then, in both modes. A Program frees the
    gradients themselves.
    """
    beta1 = inspect.signature(AdamW).parameters["beta1"].default
    return {
        name.removesuffix(_MOMENT): np.array(moment) / (1 - beta1)
        for name, moment in moments.items()
        if name.endswith(_MOMENT)
    }


def _that_differ(found: Outcome) -> list[str]:
    """The names of the parameters, and what else of a run, that the ranks do not have alike."""
    own: dict[str, Any] = {
        name: zlib.crc32(np.ascontiguousarray(array).tobytes())
        for name, array in found.parameters.items()
    }
    own |= {"the loss": found.losses, "the gradient norm": found.grad_norms}
    ranks = values_of_ranks(own, "what a run gave")
    return [name for name in own if any(rank.get(name) != own[name] for rank in ranks)]
