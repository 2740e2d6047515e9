"""`GradCache`: the gradient of a loss over a large batch, chunk by chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import paddle

from paddle_recompute._paddle.amp import amp_off, global_amp_state
from paddle_recompute._paddle.gradients import has_unwatched_hooks, watch_hooks
from paddle_recompute._paddle.version import is_dygraph
from paddle_recompute.captured_state import layers_of
from paddle_recompute.contrastive._chunked_encoder import ChunkedEncoder
from paddle_recompute.contrastive._chunks import Chunk, by_length, by_rows, num_rows_of
from paddle_recompute.contrastive._own_backward import ChunksWithOwnBackward, OwnBackward
from paddle_recompute.contrastive._recomputation_check import check_repetition
from paddle_recompute.contrastive._step import one_step
from paddle_recompute.contrastive._texts import LengthOf, has_texts
from paddle_recompute.distributed import is_distributed
from paddle_recompute.errors import ConfigError, DataError
from paddle_recompute.grad_sync import GradientSync

# At import: only hooks registered from now on can be deferred to the sum over all chunks.
watch_hooks()

Encoder = Callable[..., Any]
CHECK_EVERY = 64
"""Every so many calls, `GradCache.backward` waits for the device to check the recomputation."""
_NAMES = ("query", "positive")


class GradCache:
    """Computes the gradient of a loss over all rows of a batch, with the encoder in chunks.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import ContrastiveLoss, GradCache
        >>> encoder = paddle.nn.Linear(64, 32)
        >>> optimizer = paddle.optimizer.AdamW(parameters=encoder.parameters())
        >>> cache = GradCache(encoder, ContrastiveLoss(0.05, normalize=True), chunk_size=128)
        >>> query, positive = paddle.randn([1024, 64]), paddle.randn([1024, 64])
        >>> loss = cache.backward(query, positive)  # in place of loss.backward()
        >>> list(encoder.weight.grad.shape)
        [64, 32]
        >>> optimizer.step()
        >>> optimizer.clear_grad()

    A contrastive loss needs the embeddings of the whole batch at once, but the activations of one
    chunk at a time. So: (1) every chunk is encoded without a graph; (2) the
    loss L is computed on all embeddings E, and its backward leaves ``dL/dE``, the cache; (3) every
    chunk c is encoded again, with a graph, and its rows of the cache are propagated into the
    parameters. By the chain rule the sum over the chunks is the gradient of the whole batch:

        dL/dparameters = sum over c of  dL/dE[c] * dE[c]/dparameters

    The second forward repeats the first: random state, AMP state, flags and buffers are restored.

    Cost: one extra forward; memory for the activations of one chunk, the embeddings and their
    gradients ``[batch, dim]``, and what the loss needs (`ContrastiveLoss` with ``tile`` needs no
    ``[batch, batch]`` matrix). Each chunk also keeps 4.4 kB on a CPU (the state of Paddle's
    generator; less on a GPU) until its second forward, and 31 kB more if the encoder draws from
    NumPy's or Python's streams. If the whole batch fits, a plain step is faster.

    Exactness: the gradients are bitwise identical to those of a plain step over the same chunks,
    ``loss(concat(encoder(chunk) for each chunk)).backward()``, dropout included. The order of a
    sum, and so its last bit, may differ in three cases: a parameter is used more than once in
    a call of its encoder; two encoders share some parameters but not all; ``.grad`` held a gradient
    before. Compared with one call of the encoder on the whole batch, gradients differ by rounding,
    and dropout draws other masks.

    BatchNorm: a Layer that normalises over the batch sees the rows of one chunk in both forwards,
    and its running statistics are updated once per chunk, in order, as if the chunks were
    micro-batches. Statistics of the whole batch are not offered: the chunks would have to wait for
    each other at every such Layer, as ranks do in ``paddle.nn.SyncBatchNorm``, and all activations
    would be kept. Use LayerNorm.

    Hooks on parameters (``parameter.register_hook``) run once per call of `backward`, on the sum
    over all chunks and both sides, as in a plain step. If `sync` sends gradients during the
    backward, it sends those of parameters with hooks last. Hooks on tensors inside the encoder run
    once per chunk.

    Effects of the encoder in Python (counters, hooks, logging) happen twice per chunk;
    ``is_recomputing()`` is true the second time. The device compares each row of the second forward
    with the first. If they differ, it sets the gradient of the encoder's last chunk, and so the
    sum, to NaN in this call. The host raises only in the first call, in every 64th after it and in
    `check_repetition`, because reading the result makes it wait for the device. `TrainStep` skips
    the update of such a step.

    Args:
        encoders: One encoder for both sides (tied), or a pair: (for queries, for positives). Each
            is a Layer or another callable, such as a method of a Layer. An encoder without trained
            parameters runs only once.
        loss: ``loss(query_embeddings, positive_embeddings)`` returns a scalar Tensor; a Layer or
            any callable. It is called once per step, with what the encoders return (a Tensor, or
            a structure of them) for all rows in the caller's order. Its own parameters, such as a
            learnable temperature, get their gradients too. Normalise the embeddings here or in
            the encoder.
        chunk_size: Rows of a chunk; together with `chunk_tokens`, rows of a chunk of an input that
            has no tokens. Without `chunk_size` and `chunk_tokens` each input is one chunk, which is
            encoded once, with its graph, so there is no extra forward. The encoders' backwards run
            one after the other; in a plain ``loss.backward()`` Paddle's engine alternates between
            the encoders' operators, so it holds a recomputed block of each at the same time.
        chunk_tokens: Instead of `chunk_size`: the most tokens of a chunk, padding included.
            Rows are sorted by length. Tensors are truncated to the longest row of the chunk:
            integer and boolean tensors ``[batch, length]`` (ids, masks, token types),
            floating-point ones with "mask" in their name, and masks of more axes,
            ``[batch, 1, 1, length]``. Less padding is computed, which can make up for the second
            forward. The encoder must not depend on trailing padding. It should return one vector
            per row. Hidden states ``[batch, length, dim]`` are concatenated too, padded with zeros,
            but all of them, and their gradient if the loss uses them, stay in memory. Costs one
            copy of the inputs' lengths to the host per step. An input without such tensors, as the
            images of CLIP, is split into as many chunks as the texts; `chunk_size` sets its rows
            per chunk instead.
        sync: Synchronizes the gradients of all ranks, once per step, while the backward of the last
            chunk runs. It must cover all trained parameters of the encoders and the loss. None:
            gradients are not synchronized.
        length_of: With `chunk_tokens`: ``length_of(input)`` returns the number of tokens of each
            row, ``[batch]``, without trailing padding. None: lengths are read from one tensor, in
            which 0 is padding: the first that exists of attention_mask, input_mask, mask,
            input_ids, token_ids, ids, tokens. token_type_ids, segment_ids, task_type_ids,
            position_ids, special_tokens_mask and global_attention_mask are truncated to the same
            length. In a tensor of the same width with any other name, columns that are not 0 count
            as tokens too. If none of these names exists, as in a tuple, all tensors are read: a
            column is padding if all are 0 there, and they must have the same width. The order of
            keys does not matter.

    Raises:
        ConfigError: `chunk_size` or `chunk_tokens` is less than 1;
            `encoders` is not one or a pair of callables; an encoder is in
            ``paddle.DataParallel`` without a `sync`; or a parameter had a hook before this module
            was imported.

    References:
        Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory
        Limited Setup", arXiv:2101.06983, section 3.2. The RNG state is restored as in the
        authors' code; chunks by length, buffers and the overlapped synchronization are ours.
    """

    def __init__(
        self,
        encoders: Encoder | tuple[Encoder, Encoder],
        loss: Callable[..., paddle.Tensor],
        *,
        chunk_size: int | None = None,
        chunk_tokens: int | None = None,
        sync: GradientSync | None = None,
        length_of: LengthOf | None = None,
    ) -> None:
        _check_sizes(chunk_size, chunk_tokens, length_of)
        self._encoders = _pair(encoders)
        self.loss = loss
        """The loss, a function of the embeddings of all rows."""
        self._chunk_size = chunk_size
        self._chunk_tokens = chunk_tokens
        self._length_of = length_of
        self.sync = sync
        """Synchronizes the gradients, unless `backward` receives another `GradientSync`."""
        self._parallel = [e for e in self._encoders if isinstance(e, paddle.DataParallel)]
        if self._parallel and sync is None and is_distributed():
            raise ConfigError(
                "an encoder in paddle.DataParallel synchronizes in the backward of every chunk; "
                "pass sync=GradientSync(encoder), which does it once per step, or the bare Layer"
            )
        _check_hooks([*self._encoders, loss])
        self._unread_checks: list[tuple[str, paddle.Tensor]] = []
        self._num_calls = 0
        self.num_chunks = 0
        """Number of chunks in the last step, over all inputs."""

    def backward(
        self,
        query: Any,
        positive: Any,
        *negatives: Any,
        last: bool = True,
        loss_scale: float | paddle.Tensor = 1.0,
        loss_arguments: Mapping[str, Any] | None = None,
        sync: GradientSync | None = None,
    ) -> paddle.Tensor:
        """Add the gradient of ``loss(encoders(query), encoders(positive))`` to ``.grad``.

        An input is a Tensor, or a structure (tuple, list, dict, dataclass, nested; a tokenizer's
        ``BatchEncoding`` is a dict here) whose tensors all have the batch as their first axis. It
        is passed to the encoder as in a plain call: a dict as keyword arguments if the encoder has
        arguments of these names, a tuple or list as positional arguments if it has that many,
        anything else as one argument. ``(value,)`` passes `value` as one argument, whatever it is.

        A NumPy array is passed to the encoder as a Tensor, chunk by chunk. It need not fit on the
        device, nor in memory if it is a ``numpy.memmap``.

        Call it under the ``paddle.amp.auto_cast`` of the forward; the backward runs outside of it.
        Several calls before the optimizer's step accumulate the sum of their gradients; each call
        has its own negatives.

        Args:
            query: ``[batch, ...]``, the input of the first encoder.
            positive: ``[batch, ...]``, the input of the second; row i belongs to query i.
            *negatives: More inputs of the second encoder, with any number of rows; `loss` gets
                their embeddings after the first two. For n hard negatives per query give
                ``[batch * n, ...]``, and let `loss` reshape it to ``[batch, n, dim]``.
            last: Whether this is the last call before the optimizer's step; that call
                synchronizes. Without `sync` it has no effect.
            loss_scale: What the loss is multiplied by before its backward: ``1 / K`` for the mean
                of K accumulated calls, the scale of a `paddle.amp.GradScaler`
                (``scaler.scale(paddle.ones([]))``), or the product.
            loss_arguments: Keyword arguments of `loss` for this call, as they are:
                ``{"positive_ids": ids}`` for all rows, in the caller's order.
            sync: Synchronizes this call; None: the cache's own `sync`.

        Returns:
            The unscaled loss of this rank, a scalar without graph. It may be infinite or NaN; the
            caller or a GradScaler must check it.

        Raises:
            DataError: The inputs have no rows, different numbers of rows, or need a gradient; an
                encoder's output does not have one row per input row; or the ranks have different
                numbers of chunks under ``offload="ranks"``.
            ConfigError: The loss is not a scalar, or does not depend on a trained parameter; it is
                not clear which tensor `chunk_tokens` must truncate; no input has tokens; all inputs
                have tokens and `chunk_size` was given, too; the encoder was decorated with
                ``master_grad=True``; or the call is under ``paddle.no_grad`` or while a static
                graph is built.
            RecomputeError: The second forward of a chunk differs from the first (by 5 % of the
                largest number of a row), in this call or in a call since the last check; see
                `check_repetition`.
            SyncError: See `GradientSync.last_backward`.
        """
        _check_mode()
        _check_no_master_grad([*self._encoders, self.loss])
        sync = sync or self.sync
        encoders = self._chunked_encoders((query, positive, *negatives))
        self.num_chunks = sum(encoder.num_chunks for encoder in encoders)
        if sync is not None:
            sync.agree_on_chunks(self.num_chunks)
        with one_step() as run_hooks:
            with self._synchronizing(sync, now=False):
                loss, in_order = self._backward_of_loss(encoders, loss_scale, loss_arguments or {})
                if sync is not None:
                    sync.add_loss(loss)
                earlier, final = _schedule(in_order)
                # The backward of a plain step is outside of auto_cast, too.
                with amp_off():
                    for encoder, chunk in earlier:
                        encoder.backward(chunk)
                    if self._reads_check:  # raise before other ranks wait for this one
                        self._note_recomputation(in_order)
            with self._synchronizing(sync, now=last), amp_off():
                for encoder, chunk in final:
                    encoder.backward(chunk)
                self._note_recomputation(in_order)
                run_hooks()
        self._num_calls += 1
        return loss

    @paddle.no_grad()
    def evaluate(
        self,
        query: Any,
        positive: Any,
        *negatives: Any,
        loss_arguments: Mapping[str, Any] | None = None,
    ) -> paddle.Tensor:
        """The loss that `backward` would return, in the same chunks, without any gradient.

        Call ``eval()`` of the encoders before. Its arguments are those of `backward`.
        """
        encoders = self._chunked_encoders((query, positive, *negatives))
        embeddings = [encoder.encode([]) for encoder in encoders]
        return self.loss(*embeddings, **(loss_arguments or {}))

    def check_repetition(self) -> None:
        """Check that the second forwards returned the values of the first ones; waits for the
        device.

        `backward` calls it in its first call and in every 64th after it.

        Raises:
            RecomputeError: A second forward differs; the gradients of its call are NaN.
        """
        unread, self._unread_checks = self._unread_checks, []
        check_repetition(unread)

    def _note_recomputation(self, encoders: list[ChunkedEncoder]) -> None:
        for encoder in encoders:
            if (is_repeated := encoder.is_repeated()) is not None:
                self._unread_checks.append((encoder.name, is_repeated))
        if self._reads_check:
            self.check_repetition()

    @property
    def _reads_check(self) -> bool:
        """Whether the host reads the check in this call, which waits for the device."""
        return self._num_calls % CHECK_EVERY == 0

    def _chunked_encoders(self, inputs: tuple[Any, ...]) -> list[ChunkedEncoder]:
        names = [*_NAMES, *(f"negatives[{number}]" for number in range(len(inputs) - 2))]
        rows = [num_rows_of(batch, name) for batch, name in zip(inputs, names, strict=True)]
        if rows[0] != rows[1]:
            raise DataError(
                f"query has {rows[0]} rows and positive has {rows[1]}; row i of query belongs to "
                "row i of positive, so their numbers must be equal"
            )
        found = []
        chunks_of = self._split(inputs, rows, names)
        for number, (batch, name, chunks) in enumerate(zip(inputs, names, chunks_of, strict=True)):
            encoder = self._encoders[min(number, 1)]
            own = isinstance(encoder, OwnBackward)
            keeps = not own and self._chunk_size is None and self._chunk_tokens is None
            kind = ChunksWithOwnBackward if own else ChunkedEncoder
            found.append(kind(encoder, batch, chunks, name, keeps_graph=keeps))
        return found

    def _split(
        self, inputs: tuple[Any, ...], rows: list[int], names: list[str]
    ) -> list[list[Chunk]]:
        """The chunks of each input."""
        if self._chunk_tokens is None:
            return [by_rows(num_rows, self._chunk_size or num_rows) for num_rows in rows]
        are_texts = [has_texts(batch) for batch in inputs]
        if self._chunk_size is not None and all(are_texts):
            raise ConfigError(
                f"received chunk_size={self._chunk_size} and chunk_tokens={self._chunk_tokens}, "
                "and all inputs have tokens; give one of them: beside chunk_tokens, chunk_size is "
                "for inputs without tokens, such as images"
            )
        by_texts = [
            by_length(batch, self._chunk_tokens, self._length_of, num_rows, name)
            if is_text or not any(are_texts)  # `by_length` raises: no input has tokens
            else []
            for batch, num_rows, name, is_text in zip(inputs, rows, names, are_texts, strict=True)
        ]
        num_chunks = max(map(len, by_texts))
        return [
            chunks or by_rows(num_rows, self._chunk_size or -(-num_rows // num_chunks))
            for chunks, num_rows in zip(by_texts, rows, strict=True)
        ]

    def _backward_of_loss(
        self,
        encoders: list[ChunkedEncoder],
        loss_scale: float | paddle.Tensor,
        loss_arguments: Mapping[str, Any],
    ) -> tuple[paddle.Tensor, list[ChunkedEncoder]]:
        """Run the first forwards, the loss, and the loss's backward to the embeddings.

        Returns:
            The loss, and the encoders in the order in which its backward reached their embeddings.
            A plain step runs their backwards, and sums shared gradients, in this order.
        """
        reached: list[ChunkedEncoder] = []
        embeddings = [
            encoder.encode(reached, before)
            for encoder, before in zip(encoders, [None, *encoders], strict=False)
        ]
        loss = self.loss(*embeddings, **loss_arguments)
        del embeddings
        if not isinstance(loss, paddle.Tensor) or loss.size != 1:
            raise ConfigError(
                "the loss must return a scalar Tensor; it returned "
                + (f"the shape {list(loss.shape)}" if hasattr(loss, "shape") else f"{loss!r}")
            )
        if loss.stop_gradient:
            raise ConfigError(
                "the loss does not depend on a trained parameter: "
                + (
                    "it does not use the embeddings, or detaches them"
                    if any(encoder.is_trained for encoder in encoders)
                    else "no encoder's output needs a gradient. Are all parameters frozen "
                    "(stop_gradient), or does the encoder run under no_grad or detach its output?"
                )
            )
        with amp_off():  # the backward of a plain step is outside of auto_cast, too
            scaled = loss
            if not (isinstance(loss_scale, float) and loss_scale == 1.0):
                half = loss.dtype in (paddle.float16, paddle.bfloat16)
                # In float32: a scaled float16 loss could overflow.
                scaled = (loss.astype("float32") if half else loss) * loss_scale
            scaled.backward()
        return loss.detach(), list(dict.fromkeys(reversed(reached)))[::-1]

    @contextlib.contextmanager
    def _synchronizing(self, sync: GradientSync | None, now: bool) -> Iterator[None]:
        """Inside, `sync` synchronizes if `now`; ``paddle.DataParallel`` does not."""
        with contextlib.ExitStack() as stack:
            if sync is not None:
                stack.enter_context(sync.last_backward() if now else sync.no_sync())
            for encoder in self._parallel:
                stack.enter_context(encoder.no_sync())
            yield


SecondForwards = list[tuple[ChunkedEncoder, int]]
"""Encoders, each with the number of a chunk."""


def _schedule(encoders: list[ChunkedEncoder]) -> tuple[SecondForwards, SecondForwards]:
    """The second forwards in order: before the synchronization, and while it runs.

    The second list has the last chunk of every encoder. So there each trained parameter gets its
    last gradient, and equally many gradients in every step, whatever the number of chunks:
    `GradientSync` counts them to know when a parameter's gradient is complete.
    """
    tasks = [(chunked, chunk) for chunked in encoders for chunk in range(chunked.num_chunks)]
    final: SecondForwards = []
    for chunked, chunk in reversed(tasks):
        if all(chunked.encoder != other.encoder for other, _ in final):
            final.insert(0, (chunked, chunk))
    return [task for task in tasks if task not in final], final


def _parameters_of(function: Any) -> list[paddle.Tensor]:
    if isinstance(function, OwnBackward):
        return []
    return [parameter for layer in layers_of(function, ()) for parameter in layer.parameters()]


def _check_hooks(functions: list[Any]) -> None:
    for parameter in {id(p): p for f in functions for p in _parameters_of(f)}.values():
        if not parameter.stop_gradient and has_unwatched_hooks(parameter):
            raise ConfigError(
                f"the parameter '{parameter.name}' got a hook (register_hook) before "
                "paddle_recompute.contrastive was imported, so the hook would run once per chunk "
                "and not once on the sum; import it before you register the hook"
            )


def _check_no_master_grad(functions: list[Any]) -> None:
    """Paddle (2.6, 3.x) would add the half-precision gradient of a chunk to a float32 one."""
    state = global_amp_state()
    if not state.use_master_grad:
        return
    decorated = {id(parameter) for parameter in state.model_parameters}
    for parameter in (p for function in functions for p in _parameters_of(function)):
        if id(parameter) in decorated and parameter.dtype in (paddle.float16, paddle.bfloat16):
            raise ConfigError(
                f"the parameter '{parameter.name}' was decorated with master_grad=True, so its "
                "gradient is float32 after the backward of a chunk, and Paddle adds the "
                "half-precision gradient of the next chunk to it wrongly. Decorate with "
                "master_grad=False, or use TrainStep with level O2: its gradients are float32 "
                "after the last chunk"
            )


def _pair(encoders: Any) -> tuple[Encoder, Encoder]:
    if isinstance(encoders, (tuple, list, paddle.nn.LayerList)):
        if len(encoders) != 2:
            raise ConfigError(
                f"encoders has {len(encoders)} items; allowed are one encoder, for both sides, or "
                "a pair: (of the queries, of the positives)"
            )
        pair = tuple(encoders)
    else:
        pair = (encoders, encoders)
    for encoder in pair:
        if not callable(encoder):
            raise ConfigError(
                f"encoders: received {type(encoder).__name__}; allowed is a Layer or another "
                "callable, or a pair of them"
            )
    return pair[0], pair[1]


def _check_sizes(
    chunk_size: int | None, chunk_tokens: int | None, length_of: LengthOf | None
) -> None:
    if length_of is not None and chunk_tokens is None:
        raise ConfigError("length_of has an effect with chunk_tokens only; give that, too")
    for name, value in (("chunk_size", chunk_size), ("chunk_tokens", chunk_tokens)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(
                f"{name}: received {value!r}; allowed is a whole number of at least 1"
            )


def _check_mode() -> None:
    if not is_dygraph():
        raise ConfigError(
            "GradCache runs in dygraph only, and a static graph is being built "
            "(paddle.enable_static or paddle.jit.to_static); in a static graph give "
            "StaticTrainStep a static_graph.ProgramCache"
        )
    if not paddle.is_grad_enabled():
        raise ConfigError(
            "GradCache.backward was called under paddle.no_grad, so there would be no gradient; "
            "call it outside of paddle.no_grad"
        )
