"""Checks before training: does the wrapped model compute what the plain model computes?

`doctor` (`examination`) makes steps of a model on one batch, from the same state: `observation`
notes what a step does, `checks` compares two of them, `across_ranks` the ranks. Each fault is a
`Finding` of the `DoctorReport`, with the first sublayer that differs.
"""

from paddle_recompute.doctor.examination import doctor
from paddle_recompute.doctor.report import DoctorReport, Finding

__all__ = [
    "DoctorReport",
    "Finding",
    "doctor",
]
