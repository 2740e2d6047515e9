"""Half precision for `TrainStep`: which operators compute in it, and the scale of the loss.

Float16 ends at 6e-8 below and at 65504 above. Gradients are often smaller, so the loss, and with it
every gradient of the backward, is multiplied by a *loss scale*; the gradients of the parameters are
divided by it again before they are clipped and used (Micikevicius et al. 2018, "Mixed Precision
Training", arXiv:1710.03740, section 3.2). A scale that is too large makes some gradient infinite:
that step is skipped, and the scale shrinks. Bfloat16 has the exponents of float32 and needs none
of this.

The scaler here follows the rule of ``paddle.amp.GradScaler`` and is not that class, because its
public face cannot say what several ranks need:

- whether a gradient is finite is found out in ``unscale_`` and stays in a private attribute of each
  rank. Fleet's own distributed scaler replaces the private ``_unscale`` to make the ranks agree;
- ``unscale_`` writes float16 gradients back as float16, where what the scale had saved from
  underflow is lost again; here they become float32 first;
- it switches itself off on a CPU, so nothing of a training with it could be tested there. Beside
  a NumPy that makes no number of an array with one axis (2.4; Paddle 3.3.1) it raises TypeError
  where it is about to lower the scale.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import paddle

from paddle_recompute._paddle.amp import amp_state
from paddle_recompute.errors import ConfigError, DivergenceError
from paddle_recompute.offload import OffloadOptimizer
from paddle_recompute.options import AmpConfigs
from paddle_recompute.sharding import inner_of

MAX_SKIPS_IN_A_ROW = 50
"""After so many steps without an update the loss scale is not what is wrong."""
MIN_LOSS_SCALE = 1.0
"""Below it, gradients that float16 could hold unscaled would be lost."""
MAX_LOSS_SCALE = 2.0**127
"""About the largest float32; a scale beyond it would make 0 * inf of every gradient that is 0."""


class LossScaler:
    """The loss scale of float16: grows while all goes well, shrinks on overflow.

    As in Paddle: after ``incr_every_n_steps`` good steps in a row it is multiplied by
    ``incr_ratio``, after ``decr_every_n_nan_or_inf`` bad ones in a row by ``decr_ratio``. A scale
    that is a power of two changes exponents alone, so it costs no bit: with ``decr_ratio: 0.5``
    it always is one; Paddle's default, 0.8, rounds every gradient once.

    Args:
        settings: ``strategy.amp_configs``.
    """

    def __init__(self, settings: AmpConfigs) -> None:
        self._settings = settings
        self.scale = settings.init_loss_scaling
        """The factor of the next step's loss."""
        self.num_skipped = 0
        """How many steps were skipped so far."""
        self._good_steps = 0
        self._bad_steps = 0
        self._skipped_in_a_row = 0

    def update(self, finite: bool) -> None:
        """Update the scale after a step; `finite` must be the same on all ranks.

        Raises:
            DivergenceError: The overflow does not go away with the scale.
        """
        if finite:
            self._skipped_in_a_row = self._bad_steps = 0
            self._good_steps += 1
            if self._good_steps == self._settings.incr_every_n_steps:
                self._good_steps = 0
                self._multiply(self._settings.incr_ratio)
            return
        self.num_skipped += 1
        self._skipped_in_a_row += 1
        self._good_steps = 0
        self._bad_steps += 1
        if self._skipped_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise DivergenceError(
                f"{self._skipped_in_a_row} steps in a row had a gradient or a loss that is not "
                f"finite in float16, the last with a loss scale of {self.scale:g}, and were "
                f"skipped. {_REMEDIES}"
            )
        if self._bad_steps == self._settings.decr_every_n_nan_or_inf:
            self._bad_steps = 0
            self._multiply(self._settings.decr_ratio)

    def _multiply(self, ratio: float) -> None:
        if not self._settings.use_dynamic_loss_scaling:
            return
        scale = min(self.scale * ratio, MAX_LOSS_SCALE)
        if ratio < 1 and scale < MIN_LOSS_SCALE:
            raise DivergenceError(
                f"the gradient or the loss is not finite in float16 even with a loss scale of "
                f"{self.scale:g}, so a smaller one will not help. {_REMEDIES}"
            )
        self.scale = scale

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers: JSON keeps them to the last bit."""
        return {
            "scale": self.scale,
            "num_skipped": self.num_skipped,
            "good_steps": self._good_steps,
            "bad_steps": self._bad_steps,
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.scale = float(state["scale"])
        self.num_skipped = int(state["num_skipped"])
        self._good_steps = int(state["good_steps"])
        self._bad_steps = int(state["bad_steps"])
        self._skipped_in_a_row = int(state["skipped_in_a_row"])


_REMEDIES = (
    "Lower the learning rate or lengthen its warm-up, use dtype bfloat16, whose range is that of "
    "float32, or put the operators that overflow on custom_black_list"
)


class MixedPrecision:
    """`AmpConfigs` in force for one model and its optimizer.

    Attributes:
        scaler: The loss scaler; None in bfloat16.
        level: ``"O1"``: operators on Paddle's white list compute in half precision, parameters
            stay float32. ``"O2"``: parameters are in half precision too, and the optimizer keeps
            float32 master weights.

    Args:
        settings: ``strategy.amp_configs``.
        model: With ``"O2"`` its parameters are cast in place by ``paddle.amp.decorate``, all but
            those of BatchNorms and, in float16, of LayerNorms.
        optimizer: With ``"O2"`` an Adam or AdamW, which gets its master weights.

    Raises:
        ConfigError: The device has no mixed precision, or level O2 does not go with the model or
            the optimizer.
    """

    def __init__(
        self,
        settings: AmpConfigs,
        model: paddle.nn.Layer,
        optimizer: paddle.optimizer.Optimizer,
    ) -> None:
        self._settings = settings
        self.level = settings.level
        check_device(settings)
        self.scaler = LossScaler(settings) if settings.dtype == "float16" else None
        if self.level == "O2":
            _decorate(settings, model, optimizer)

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass; the backward needs nothing."""
        return _auto_cast(self._settings)


