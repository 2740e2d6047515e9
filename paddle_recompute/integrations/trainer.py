"""`RecomputeTrainerMixin`: recompute and overlapped synchronization in the trainer of others.

The loop stays theirs: data, accumulation, mixed precision, logging, checkpoints. Three things are
ours. Their trainer gets the bare model where it would wrap it in ``paddle.DataParallel``, so it
finds nothing to synchronize. The last micro-batch of an optimizer step runs inside
``GradientSync.last_backward()``. Selected sublayers are recomputed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import paddle

from paddle_recompute.distributed import broadcast_from_rank0, is_distributed
from paddle_recompute.errors import ConfigError
from paddle_recompute.grad_sync import GradientSync
from paddle_recompute.options import RecomputeConfig
from paddle_recompute.recompute import RecomputeReport, apply_recompute

_logger = logging.getLogger("paddle_recompute")

# By the names of both libraries: more than one rank shares one model, and gradients are not theirs
# to average over all ranks.
_SPLIT_MODEL = (
    "tensor_parallel_degree",
    "tensor_model_parallel_size",
    "pipeline_parallel_degree",
    "pipeline_model_parallel_size",
    "sep_parallel_degree",
    "sep_parallel_size",
    "context_parallel_degree",
    "context_parallel_size",
    "expert_parallel_degree",
    "expert_model_parallel_size",
)
_SHARDING = ("sharding_parallel_degree", "sharding_parallel_size")
_REFUSED_FLAGS = ("use_expert_parallel", "enable_auto_parallel")
# Of sharding_parallel_config in PaddleNLP, arguments of their own in PaddleFormers.
_REFUSED_WITH_STAGE_1 = (
    "split_param",
    "stage1_overlap",
    "stage1_tensor_fusion",
    "stage1_broadcast_overlap",
    "stage1_allgather_overlap",
    "sd_release_grads",
    "fuse_optimizer_states",
)

if TYPE_CHECKING:

    class _Trainer:
        args: Any
        model: paddle.nn.Layer
        scaler: Any
        do_grad_scaling: bool

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def add_callback(self, callback: Any) -> None: ...
        def autocast_smart_context_manager(self) -> Any: ...
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any: ...
        def _prepare_inputs(self, inputs: Any) -> Any: ...
        def _wrap_model(self, model: Any, training: bool = True) -> Any: ...
else:
    _Trainer = object


class RecomputeTrainerMixin(_Trainer):
    """Put before the ``Trainer`` of PaddleNLP (2.7, 2.8) or PaddleFormers (1.2).

    ``class MyTrainer(RecomputeTrainerMixin, Trainer): ...`` takes two more arguments. All others,
    and all training arguments, keep their meaning.

    With ``sharding="stage1"`` their optimizer keeps its share of the state and synchronizes the
    gradients, in place of `GradientSync`; recompute and the gradient cache stay ours.

    Their own recompute and ours would be three forwards: give one of them. Theirs is on with
    ``TrainingArguments.recompute`` (PaddleNLP), with ``recompute_granularity`` of the arguments or
    the model's configuration (PaddleFormers; `RecomputeConfig.from_paddleformers` reads it), or
    with a Layer's ``enable_recompute``. With ``patch_fleet`` theirs is ours.

    Args:
        *args: As for their trainer.
        recompute: Which sublayers are recomputed (`apply_recompute`); None: none.
        sync: Options of `GradientSync` by name, such as ``{"compression": "bf16"}``.
        **kwargs: As for their trainer.

    Raises:
        ConfigError: The training arguments split the model over ranks (tensor, pipeline, expert
            parallel, sharding of stage 2 or 3, or of stage 1 with overlap, tensor fusion or
            ``split_param``, which is the default of PaddleFormers), or ask for ``amp_master_grad``
            on several ranks; or for stage 1, whose synchronization is theirs, beside `sync`. Or
            their recompute is on beside `recompute`.
    """

    def __init__(
        self,
        *args: Any,
        recompute: RecomputeConfig | None = None,
        sync: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        given = [
            candidate
            for candidate in (*args, kwargs.get("args"))
            if hasattr(candidate, "max_grad_norm")
        ]
        _refuse(*given)  # before theirs, which would start what is asked for
        super().__init__(*args, **kwargs)
        _refuse(self.args)
        if sync and _is_stage_1(self.args):
            raise ConfigError(
                f"sync has {', '.join(sync)}, and with sharding=stage1 the trainer's optimizer "
                "synchronizes the gradients; remove sync or the sharding"
            )
        self.recompute_report: RecomputeReport | None = None
        """Which parts are recomputed."""
        if recompute is not None:
            if recompute.enable:
                _refuse_a_third_forward(self.args, self.model)
            self.recompute_report = apply_recompute(self.model, recompute)
            _logger.info("%s", self.recompute_report)
        self._sync_options = dict(sync or {})
        self._sync: GradientSync | None = None
        self._num_micro_batches = 0
        self._is_synchronized = False
        self.add_callback(_LoopEvents(self))

    def _wrap_model(self, model: Any, training: bool = True) -> Any:
        """Theirs, with the bare model where theirs has a ``paddle.DataParallel``."""
        with _bare_model_for_data_parallel():
            model = super()._wrap_model(model, training)
        if training and self._sync is None and is_distributed() and not _is_stage_1(self.args):
            self._sync = GradientSync(model, **self._sync_options)
            _logger.info("Gradient synchronization: %s (%s)", self._sync.mode, self._sync.reason)
        return model

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Theirs; the last one of an optimizer step inside ``GradientSync.last_backward()``."""
        with self._micro_batch() as is_last, self._last_backward(is_last):
            return super().training_step(model, inputs, *args, **kwargs)

    @contextlib.contextmanager
    def _micro_batch(self) -> Iterator[bool]:
        """Around a micro-batch: whether it is the last one before the optimizer's step."""
        self._num_micro_batches += 1
        is_last = self._num_micro_batches >= self.args.gradient_accumulation_steps
        yield is_last
        self._is_synchronized = is_last

    def _last_backward(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        if self._sync is None:
            return contextlib.nullcontext()
        return self._sync.last_backward() if is_last else self._sync.no_sync()

    def _before_the_update(self) -> None:
        """Synchronize now if the micro-batch was not known to be the last one (a short epoch)."""
        if self._sync is not None and not self._is_synchronized:
            with self._sync.last_backward():
                pass
        self._num_micro_batches = 0
        self._is_synchronized = False


class _LoopEvents:
    """A callback of either library: all its events do nothing, but those of an epoch's beginning
    and before the update.
    """

    def __init__(self, trainer: RecomputeTrainerMixin) -> None:
        self._trainer = trainer

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
        """Their loop counts micro-batches from here; what a part of a step left stays in .grad."""
        self._trainer._num_micro_batches = 0

    def on_optimizer_begin(self, *args: Any, **kwargs: Any) -> None:
        self._trainer._before_the_update()

    def __getattr__(self, event: str) -> Any:
        if not event.startswith("on_"):
            raise AttributeError(event)
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a callback does at an event that does not concern it."""


@contextlib.contextmanager
def _bare_model_for_data_parallel() -> Iterator[None]:
    """Inside, ``paddle.DataParallel(model)`` gives `model`, with the parameters of rank 0."""
    original = paddle.DataParallel

    def bare(layers: paddle.nn.Layer, *args: Any, **kwargs: Any) -> paddle.nn.Layer:
        broadcast_from_rank0(layers)
        return layers

    paddle.DataParallel = bare
    try:
        yield
    finally:
        paddle.DataParallel = original


def _option_of_the_command(name: str) -> str:
    """What ``--name`` was given on the command line of this process; "" if it was not."""
    found: list[str] = []
    for index, word in enumerate(sys.argv):
        option, _, value = word.partition("=")
        if option == f"--{name}":
            following = itertools.takewhile(lambda w: not w.startswith("-"), sys.argv[index + 1 :])
            found += [value] if value else following
    return " ".join(found).strip()


def _refuse(*given: Any) -> None:
    faults = []
    for settings in given:
        is_stage_1 = _is_stage_1(settings)
        names = _SPLIT_MODEL if is_stage_1 else (*_SPLIT_MODEL, *_SHARDING)
        split = {name: getattr(settings, name, None) for name in names}
        faults += [f"{k}={size}" for k, size in split.items() if isinstance(size, int) and size > 1]
        flags = _REFUSED_FLAGS if is_stage_1 else (*_REFUSED_FLAGS, "use_hybrid_parallel")
        faults += [f"{name}=True" for name in flags if getattr(settings, name, False)]
        if is_stage_1:
            options = str(getattr(settings, "sharding_parallel_config", "") or "")
            faults += [
                f"sharding=stage1 with {option}"
                for option in _REFUSED_WITH_STAGE_1
                if option in options or getattr(settings, option, False) is True
            ]
        elif _sharding_of(settings):
            faults.append(f"sharding={_sharding_of(settings)}")
        if is_distributed() and getattr(settings, "amp_master_grad", False):
            faults.append("amp_master_grad=True")
    if faults:
        raise ConfigError(
            f"the training arguments ask for {', '.join(faults)}; RecomputeTrainerMixin averages "
            "the gradients of ranks that each have the whole model, or leaves them to sharding="
            "stage1. Stages 2 and 3 take gradients and parameters apart in the backward, in hooks "
            "under which the ranks got different weights, without the mixin too (2.6.2, 3.3.1). "
            "Remove these arguments, or use the trainer without the mixin (patch_fleet works with "
            "all of them)"
        )


def _refuse_a_third_forward(settings: Any, model: paddle.nn.Layer) -> None:
    """Raise if the trainer or the model recomputes Layers of the model itself."""
    found = {
        f"{name}={value!r} of the training arguments"
        for name in ("recompute", "recompute_granularity")
        if (value := getattr(settings, name, None))
    }
    for layer in model.sublayers(include_self=True):
        config: Any = getattr(layer, "config", None)
        # The configurations of PaddleNLP have a granularity, too, which does not switch it on.
        if hasattr(config, "recompute_method") and config.recompute_granularity:
            found.add(f"recompute_granularity={config.recompute_granularity!r} of model.config")
        if getattr(layer, "enable_recompute", False):
            found.add(f"enable_recompute of {type(layer).__name__}")
    if found:
        raise ConfigError(
            f"the trainer recomputes Layers already ({', '.join(sorted(found))}), and recompute= "
            "would add a third forward. Remove recompute=, or switch theirs off; of PaddleFormers, "
            "RecomputeConfig.from_paddleformers(args) reads it first, and recompute_granularity="
            "None in the arguments and in model.config switches it off"
        )


def _sharding_of(settings: Any) -> str:
    """What is asked for, in words; on one rank their arguments forget it."""
    sharding = getattr(settings, "sharding", None)
    stages = sharding if isinstance(sharding, list | tuple) else [sharding]
    asked = " ".join(str(getattr(stage, "value", stage)) for stage in stages if stage)
    return asked or (_option_of_the_command("sharding") if sharding is not None else "")


def _is_stage_1(settings: Any) -> bool:
    return _sharding_of(settings) in ("stage1", "True")
