"""`OffloadSequential`: a chain of Layers larger than the device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import paddle

from paddle_recompute._paddle.layers import own_sublayers
from paddle_recompute.errors import ConfigError, OffloadError
from paddle_recompute.offload import _shard_call
from paddle_recompute.offload._cut import chain_of, send_away, sent_away
from paddle_recompute.offload._offloaded_tensor import OffloadedTensor
from paddle_recompute.offload._ranks import Carrier, RankSlot
from paddle_recompute.offload._resident import resident
from paddle_recompute.offload._state import show_values_in_state_dict
from paddle_recompute.offload.optimizer import MakeOptimizer, OffloadOptimizer
from paddle_recompute.recompute import OFFLOADS, PLACES, Place, slots

LayerOrFactory: TypeAlias = paddle.nn.Layer | Callable[[], paddle.nn.Layer]


class OffloadSequential(paddle.nn.Sequential):
    """A chain of Layers whose parameters, gradients and optimizer state are not on the device.

    The chain is cut into shards. One of them is on the device, and those that come next are on
    their way, while the others are in host memory or in a file. The forward keeps the inputs of
    each shard, off the device too. The backward brings the shards back in reverse and runs each
    again. Random numbers, buffers and gradients are those of the plain chain, to the bit. Where the
    chain is called twice in a backward, or shares a parameter, and steps accumulate, sums are in
    another order, which changes the last bit. So they are for a Layer that is used three times,
    twice in one shard, and for the gradient of an output that is used three times, twice in one
    shard of another chain. A backward runs once.

    The second forward has the state of the first, as in `recompute`. A tensor that a Layer stores
    beside its output has no graph: return an auxiliary loss. A captured tensor that needs a
    gradient is refused. Every floating-point output of a shard needs a gradient.

    Names, ``state_dict``, ``set_state_dict`` and checkpoints are those of the plain
    ``paddle.nn.Sequential``. ``state_dict`` returns copies in host memory. ``numpy()`` reads a
    parameter and ``set_value()`` writes it wherever it is; all else is refused outside of
    `resident`.

    A tuple that a Layer returns becomes the positional arguments of the next one.

    A parameter that two shards share stays on the device, as do buffers.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import OffloadSequential, TrainStep
        >>> layers = [paddle.nn.Linear(8, 8) for _ in range(4)]
        >>> model = OffloadSequential(layers, num_shards=2, offload="disk")
        >>> optimizer = model.optimizer(
        ...     lambda parameters: paddle.optimizer.AdamW(1e-3, parameters=parameters)
        ... )
        >>> step = TrainStep(model, optimizer, loss_fn=lambda model, x: model(x).square().mean())
        >>> step([paddle.ones([2, 8])]).grad_norm > 0
        True

    References:
        Pudipeddi et al. 2020, "Training Large Neural Networks with Constant Memory using a New
        Execution Algorithm", arXiv:2002.05645 (FairScale's OffloadModel).
    """

    def __init__(
        self,
        layers: paddle.nn.Sequential | Iterable[LayerOrFactory],
        *,
        num_shards: int,
        offload: Place | Literal["ranks"] = "host",
        num_microbatches: int = 1,
        checkpoint_activations: bool = True,
        prefetch: int = 1,
        offload_folder: str | None = None,
    ) -> None:
        """Cut the chain and take its parameters off the device.

        Args:
            layers: The chain, or a ``paddle.nn.Sequential``, whose names are kept. An entry may be
                a function that makes a Layer: it is called when its turn has come, so that the
                device never holds all of them.
            num_shards: Into how many shards; they are cut so that the largest is small.
            offload: ``"host"`` (pinned memory on GPUs; on a CPU it changes nothing) or ``"disk"``
                (a temporary file, which the system removes even after a crash), or ``"ranks"``:
                each shard is on the device of one rank, which alone updates it, and the others get
                its parameters while they compute with it. All ranks then call the chain, and read
                and write its parameters, together.
            num_microbatches: A shard computes so many parts of the batch one after the other. Every
                tensor that is as long as the first input is split.
            checkpoint_activations: Whether the backward computes activations again; False keeps
                them on the device.
            prefetch: How many shards are on their way while one computes; 0: none.
            offload_folder: Where the file of ``"disk"`` is; None: where Python puts temporary
                files (TMPDIR).

        Raises:
            ConfigError: An option has a value that is not allowed.
            OffloadError: The file cannot be made, or the disk is full.
        """
        super().__init__()
        _check(num_shards, offload, num_microbatches, prefetch)
        carrier = Carrier() if offload == "ranks" else None
        make_slot = RankSlot if offload == "ranks" else slots(offload, offload_folder)
        with sent_away() as offloaded:
            self._add(layers, make_slot, offloaded)
            self._offload_chain, self._cuts = chain_of(
                list(self), num_shards, offloaded, make_slot, prefetch=prefetch, carrier=carrier
            )
        self._names = dict.fromkeys(own_sublayers(self))
        self._storage = OFFLOADS[None if offload == "ranks" else offload]
        self._num_microbatches = num_microbatches
        self._checkpoint = checkpoint_activations
        show_values_in_state_dict(self)

    def forward(self, *inputs: Any) -> Any:
        """Run the chain.

        Args:
            *inputs: Of the first Layer.

        Returns:
            What the last Layer returns.

        Raises:
            OffloadError: A Layer was added or removed.
        """
        outputs: Any = inputs
        now = own_sublayers(self)
        if not self._names.keys() <= now.keys() or any(map(str.isdigit, now.keys() - self._names)):
            raise OffloadError(
                f"the OffloadSequential was cut with the Layers {', '.join(self._names)}, and has "
                f"{', '.join(now)}; make a new one with the Layers that are wanted"
            )
        members = [now[name] for name in self._names]
        for number, part in enumerate(self._cuts):
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            outputs = _shard_call.run(
                self._offload_chain,
                number,
                functools.partial(_one_after_the_other, members[part.start : part.stop]),
                given,
                storage=self._storage,
                checkpoint=self._checkpoint,
                num_microbatches=self._num_microbatches,
            )
        return outputs

    def optimizer(self, make: MakeOptimizer) -> OffloadOptimizer:
        """One Paddle optimizer per shard, as one that `TrainStep` takes.

        Args:
            make: ``make(parameters)`` returns a Paddle optimizer over them, with the same settings
                each time. Any that treats each parameter by itself.

        Raises:
            ConfigError: The optimizer is LBFGS, or clips by a norm over all parameters.
        """
        return OffloadOptimizer([self._offload_chain], self.parameters(), make)

    def resident(self, *layers: paddle.nn.Layer) -> contextlib.AbstractContextManager[None]:
        """`paddle_recompute.offload.resident` of this chain."""
        return resident(self, *layers)

    def _add(
        self,
        layers: Iterable[LayerOrFactory],
        make_slot: Callable[[], Any],
        offloaded: dict[int, OffloadedTensor],
    ) -> None:
        """Add the Layers one after the other; their parameters leave the device at once."""
        named = (
            list(layers.named_children())
            if isinstance(layers, paddle.nn.Sequential)
            else ((str(number), layer) for number, layer in enumerate(layers))
        )
        for name, entry in named:
            layer = entry if isinstance(entry, paddle.nn.Layer) else entry()
            self.add_sublayer(name, layer)
            send_away(layer, offloaded, make_slot)


def _one_after_the_other(layers: list[paddle.nn.Layer], *inputs: Any) -> Any:
    outputs: Any = inputs
    for layer in layers:
        outputs = layer(*outputs) if isinstance(outputs, tuple) else layer(outputs)
    return outputs


def _check(num_shards: int, offload: str, num_microbatches: int, prefetch: int) -> None:
    places = (*PLACES, "ranks")
    if offload not in places:
        raise ConfigError(
            f"offload={offload!r} does not exist; it is one of {', '.join(map(repr, places))}"
        )
    for name, value, least in (
        ("num_shards", num_shards, 1),
        ("num_microbatches", num_microbatches, 1),
        ("prefetch", prefetch, 0),
    ):
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")