def check_device(settings: AmpConfigs) -> None:
    """Check that Paddle's ``auto_cast`` has an effect on this device.

    Raises:
        ConfigError: It does not; the message names the device and Paddle's own reason.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with _auto_cast(settings):
            in_force = amp_state()
    if str(in_force.level).endswith(settings.level) and in_force.dtype == settings.dtype:
        return
    device = paddle.get_device()
    reason = f" (Paddle: {str(caught[0].message).rstrip('.')})" if caught else ""
    raise ConfigError(
        f"mixed precision in {settings.dtype} was asked for (strategy.amp: true), and Paddle would "
        f"silently compute in float32 on this device, '{device}', in dygraph{reason}. Set "
        "strategy.amp: false, or run on a GPU that has it (launch.device: gpu)"
    )


def _auto_cast(settings: AmpConfigs) -> contextlib.AbstractContextManager[None]:
    context: contextlib.AbstractContextManager[None] = paddle.amp.auto_cast(
        custom_white_list=settings.custom_white_list,
        custom_black_list=settings.custom_black_list,
        level=settings.level,
        dtype=settings.dtype,
    )
    return context


def _decorate(
    settings: AmpConfigs, model: paddle.nn.Layer, optimizer: paddle.optimizer.Optimizer
) -> None:
    if isinstance(model, paddle.DataParallel):
        raise ConfigError(
            "level O2 casts the parameters, which paddle.DataParallel has laid out in float32 "
            "buffers already; give TrainStep the bare model, it synchronizes gradients itself"
        )
    if isinstance(optimizer, OffloadOptimizer):
        raise ConfigError(
            "level O2 casts the parameters, and offloaded ones are not on the device; use level O1"
        )
    optimizer = inner_of(optimizer)
    if not isinstance(optimizer, (paddle.optimizer.Adam, paddle.optimizer.AdamW)):
        raise ConfigError(
            f"level O2 does not go with {type(optimizer).__name__}; only Adam and AdamW update "
            "half-precision parameters from float32 gradients. Use one of them, or level O1"
        )
    paddle.amp.decorate(
        models=model, optimizers=optimizer, level="O2", dtype=settings.dtype, master_weight=True
    )
    wanted = getattr(paddle, settings.dtype)
    if not any(parameter.dtype == wanted for parameter in model.parameters()):
        raise ConfigError(
            f"paddle.amp.decorate left every parameter in float32 on '{paddle.get_device()}'; use "
            "level O1"
        )
