"""`resident`: offloaded parameters on the device for a while, as ordinary ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import paddle

from paddle_recompute.errors import OffloadError
from paddle_recompute.offload._chain import Chain
from paddle_recompute.offload._offloaded_tensor import offloaded_tensor_of


def chains_of(model: paddle.nn.Layer) -> list[Chain]:
    """The chains that `model` and its sublayers belong to."""
    found = (getattr(part, "_offload_chain", None) for part in model.sublayers(include_self=True))
    return list({id(chain): chain for chain in found if chain is not None}.values())


@contextlib.contextmanager
def resident(model: paddle.nn.Layer, *layers: paddle.nn.Layer) -> Iterator[None]:
    """Inside, parameters and their gradients are on the device, and are used like any others.

    Their Layers run as without offloading: they keep their activations, and no backward computes
    them again. So a penalty on the parameters has the gradient of the plain model (where shards are
    offloaded and the penalty has several terms for a parameter, up to the order of their sum), and
    ``.grad`` can be changed and assigned to. A graph that was made inside may have its backward
    outside; it keeps the memory that it needs. A view or ``detach()`` of a parameter stays as it is
    at the end. What ``.grad`` gave inside is gone then, as after ``clear_grad``; read it again.

    Args:
        model: An `OffloadSequential`, a Layer that `offload_layers` has changed, or one that has
            such sublayers.
        *layers: Those of its Layers whose shards come; none given: all of them.

    Raises:
        OffloadError: `model` has nothing that is offloaded.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import OffloadSequential
        >>> model = OffloadSequential([paddle.nn.Linear(4, 4) for _ in range(2)], num_shards=2)
        >>> with model.resident(model[1]):
        ...     norm = model[1].weight.norm()
    """
    chains = chains_of(model)
    if not chains:
        raise OffloadError(f"nothing of this {type(model).__name__} is offloaded")
    wanted = {id(offloaded_tensor_of(p)) for layer in layers for p in layer.parameters()}
    with contextlib.ExitStack() as stack:
        for chain in chains:
            shards = (
                number
                for number, shard in enumerate(chain.shards)
                if not layers or any(id(offloaded) in wanted for offloaded in shard.parameters)
            )
            stack.enter_context(chain.resident(shards))
        yield
