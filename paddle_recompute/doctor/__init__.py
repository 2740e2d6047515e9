"""Checks before training: does the wrapped model compute what the plain model computes?

`doctor` examines a model on one batch, on all ranks. `doctor_config` does so for a configuration.
`self_test` tests the library itself on the user's device.
"""

from paddle_recompute.doctor.command import examine, write_report, write_self_test
from paddle_recompute.doctor.configured import doctor_config
from paddle_recompute.doctor.examination import doctor
from paddle_recompute.doctor.report import DoctorReport, Finding
from paddle_recompute.doctor.self_test import self_test

__all__ = [
    "DoctorReport",
    "Finding",
    "doctor",
    "doctor_config",
    "examine",
    "self_test",
    "write_report",
    "write_self_test",
]
