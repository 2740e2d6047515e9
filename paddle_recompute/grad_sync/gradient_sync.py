"""`GradientSync`: after the backward, every rank holds the mean of all ranks' gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import paddle
from paddle.distributed.communication.group import Group

from paddle_recompute._paddle.distributed import is_from_gloo
from paddle_recompute._paddle.walk import ParameterWalk
from paddle_recompute.distributed import (
    Limits,
    agree_on_options,
    is_distributed,
    is_gloo,
    peers,
    scope_of,
)
from paddle_recompute.errors import CheckpointError, SyncError
from paddle_recompute.grad_sync._communication_trace import CommunicationTrace
from paddle_recompute.grad_sync._compression import Compression, GradientCompression
from paddle_recompute.grad_sync._consistency_check import Agreed, StepReport
from paddle_recompute.grad_sync._fleet import FleetReduction
from paddle_recompute.grad_sync._offloaded import OffloadedSync
from paddle_recompute.grad_sync._options import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    SyncMode,
    check_options,
    choose_mode,
)
from paddle_recompute.grad_sync._parameters import ParameterList, ParameterSource, agree_on_trained
from paddle_recompute.grad_sync._reduction import BucketedReduction
from paddle_recompute.grad_sync._replica_check import ReplicaCheck
from paddle_recompute.grad_sync._start import StartValues


class GradientSync:
    """Synchronizes gradients once per optimizer step, with or without recompute.

    ``fused`` all-reduces the gradients after the last backward, in few large buckets, as Paddle's
    ``no_sync`` plus ``fused_allreduce_gradients`` does. It works under recompute, where
    ``DataParallel`` alone raises "has been ready before". Communication and computation do not
    overlap. ``overlap`` all-reduces the same buckets while the backward still runs, under every
    form of recompute; the means are bitwise identical. In both modes the ranks agree on which
    parameters have a gradient. ``fleet`` calls Paddle's own ``no_sync`` plus
    ``fused_allreduce_gradients``, as a reference; here too the ranks agree first.

    In your own loop:

        sync = GradientSync(model)
        with sync.last_backward():
            loss_fn(model, batch).backward()
        optimizer.step()

    It synchronizes data-parallel replicas only. Sharded optimizers and tensor parallelism have
    collectives of their own; pass their data-parallel group as `group`.
    """

    def __init__(
        self,
        parameters: paddle.nn.Layer
        | Iterable[paddle.Tensor]
        | Callable[[], Iterable[paddle.Tensor]],
        *,
        mode: SyncMode = "auto",
        bucket_bytes: int = BUCKET_BYTES,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        compression: Compression = "none",
        error_feedback: bool = True,
        group: Group | None = None,
        find_unused_parameters: bool = False,
        peer_timeout: float = 30.0,
        stall_timeout: float = 1800.0,
        check_every: int | None = None,
        broadcast_parameters: bool = False,
    ) -> None:
        """Agree with the other ranks on what will be synchronized. Every rank must call this.

        In the first step the ranks compare, bit by bit, the values from before it: parameters,
        frozen ones too, and persistent buffers that are unchanged since construction. This computes
        a digest of each tensor on its device, about 1 s per GB on a CPU. Later steps compare
        nothing.

        Args:
            parameters: A Layer, or the parameters in the same order on every rank, or a function
                that lists them. They are listed again in each step: a parameter that is unfrozen or
                added to the Layer later is synchronized from then on; one with ``stop_gradient``
                and without a gradient is not. All ranks must make such changes in the same step.
            mode: ``"overlap"``, ``"fused"``, ``"fleet"``, or ``"auto"``, which picks ``"overlap"``,
                because that sends buckets during the backward; see `mode` and `reason` afterwards.
                ``"fleet"`` takes no compression and no bucket sizes.
            bucket_bytes: Size of a bucket.
            first_bucket_bytes: Size of the first bucket; small, so that communication starts early.
            compression: ``"bf16"`` sends half the bytes; the mean is rounded to 8 bits of mantissa.
            error_feedback: With ``"bf16"``: add the rounding error of this rank to its gradient of
                the next step. This about halves the error of a gradient that does not change from
                step to step. The rounding of the ranks' sum is not corrected. Costs memory of the
                size of the gradients.
            group: The data-parallel ranks; None: all ranks. A rank outside of the group
                synchronizes nothing, and its `mode` is ``"none"``. Rank 0 of the run must call this
                even if it is outside, because the control server runs there.
            find_unused_parameters: Do not warn if a parameter that had a gradient has none in a
                later step. The means are the same either way.
            peer_timeout: Seconds without a sign of life after which a rank counts as dead.
            stall_timeout: Seconds to wait for a rank that is alive but late, for example while rank
                0 evaluates or writes a checkpoint.
            check_every: Compare the parameters of all ranks, bit by bit, after every so many steps;
                None: never. Buffers of a Layer are compared too. Each rank's BatchNorm has
                statistics of its own, so a difference of buffers is a warning, once.
            broadcast_parameters: Broadcast parameters, and buffers of a Layer, from the first rank
                of `group`, as ``paddle.DataParallel`` does.

        Raises:
            ConfigError: An option has a value that is not allowed or contradicts another option.
            SyncError: The ranks' parameters differ in number, shape or dtype.
        """
        sizes = bucket_bytes, first_bucket_bytes
        check_options(mode, compression, sizes, (peer_timeout, stall_timeout), check_every)
        self._model = parameters if isinstance(parameters, paddle.nn.Layer) else None
        self._source = _source_of(parameters)
        self._listed = ParameterList(self._source, structured=self._model is not None)
        self.group = group
        self.num_synchronized = 0
        """How many optimizer steps were synchronized so far."""
        self.report = StepReport()
        """What the caller adds to the consistency check at the end of the next `last_backward`."""
        self.agreed: Agreed | None = None
        """The result of the last consistency check; None in a single process."""
        self._is_inside = False
        self._reduction: BucketedReduction | FleetReduction | None = None
        self._compression: GradientCompression | None = None
        self._start: StartValues | None = None
        self._replica_check: ReplicaCheck | None = None
        self.mode, self.reason = choose_mode(mode, group)
        has_own_buckets = self.mode != "fleet" and not isinstance(self._model, paddle.DataParallel)
        self._offloaded = OffloadedSync(self._listed.offloaded, group, has_own_buckets, compression)
        self.compression = compression
        self.find_unused_parameters = find_unused_parameters
        if self.mode == "none":
            if is_distributed():
                peers()  # ranks of the group may wait for this rank to connect
            return
        peers().state.limits = Limits(peer_timeout, stall_timeout)
        self._scope = scope_of(group)
        agree_on_options(
            {
                "mode": self.mode,
                "bucket_bytes": bucket_bytes,
                "first_bucket_bytes": first_bucket_bytes,
                "compression": compression,
                "find_unused_parameters": find_unused_parameters,
                "check_every": check_every,
                "broadcast_parameters": broadcast_parameters,
            },
            self._scope,
        )
        agree_on_trained(self._listed, self._scope)
        if check_every is not None:
            self._replica_check = ReplicaCheck(self._listed, self._model, self._scope, check_every)
        self._start = StartValues(self._listed, group, broadcasts=broadcast_parameters)
        if self._model is not None:
            self._start.add(self._model)
        if self.mode == "fleet":
            self._reduction = FleetReduction(self._listed, group, self._start)
            return
        self._compression = GradientCompression(
            compression, error_feedback=error_feedback, is_gloo=is_gloo(group)
        )
        self._reduction = BucketedReduction(
            self._listed,
            group,
            self._start,
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=first_bucket_bytes,
            compression=self._compression,
            early=self.mode == "overlap",
            expects_unused=find_unused_parameters,
        )

    @contextlib.contextmanager
    def last_backward(self) -> Iterator[None]:
        """Context manager for the last backward before ``optimizer.step()``. At its exit every
        rank's ``.grad`` is the mean over all ranks.

        All gradients present at exit are averaged, whichever backward has added them; the body may
        be empty. A gradient that only some ranks have counts as zero on the others. Where no rank
        has one, ``.grad`` stays None.

        Unscale and clip afterwards. A change of ``.grad`` inside, after the backward, is averaged
        too; with ``overlap`` the buckets are then sent again, with a warning. From the second step
        on, ``overlap`` does not detect a change that leaves ``inplace_version`` as it was:
        ``grad.set_value(x)``, ``parameter.grad = x``, and on Paddle 2.6 ``clip_grad_norm_``.

        Raises:
            SyncError: A gradient is sparse; the ranks train different parameters; in the first
                step: a parameter or buffer differs between ranks; with ``fleet``: Paddle would
                leave out a gradient or sum it wrongly.
            PeerError: A rank has failed; this ends the run on all ranks.
        """
        if self._is_inside:
            raise SyncError(
                "last_backward() was entered inside of itself; there is one per optimizer step, "
                "around the last backward before it. Use no_sync() for the others"
            )
        self._is_inside = True
        try:
            yield from self._synchronized()
        finally:
            self._is_inside = False
            self.report = StepReport()

    def _synchronized(self) -> Iterator[None]:
        if self._reduction is None:
            with self._offloaded.last_backward(None):
                yield
            return
        step = self.num_synchronized + 1
        peers().state.phase = f"in step {step}"
        try:
            peers().check(self._scope, "the gradients")
            self.take_start_values()
            self._reduction.arm(step, self.report)
            with self._offloaded.last_backward(self._reduction.scale):
                with self.no_sync():
                    yield
                self.agreed = self._reduction.finish(self.report)
            if self._replica_check is not None:
                self._replica_check.after(step)
        except BaseException as error:
            self._reduction.disarm()
            if is_from_gloo(error):  # from a collective of the user: find the rank that caused it
                raise peers().explain(error, "a collective", self._scope) from error
            peers().fail(error)
            raise
        self.num_synchronized = step
        peers().state.phase = f"after step {step}"

    def add_start_values(self, layer: paddle.nn.Layer, prefix: str = "") -> None:
        """Compare or broadcast the buffers of `layer` too: for a `GradientSync` that was given a
        list of parameters. Every rank must call this.

        Args:
            layer: The Layer whose buffers are compared or broadcast.
            prefix: Put before the buffers' names in messages.
        """
        if self._start is not None and layer is not self._model:
            self._start.add(layer, prefix)

    def take_start_values(self) -> None:
        """Record digests of the parameters and buffers that the ranks compare in the first step.

        `last_backward` does it at its entry; call this earlier if a forward that changes buffers
        comes before.
        """
        if self._start is not None:
            self._start.take(self.num_synchronized)

    @paddle.no_grad()
    def add_loss(self, loss: paddle.Tensor) -> None:
        """Add `loss`, on the device, to the loss that the ranks average at the end of this step."""
        if self._reduction is not None:
            own = loss.detach().astype("float64").reshape([1]) / self.report.divisor
            self.report.losses.append(own)

    def agree_on_chunks(self, num_chunks: int) -> None:
        """Check that all ranks have the same number of chunks, if parameters are offloaded to
        ranks.

        Raises:
            DataError: The numbers differ; raised on all ranks.
        """
        if self.mode != "none":
            self._offloaded.agree_on_chunks(num_chunks)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For all backwards of a step but the last: inside, ``paddle.DataParallel`` does not
        synchronize.
        """
        if isinstance(self._model, paddle.DataParallel):
            context: contextlib.AbstractContextManager[None] = self._model.no_sync()
            return context
        return contextlib.nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs to continue bit by bit; each rank has its own.

        Returns:
            ``num_synchronized``, and ``residuals``: with ``compression="bf16"`` and error feedback
            the accumulated rounding error of this rank, an array of the parameter's shape under the
            name of each parameter (its position, where a list of parameters was given). Empty
            otherwise. It does not depend on the buckets, so their size may change in between.
        """
        residuals = self._compression.residuals if self._compression is not None else {}
        keys, parameters = self._listed.keys, self._listed.parameters
        return {
            "num_synchronized": self.num_synchronized,
            "residuals": {
                keys[index]: flat.reshape(parameters[index].shape).numpy()
                for index, flat in sorted(residuals.items())
            },
        }

    def set_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict` of this rank.

        Residuals are dropped if this `GradientSync` does not compress to bfloat16.

        Raises:
            CheckpointError: `state` has residuals for other parameters.
        """
        index_of = {key: index for index, key in enumerate(self._listed.keys)}
        residuals = {}
        for key, residual in state["residuals"].items():
            index = index_of.get(key)
            shape = None if index is None else list(self._listed.parameters[index].shape)
            if index is None or shape != list(residual.shape):
                raise CheckpointError(
                    f"the gradient residual of '{key}' in the checkpoint has the shape "
                    f"{list(residual.shape)}; the parameter here "
                    + ("does not exist" if shape is None else f"has {shape}")
                    + ". Resume with the model that was saved."
                )
            residuals[index] = paddle.to_tensor(residual).flatten()
        self.num_synchronized = int(state["num_synchronized"])
        if self._compression is not None:
            self._compression.set_residuals(residuals)

    @property
    def parameters(self) -> list[paddle.Tensor]:
        """The trained parameters that the next step synchronizes, each once."""
        _, parameters = self._source()
        return list({id(p): p for p in parameters if not p.stop_gradient}.values())

    @property
    def timeline(self) -> CommunicationTrace | None:
        """Times at which the last step's gradients were ready and sent; None before the first step
        and in a single process. It is always recorded, at the cost of two clock readings per
        bucket. With ``fleet`` it has no buckets.
        """
        return self._reduction.timeline if self._reduction is not None else None

    @property
    def num_early_buckets(self) -> int:
        """How many buckets the last step sent before its backward had ended."""
        return self._reduction.num_early if self._reduction is not None else 0


def _source_of(
    parameters: paddle.nn.Layer | Iterable[paddle.Tensor] | Callable[[], Iterable[paddle.Tensor]],
) -> ParameterSource:
    if isinstance(parameters, paddle.nn.Layer):
        return ParameterWalk(parameters)
    if callable(parameters):
        return lambda: _named(parameters())
    listed = _named(parameters)
    return lambda: listed


def _named(parameters: Iterable[paddle.Tensor]) -> tuple[list[str], list[paddle.Tensor]]:
    listed = [*parameters]
    return [parameter.name for parameter in listed], listed
