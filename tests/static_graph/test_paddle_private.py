"""What a release of Paddle could change unnoticed in the static graph, and what waits for one.

The private names that `_paddle.static` uses are held by the other tests of this folder, which call
all of them; 2.6.2, whose old representation `old_ir` reads, is the last release of its kind.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute._paddle import static as _paddle_static
from paddle_recompute._paddle.static import pir
from paddle_recompute.errors import StaticGraphError
from tests.bfloat16 import needs_bfloat16
from tests.processes import python
from tests.static_graph.models import IS_26, needs_old_ir, needs_pir


def fed(name: str = "x", dtype: str = "float32") -> Any:
    value = paddle.static.data(name, [2, 3], dtype)
    value.stop_gradient = False
    return value


def run(program: paddle.static.Program, wanted: list[Any], **feed: Any) -> list[Any]:
    return list(paddle.static.Executor().run(program, feed=feed, fetch_list=wanted))


# ------------------------------------------------------------------------- the guard of versions


@pytest.mark.parametrize("version", [(2, 5, 2), (3, 0, 0), (3, 4, 0), (4, 0, 0)])
def test_a_paddle_that_is_not_known_is_refused(
    version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _paddle_static.representation() == ("old_ir" if IS_26 else "pir")
    monkeypatch.setattr(_paddle_static, "paddle_version", lambda: version)
    told = r"\.".join(map(str, version))
    with pytest.raises(
        StaticGraphError, match=rf"Paddle {told} is not known .* of Paddle 2\.6 and 3"
    ):
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
def test_what_waits_keeps_its_bits(program: paddle.static.Program, dtype: str) -> None:
    x, gradient = fed("x", dtype), fed("gradient")
    waiting = pir.after(x, pir.zero_after(gradient))
    odd = np.array([[-0.0, 0.0, np.nan], [np.inf, -np.inf, 1e-45]])
    value = odd.astype(dtype) if dtype.startswith("float") else np.arange(6).reshape(2, 3) % 2
    value = value.astype(dtype)
    [out] = run(program, [waiting], x=value, gradient=np.full([2, 3], np.nan, "float32"))
    assert out.tobytes() == value.tobytes()


# ------------------------------------------------------------ what fails here lets code of ours go


@needs_pir
def test_value_equality_appends_an_operator(program: paddle.static.Program) -> None:
    """Why values are compared by ``Value.id``; if this fails, `pir.key` may go."""
    x = fed()
    assert isinstance(x == x, paddle.pir.Value)
    assert program.global_block().ops[-1].name() == "pd_op.equal"


@needs_pir
def test_what_follows_an_assignment_takes_the_old_value(program: paddle.static.Program) -> None:
    """Why `Memory` and `lost_write` exist: nothing says that ``exp`` comes after the assignment."""
    x = paddle.tanh(fed())
    x[:, 0] = 1.0
    after = paddle.exp(x).get_defining_op()
    assert after.operand_source(0).get_defining_op().name() == "pd_op.tanh"


@needs_pir
def test_the_depend_operator_fails_on_the_cpu(program: paddle.static.Program) -> None:
    """Paddle's own way to let one operator wait for another; if this passes, use it in `after`."""
    if not hasattr(paddle._C_ops, "depend"):
        pytest.skip("this Paddle has no depend operator for Programs")
    waiting = paddle._C_ops.depend(fed(), [fed("y")])
    ones = np.ones([2, 3], "float32")
    with pytest.raises(Exception, match=r"should be the same"):
        run(program, [paddle.tanh(waiting)], x=ones, y=ones)


@needs_pir
def test_create_global_var_fails_in_pir(program: paddle.static.Program) -> None:
    """If this fails, `pir.persistable` can do with it."""
    with pytest.raises(TypeError):
        paddle.static.create_global_var([], 0.0, "float32", True, name="norm")


def test_register_buffer_refuses_variables(program: paddle.static.Program) -> None:
    """`static.buffers` replaces it while it does."""
    with pytest.raises(TypeError):
        paddle.nn.Layer().register_buffer("count", paddle.arange(8))


@needs_bfloat16
@needs_old_ir
def test_the_crash_of_onednn_is_refused_by_nobody_else() -> None:
    """`complete_bfloat16_gradients` can go if this exits with 0."""
    script = (
        "import paddle; paddle.enable_static(); x = paddle.static.data('x', [2, 3])\n"
        "w = paddle.create_parameter([3, 2], 'float32')\n"
        "from paddle.base import core\n"
        "y = paddle.matmul(x.astype('bfloat16'), w.astype('bfloat16'))\n"
        "[o._set_attr('use_mkldnn', True) for o in y.block.ops if o.type == 'matmul_v2']\n"
        "paddle.optimizer.SGD(0.1).minimize(y.astype('float32').mean())\n"
        "e = paddle.static.Executor(); e.run(paddle.static.default_startup_program())\n"
        "e.run(feed={'x': [[1, 2, 3], [4, 5, 6]]})\n"
    )
    done = python("-c", script, fails=True)
    assert done.returncode < 0, done.stderr[-500:]
