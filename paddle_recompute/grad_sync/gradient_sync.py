"""`GradientSync`: after the backward, every rank holds the mean of all ranks' gradients."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from typing import Literal

import paddle
import paddle.distributed as dist

from paddle_recompute import _paddle
from paddle_recompute.errors import ConfigError, SyncError
from paddle_recompute.grad_sync.ranks import is_distributed

SyncMode = Literal["auto", "fused"]


class GradientSync:
    """Synchronizes gradients once per optimizer step, whatever was recomputed.

    ``fused`` sends all gradients after the last backward, joined into few large buffers: the
    background of this project calls it ``no_sync`` plus ``fused_allreduce_gradients``. It is what
    is right under recompute with Paddle's ``DataParallel``, whose own synchronization raises "has
    been ready before" there; here the ranks also agree first on which gradients there are.

    Examples:
        >>> sync = GradientSync(model)                            # doctest: +SKIP
        >>> with sync.last_backward():                            # doctest: +SKIP
        ...     loss_fn(model, batch).backward()
        >>> optimizer.step()                                      # doctest: +SKIP
    """

    def __init__(
        self,
        parameters: paddle.nn.Layer | Iterable[paddle.Tensor],
        *,
        mode: SyncMode = "auto",
        group: dist.communication.group.Group | None = None,
    ) -> None:
        """Agree with the other ranks on what will be synchronized.

        Args:
            parameters: A Layer, or the parameters in the same order on every rank. Those with
                ``stop_gradient`` are left alone.
            mode: ``"fused"``, or ``"auto"`` which picks it.
            group: The data-parallel ranks; None is all of them.

        Raises:
            ConfigError: `mode` does not exist.
            SyncError: The ranks' parameters differ in number, shape or dtype.
        """
        if mode not in ("auto", "fused"):
            raise ConfigError(f"sync mode {mode!r} does not exist; it is one of 'auto', 'fused'")
        self._model = parameters if isinstance(parameters, paddle.nn.Layer) else None
        named = (
            list(parameters.named_parameters())
            if isinstance(parameters, paddle.nn.Layer)
            else [(parameter.name, parameter) for parameter in parameters]
        )
        # By identity: a weight that is tied under two names is sent once.
        trained = {id(p): (name, p) for name, p in named if not p.stop_gradient}
        self._parameters = dict(trained.values())
        self.group = group
        self.mode: SyncMode = "fused"
        if is_distributed(group):
            self._agree_on_parameters()

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        """Run the last backward before the optimizer's step inside; afterwards every rank's
        ``.grad`` is the mean over all ranks.

        Gradients that earlier backwards accumulated are part of it. A parameter that has a
        gradient on some ranks only counts as zero on the others; one that has none anywhere keeps
        None.
        """
        with self.no_sync():
            yield
        if is_distributed(self.group):
            self._fill_missing()
            _paddle.fused_allreduce_gradients(list(self._parameters.values()), self.group)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Around the other backwards; keeps a ``paddle.DataParallel`` from synchronizing."""
        if isinstance(self._model, paddle.DataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _fill_missing(self) -> None:
        """Zeros where another rank has a gradient and this one has not.

        ``fused_allreduce_gradients`` joins whatever is there: two ranks with different gradients
        of one total size would add up the wrong numbers without a word.
        """
        parameters = list(self._parameters.values())
        present = paddle.to_tensor([p.grad is not None for p in parameters]).astype("int32")
        dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self.group)
        for parameter, somewhere in zip(parameters, present.tolist(), strict=True):
            if somewhere and parameter.grad is None:
                parameter.grad = paddle.zeros_like(parameter)

    def _agree_on_parameters(self) -> None:
        described = [
            f"{index}: {list(p.shape)} {p.dtype}"
            for index, p in enumerate(self._parameters.values())
        ]
        own = [len(described), zlib.crc32("\n".join(described).encode())]
        smallest = paddle.to_tensor(own, dtype="int64")
        largest = smallest.clone()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        if smallest.tolist() != largest.tolist():
            raise SyncError(
                "the ranks do not synchronize the same parameters (their number, order, shapes or "
                f"dtypes differ); this rank has {len(described)}. Build the model in the same way "
                "on every rank."
            )
