"""The residuals of error feedback in a checkpoint: arrays by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import paddle

from paddle_recompute.errors import CheckpointError
from paddle_recompute.grad_sync._parameters import ParameterList


def arrays_of(
    residuals: Mapping[int, paddle.Tensor], parameters: ParameterList
) -> dict[str, np.ndarray]:
    """Residuals by index, as arrays of the parameters' shapes."""
    keys = _keys_of(parameters)
    return {
        keys[index]: flat.reshape(parameters.parameters[index].shape).numpy()
        for index, flat in sorted(residuals.items())
    }


def residuals_from(
    arrays: Mapping[str, np.ndarray], parameters: ParameterList
) -> dict[int, paddle.Tensor]:
    """Flat residuals by index, from what `arrays_of` gave.

    Raises:
        CheckpointError: `arrays` is of other parameters.
    """
    index_of = {key: index for index, key in enumerate(_keys_of(parameters))}
    residuals = {}
    for key, residual in arrays.items():
        index = index_of.get(key)
        shape = None if index is None else list(parameters.parameters[index].shape)
        if index is None or shape != list(residual.shape):
            raise CheckpointError(
                f"the gradient residual of '{key}' in the checkpoint has the shape "
                f"{list(residual.shape)}; the parameter here "
                + ("does not exist" if shape is None else f"has {shape}")
                + ". Resume with the model that was saved."
            )
        residuals[index] = paddle.to_tensor(residual).flatten()
    return residuals


def _keys_of(parameters: ParameterList) -> list[str]:
    """Names for a checkpoint. Those that Paddle gives by itself count the Layers of a process, so
    they differ between runs.
    """
    names = parameters.names
    return names if parameters.structured else [str(index) for index in range(len(names))]
