"""What the static graph needs of Paddle's own code and nothing else holds.

The private names that `_paddle.static` uses are held by the other tests of this folder, which call
all of them, and by those of ``train_step/test_compiling.py`` (`compiled`); 2.6.2, whose old
representation `old_ir` reads, is the last release of its kind.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import static as _paddle_static
from paddle_recompute._paddle.static import pir
from paddle_recompute.errors import StaticGraphError
from tests.static_graph.models import IS_26, building, data, needs_pir

# ------------------------------------------------------------------------- the guard of versions


@pytest.mark.parametrize("version", [(2, 5, 2), (3, 4, 0)])
def test_a_paddle_that_is_not_known_is_refused(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _paddle_static.representation() == ("old_ir" if IS_26 else "pir")
    monkeypatch.setattr(_paddle_static, "paddle_version", lambda: version)
    with pytest.raises(StaticGraphError, match=r"is not known .* of Paddle 2\.6 and 3"):
        _paddle_static.representation()


@needs_pir
def test_the_old_representation_of_3_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paddle.framework, "use_pir_api", lambda: False)
    with pytest.raises(StaticGraphError, match=r"FLAGS_enable_pir_api=0.*unset that flag"):
        _paddle_static.representation()


def test_both_representations_have_what_is_asked_of_either() -> None:
    """`native` returns a module, so nothing but this sees a name that one of the two lacks."""
    room = Path(_paddle_static.__file__).parent
    asked = set[str]()
    for path in room.parents[1].rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if any(one in source for one in ("native()", "native: ModuleType", "kinds.native")):
            own = r"|\bown\." if "own = native()" in source else ""
            asked |= set(re.findall(rf"(?:\bnative\(\)\.|\b_?native\.{own})(\w+)", source))
    assert len(asked) > 30
    for name in ("pir", "old_ir"):
        source = (room / f"{name}.py").read_text(encoding="utf-8")
        made = re.findall(r"^(?:def )?(\w+)(?:\(| = )", source, flags=re.M)
        assert not asked - {*made}, name


# ------------------------------------------------------------------------------- exact numbers


@needs_pir
@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "int64", "uint8"])
def test_what_waits_keeps_its_bits(dtype: str) -> None:
    odd = np.array([[-0.0, 0.0, np.nan], [np.inf, -np.inf, 1e-45]])
    value = odd.astype(dtype) if dtype.startswith("float") else np.arange(6).reshape(2, 3) % 2
    feed = {"x": value.astype(dtype), "gradient": np.full([2, 3], np.nan, "float32")}
    with building() as program:
        zero = pir.zero_after(data("gradient", [2, 3]))
        waiting = pir.after(data("x", [2, 3], dtype), zero)
        [out] = paddle.static.Executor().run(program, feed=feed, fetch_list=[waiting])
    assert out.tobytes() == feed["x"].tobytes()


@needs_pir
def test_what_follows_an_assignment_takes_the_old_value() -> None:
    """Why `Memory` and `lost_write` exist: nothing says that ``exp`` comes after the assignment."""
    with building():
        x = paddle.tanh(data())
        x[:, 0] = 1.0
        after = paddle.exp(x).get_defining_op()
        assert after.operand_source(0).get_defining_op().name() == "pd_op.tanh"
