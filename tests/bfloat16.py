"""Which tests need a processor whose Programs compute in bfloat16."""

from __future__ import annotations

import pytest

from paddle_recompute._paddle import device

HAS_BFLOAT16 = device.programs_compute_bfloat16()
needs_bfloat16 = pytest.mark.skipif(
    not HAS_BFLOAT16, reason="oneDNN computes bfloat16 with AVX-512 only, which this CPU lacks"
)
