"""Checks before training: does the wrapped model compute what the plain model computes?

`doctor` examines a model on one batch, on all ranks.
`self_test` tests the library itself on the user's device.
"""

from paddle_recompute.doctor.examination import doctor
from paddle_recompute.doctor.report import DoctorReport, Finding
from paddle_recompute.doctor.self_test import self_test

__all__ = [
    "DoctorReport",
    "Finding",
    "doctor",
    "self_test",
]
