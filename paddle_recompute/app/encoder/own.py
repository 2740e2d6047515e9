"""``model: {name: package.module:Class}``: a Layer of the user's as the encoder."""

from __future__ import annotations

import importlib
import inspect
import os
import sys

import paddle

from paddle_recompute import _paddle
from paddle_recompute.app.config import ModelConfig
from paddle_recompute.errors import ConfigError


def build_own(config: ModelConfig, vocab_size: int) -> paddle.nn.Layer:
    """Import and build the Layer that ``config.name`` names; in dygraph, call it once.

    The current folder is looked into as well, as ``python`` does for a script.

    Raises:
        ConfigError: It cannot be imported, does not take ``config.options``, or does not turn ids
            ``[batch, length]`` into vectors ``[batch, dim]``.
    """
    kind = _imported(config.name)
    try:
        signature = inspect.signature(kind)
        options = dict(config.options)
        if "vocab_size" in signature.parameters:
            options.setdefault("vocab_size", vocab_size)
        signature.bind(**options)
    except TypeError as error:
        known = ", ".join(inspect.signature(kind).parameters)
        raise ConfigError(
            f"model.options: {config.name} does not take them ({error}); it takes {known}"
        ) from error
    model = kind(**options)
    if not isinstance(model, paddle.nn.Layer):
        raise ConfigError(
            f"model.name: {config.name} made a {type(model).__name__}; it must be a paddle.nn.Layer"
        )
    if _paddle.is_dygraph():
        _check_output(model, config.name)
    return model


def _imported(name: str) -> type:
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        raise ConfigError(
            f"model.name: {name}: the module {module} cannot be imported ({error}); install it, or "
            f"start in the folder that holds it (this is {here})"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"model.name: the module {module} has no {attribute}") from error
    if not callable(kind):
        raise ConfigError(f"model.name: {name} is a {type(kind).__name__}, not a class")
    return kind  # type: ignore[no-any-return]


def _check_output(model: paddle.nn.Layer, name: str) -> None:
    was_training = model.training
    model.eval()
    try:
        with paddle.no_grad():
            found = model(paddle.ones([2, 3], "int64"))
    finally:
        if was_training:
            model.train()
    if not isinstance(found, paddle.Tensor) or found.ndim != 2 or found.shape[0] != 2:
        got = list(found.shape) if isinstance(found, paddle.Tensor) else type(found).__name__
        raise ConfigError(
            f"model.name: {name} returned {got} for ids of shape [2, 3]; it must return one vector "
            "per row, [2, dim]. Return the pooled vector alone"
        )
