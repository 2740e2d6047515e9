"""The runs of `parity`: each mode with and without recompute, on one process and on the configured
ranks; and the reference, dygraph with Paddle's own recompute and gradient synchronization.

Each trains from the same weights on the same pairs, with the configured dropout. Ranks draw other
dropout masks than one process. So what is compared across ranks is trained without dropout, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from paddle_recompute.app.config import Config, check_in_a_program
from paddle_recompute.errors import ConfigError

Mode = Literal["dygraph", "static"]
KINDS: tuple[tuple[Mode, bool, bool], ...] = (
    ("dygraph", False, False),
    ("dygraph", True, False),
    ("dygraph", True, True),
    ("static", False, False),
    ("static", True, False),
)
"""Mode, recompute, and whether it is the reference."""


@dataclass(frozen=True)
class Variant:
    """One training run: a mode with or without recompute on a number of ranks.

    Attributes:
        mode: The mode of its configuration.
        recompute: Whether the ``recompute`` section is applied.
        ranks: Number of processes.
        dropout: Whether the configured dropout is on; without it nothing is random.
        reference: Whether Paddle recomputes and synchronizes (``recompute.engine: fleet`` and
            ``sync.mode: fleet``).
    """

    mode: Mode
    recompute: bool
    ranks: int
    dropout: bool
    reference: bool = False

    @property
    def name(self) -> str:
        """``"static recompute, 2 ranks"``."""
        kind = "fleet" if self.reference else "recompute" if self.recompute else "plain"
        ranks = "1 process" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{self.mode} {kind}, {ranks}"

    @property
    def case(self) -> str:
        """``"dropout"`` or ``"no dropout"``."""
        return "dropout" if self.dropout else "no dropout"

    @property
    def file(self) -> str:
        """The name of its file: ``"static-recompute-2-ranks-no-dropout.safetensors"``."""
        return f"{self.name} {self.case}.safetensors".replace(",", "").replace(" ", "-")


@dataclass(frozen=True)
class Plan:
    """The runs of `parity`.

    Attributes:
        variants: In the order in which they run.
        global_loss: Whether the loss of several ranks is that over all their pairs.
        across_ranks: Whether it is also that of one process, so that they are compared.
        notes: Sentences that say what is not compared, and why.
    """

    variants: tuple[Variant, ...]
    global_loss: bool
    across_ranks: bool
    notes: tuple[str, ...]

    def without_reference(self, reason: str) -> Plan:
        """This plan without the reference; `reason` is a sentence for the notes."""
        variants = tuple(variant for variant in self.variants if not variant.reference)
        return replace(self, variants=variants, notes=(*self.notes, f"{_NO_REFERENCE}: {reason}"))


_NO_REFERENCE = "Not compared with Paddle's own recompute and synchronization (fleet)"


def plan(config: Config) -> Plan:
    """Choose the variants of a configuration.

    Raises:
        ConfigError: It has several machines, does not enable recompute, or has a setting that a
            static graph cannot honour.
    """
    if config.launch.num_nodes > 1:
        raise ConfigError(
            f"launch.num_nodes: {config.launch.num_nodes}: parity starts all ranks on this "
            "machine; set launch.num_nodes=1"
        )
    if not config.recompute.enable:
        raise ConfigError(
            "recompute.enable: false: parity compares each mode with and without recompute; set "
            "recompute.enable=true"
        )
    if config.contrastive.memory_budget is not None:
        raise ConfigError(
            "contrastive.memory_budget: parity does not measure how large the chunks may be; set "
            "contrastive.chunk_tokens (a run in this configuration reports them) instead"
        )
    check_in_a_program(config, is_trained=True)
    notes = [f"{sentence}." for sentence in config.without_effect()]
    has_dropout = bool(config.model.hidden_dropout or config.model.attention_dropout)
    if config.model.is_own:
        has_dropout = False
        notes.append(
            f"{config.model.name} is compared as it is: a static graph draws other dropout masks, "
            "so set its dropout to 0 in model.options."
        )
    elif not has_dropout:
        notes.append("The configuration has no dropout: all comparisons are without dropout.")
    ranks = config.launch.num_ranks
    k_steps = config.strategy.gradient_merge_configs.k_steps
    global_loss = config.contrastive.negatives == "global"
    across_ranks = global_loss and k_steps == 1  # else a micro-batch has other pairs
    counts = [1] if ranks == 1 else [1, ranks]
    if ranks == 1:
        notes.append("launch.num_ranks is 1: nothing is compared on several ranks.")
    elif not across_ranks:
        notes.append(
            f"With contrastive.negatives: local or strategy.gradient_merge {ranks} ranks have "
            "another loss than one process, so they are not compared with it."
        )
    variants = [
        Variant(mode, recompute, count, dropout, reference)
        for count in counts
        for mode, recompute, reference in KINDS
        for dropout in (
            [True, False]
            if has_dropout and ranks > 1 and across_ranks and not reference
            else [has_dropout]
        )
    ]
    found = Plan(tuple(variants), global_loss, across_ranks, tuple(notes))
    reason = _what_fleet_has_not(config)
    return found if reason is None else found.without_reference(reason)


def _what_fleet_has_not(config: Config) -> str | None:
    """A sentence that lists the settings that fleet's recompute lacks; None: there are none."""
    settings = {
        "recompute.policy": config.recompute.policy == "segments" and "segments",
        "contrastive.chunk_size": config.contrastive.chunk_size,
        "contrastive.chunk_tokens": config.contrastive.chunk_tokens,
    }
    given = [f"{path}: {value}" for path, value in settings.items() if value]
    return f"fleet does not support {', '.join(given)}." if given else None


def config_for(config: Config, variant: Variant) -> Config:
    """The configuration of one training run.

    It is validated in dygraph: what one mode alone has (``sync``, mixed precision) is no fault.
    """
    tree = config.to_dict()
    tree["mode"] = "dygraph"
    if not variant.dropout and not config.model.is_own:
        tree["model"] |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    tree["recompute"]["enable"] = variant.recompute
    tree["launch"]["num_ranks"] = variant.ranks
    if variant.reference:
        tree["recompute"]["engine"] = "fleet"
        tree["sync"]["mode"] = "fleet"
    return Config.model_validate(tree).model_copy(update={"mode": variant.mode})
