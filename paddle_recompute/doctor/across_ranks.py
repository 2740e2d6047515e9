"""Checks across ranks: equal models and settings, different data, equal gradients."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import paddle

from paddle_recompute import _nested
from paddle_recompute.comparison import Array
from paddle_recompute.distributed import first_that_differs, mean_of_array, scope_of
from paddle_recompute.distributed import values_of_ranks as gather
from paddle_recompute.doctor.report import DoctorReport


def check_start(report: DoctorReport, model: paddle.nn.Layer) -> None:
    """Check that all ranks start from equal parameters and buffers, and freeze the same ones."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    everywhere = gather(
        [
            [name, list(tensor.shape), bool(tensor.stop_gradient)]
            for name, tensor in tensors.items()
        ],
        "the parameters of the model",
    )
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0]:
            place = next(
                (a[0] for a, b in zip(theirs, everywhere[0], strict=False) if a != b), "the model"
            )
            report.add(
                "ranks_differ",
                place,
                f"rank {rank} has another model than rank 0 (names, shapes or frozen parameters); "
                "build the same model on all ranks",
            )
            return
    difference = first_that_differs(list(tensors.values()), scope_of(None))
    if difference is not None:
        index, ranks = difference
        report.add(
            "ranks_start_different",
            list(tensors)[index],
            f"rank {', '.join(map(str, ranks))} starts from other values; set the same seed on "
            "all ranks, or pass broadcast_parameters=True to GradientSync or TrainStep",
        )


def check_data(report: DoctorReport, batch: Any) -> None:
    """Check that no two ranks read the same batch."""
    checksum = 0
    for tensor in _nested.tensors_in(batch):
        checksum = zlib.crc32(np.ascontiguousarray(tensor.numpy()).tobytes(), checksum)
    everywhere = gather(checksum, "the batch")
    if len(set(everywhere)) < len(everywhere):
        same = [rank for rank, digest in enumerate(everywhere) if everywhere.count(digest) > 1]
        report.add(
            "same_data",
            f"rank {', '.join(map(str, same))}",
            "these ranks read the same batch, so the global batch is not larger; give each rank "
            "its own share (rank and num_ranks of the sampler)",
        )


def check_unused(
    report: DoctorReport, gradients: dict[str, Array | None], *, finds_unused: bool
) -> None:
    """Check that each parameter has a gradient on all ranks or on none."""
    own = [name for name, gradient in gradients.items() if gradient is None]
    everywhere = gather(own, "the unused parameters")
    for name in gradients:
        without = [rank for rank, theirs in enumerate(everywhere) if name in theirs]
        if without and len(without) < len(everywhere) and not finds_unused:
            report.add(
                "unused_on_some_ranks",
                name,
                f"it has no gradient on rank {', '.join(map(str, without))}, but one on others. "
                "So the ranks diverge or stop; set find_unused_parameters",
            )
            return


def check_agreement(report: DoctorReport, values: dict[str, Any]) -> None:
    """Check settings that must be equal on all ranks, such as the loss scale."""
    everywhere = gather(values, "settings of the run")
    for name in values:
        found = [theirs.get(name) for theirs in everywhere]
        if any(value != found[0] for value in found):
            shown = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(found))
            report.add("ranks_disagree", name, f"{name} is {shown}; set one value on all ranks")


def mean_of_ranks(
    model: paddle.nn.Layer, gradients: dict[str, Array | None]
) -> dict[str, Array | None]:
    """The mean of each gradient over the ranks, one by one; None counts as zero."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {
        name: mean_of_array(
            np.zeros(shapes[name], "float32") if gradient is None else gradient,
            "a gradient of the doctor",
        )
        for name, gradient in gradients.items()
    }
