"""use_reentrant=True, Paddle's PyLayer form: what it is right about, and what it says it is not.

Every case of the contract goes through it too. Where the outcome may differ from the plain call,
`DIFFERENT` says how, as the docstring of `recompute` does.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import recompute, recompute_wrapper
from paddle_recompute.errors import ConfigError, RecomputeError
from tests.recompute import (
    test_amp,
    test_determinism_check,
    test_engine,
    test_inputs,
    test_nesting,
    test_outputs,
    test_randomness,
    test_side_effects,
)
from tests.recompute.contract import CASES, Case, differences, leaf, plain

MODULES = (
    test_amp, test_determinism_check, test_engine, test_inputs, test_nesting, test_outputs,
    test_randomness, test_side_effects,
)  # fmt: skip


def reentrant(function: Any, *args: Any, **kwargs: Any) -> Any:
    return recompute(function, *args, use_reentrant=True, **kwargs)


FLAGS = "outputs always need a gradient"
ZEROS = "an unused output leaves zeros instead of None"
GRAD = "paddle.grad is refused"
RETAIN = "retain_graph=True is refused"
FIRST_GRAPH = "there is no graph of the first forward"
DIFFERENT: dict[str, str] = {}
"""Title of a case -> why it may differ from the plain call."""


@pytest.mark.parametrize("one", CASES, ids=[f"{one.section}: {one.title}" for one in CASES])
def test_every_case(one: Case) -> None:
    wanted = one.wanted()
    try:
        lines = differences(one.observe(reentrant), wanted)
    except Exception as e:
        lines = [f"{type(e).__name__}: {str(e)[:150]}"]
    assert not lines, "\n".join([one.title, *lines])
