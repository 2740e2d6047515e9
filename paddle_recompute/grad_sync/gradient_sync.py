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

    ``fused`` sends the gradients after the last backward, joined into few large buffers, as
    Paddle's ``no_sync`` plus ``fused_allreduce_gradients`` does: right under recompute, where
    ``DataParallel`` alone raises "has been ready before", and serial. ``overlap`` sends the same
    buffers while the backward is still running, whichever form of recompute is used, and gives the
    bitwise identical means. In both, the ranks agree on which gradients there are. ``fleet`` is
    Paddle's own ``no_sync`` plus ``fused_allreduce_gradients``, as a reference to compare with; the
    ranks agree first here too.

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

        In the first step the ranks compare their values before it, bit by bit: parameters, frozen
        ones too, and saved buffers that have not changed since this was made. That takes a digest
        of each tensor, on its device, about 1 s per GB on a CPU; later steps take nothing.

        Args:
            parameters: A Layer, or the parameters in the same order on every rank, or a function
                that lists them. They are looked through in each step: what is unfrozen or added to
                the Layer later takes part from then on, and what has ``stop_gradient`` and no
                gradient is left alone. All ranks have to do the same in the same step.
            mode: ``"overlap"``, ``"fused"``, ``"fleet"``, or ``"auto"``, which picks ``"overlap"``,
                because that sends buckets during the backward; see `mode` and `reason` afterwards.
                ``"fleet"`` takes no compression and no sizes of buffers.
            bucket_bytes: Size of the buffers.
            first_bucket_bytes: Size of the first of them; small, so that sending starts early.
            compression: ``"bf16"`` sends half the bytes; the mean is rounded to 8 bits of mantissa.
            error_feedback: With ``"bf16"``: carry what this rank's rounding took over to the next
                step. It about halves the error of a gradient that lasts; the rounding of the
                ranks' sum stays. Costs memory of the size of the gradients.
            group: The data-parallel ranks; None is all of them. On a rank that is not among them
                there is nothing to do, and `mode` is ``"none"``; rank 0 of the run has to call this
                in any case, as the ranks know of each other through it.
            find_unused_parameters: Expect that parameters have no gradient in
                some steps. Exact without it too, but then a warning says so.
            peer_timeout: Seconds without a sign of life after which a rank counts as dead.
            stall_timeout: Seconds to wait for a rank that is alive but late, for example while rank
                0 evaluates or writes a checkpoint.
            check_every: Compare the parameters of all ranks, bit by bit, after each so many steps;
                None: never. Buffers of a Layer are compared too; as each rank's BatchNorm has
                statistics of its own, a warning tells once where they differ.
            broadcast_parameters: Give all ranks the values of the first rank of `group` here, as
                ``paddle.DataParallel`` does: those of the parameters, and of the buffers of a
                Layer.

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
        """What the caller adds to the agreement at the end of the next last backward."""
        self.agreed: Agreed | None = None
        """What came of it; None in a single process."""
        self._is_inside = False
        self._reduction: BucketedReduction | FleetReduction | None = None
        self._compression: GradientCompression | None = None
        self._start: StartValues | None = None
        self._replica_check: ReplicaCheck | None = None
        self.mode, self.reason = choose_mode(mode, group)
        is_sent_here = self.mode != "fleet" and not isinstance(self._model, paddle.DataParallel)
        self._offloaded = OffloadedSync(self._listed.offloaded, group, is_sent_here, compression)
        self.compression = compression
        self.find_unused_parameters = find_unused_parameters
        if self.mode == "none":
            if is_distributed():
                peers()  # the others may wait for this rank to connect
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
        """Run the last backward before the optimizer's step inside; afterwards every rank's
        ``.grad`` is the mean over all ranks.

        Whatever has a ``.grad`` when the body ends is part of it, whichever backward it comes
        from; the body may be empty. A parameter that has a gradient on some ranks only counts as
        zero on the others; one that has none anywhere keeps None.

        Unscale and clip afterwards. A change of ``.grad`` inside, after the backward, is kept, but
        with ``overlap`` it ends the overlap, with a warning. Not noticed is one that neither raises
        ``inplace_version`` nor was made in the first step as well: ``grad.set_value(x)``,
        ``parameter.grad = x``, and on Paddle 2.6 ``clip_grad_norm_``.

        Raises:
            SyncError: A gradient is sparse; other parameters are trained here than on other ranks;
                in the first step: a parameter or buffer has another value on another rank. With
                ``fleet`` also: a gradient that Paddle would leave out or sum up wrong.
            PeerError: A rank has failed, here or elsewhere, which ends the run on all ranks.
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
            if is_from_gloo(error):  # of a collective of the user's own: whose fault is it?
                raise peers().explain(error, "a collective", self._scope) from error
            peers().fail(error)
            raise
        self.num_synchronized = step
        peers().state.phase = f"after step {step}"

    def add_start_values(self, layer: paddle.nn.Layer, prefix: str = "") -> None:
        """Compare, or broadcast, the buffers of `layer` too, if its parameters are synchronized
        here without it. Every rank must call this.

        Args:
            layer: Has them.
            prefix: In front of its names, in messages.
        """
        if self._start is not None and layer is not self._model:
            self._start.add(layer, prefix)

    def take_start_values(self) -> None:
        """The ranks compare the values that there are now in the first step. Without this call,
        `last_backward` does it as it is entered; a forward before that has changed buffers.
        """
        if self._start is not None:
            self._start.take(self.num_synchronized)

    @paddle.no_grad()
    def add_loss(self, loss: paddle.Tensor) -> None:
        """Add `loss` to the one that the ranks agree on at the end of this step, on the device."""
        if self._reduction is not None:
            own = loss.detach().astype("float64").reshape([1]) / self.report.divisor
            self.report.losses.append(own)

    def agree_on_chunks(self, num_chunks: int) -> None:
        """Check that all ranks encode equally many chunks, where they do it together.

        Raises:
            DataError: They do not, on all ranks; parameters are offloaded to the ranks.
        """
        if self.mode != "none":
            self._offloaded.agree_on_chunks(num_chunks)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For the earlier backwards of a step; a ``paddle.DataParallel`` does not synchronize
        inside.
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

        Residuals are dropped where nothing is sent in bfloat16 now.

        Raises:
            CheckpointError: `state` is of other parameters.
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
        """What is trained now, each once: what the next step synchronizes."""
        _, parameters = self._source()
        return list({id(one): one for one in parameters if not one.stop_gradient}.values())

    @property
    def timeline(self) -> CommunicationTrace | None:
        """When the last step's gradients were ready and sent; None before the first step and
        in a single process. Recorded always: it costs two clock readings a bucket. ``fleet`` has no
        buckets in it.
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
