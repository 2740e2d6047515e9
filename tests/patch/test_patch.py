"""`patch_fleet`: whoever calls fleet's recompute, however it was imported, calls ours."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.distributed import fleet

import paddle_recompute
from paddle_recompute import patch as command
from paddle_recompute import patch_fleet, recompute, unpatch_fleet
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.errors import ConfigError
from tests.processes import python

INNER = sys.modules["paddle.distributed.fleet.recompute.recompute"]


@pytest.fixture(autouse=True)
def _fleet_is_itself_afterwards() -> Iterator[None]:
    before = fleet.utils.recompute, fleet.recompute.recompute, INNER.recompute
    yield
    unpatch_fleet()
    assert (fleet.utils.recompute, fleet.recompute.recompute, INNER.recompute) == before


class Counted(paddle.nn.Layer):
    """A block with BatchNorm, whose statistics fleet's recompute updates twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4)
        self.seen: list[bool] = []

    def forward(self, x: paddle.Tensor, scale: float = 1.0) -> paddle.Tensor:
        self.seen.append(paddle_recompute.is_recomputing())
        return self.norm(self.linear(x)) * scale


def is_ours(call: Any, **kwargs: Any) -> bool:
    """Whether a call of `call` runs our recompute; of fleet's, `is_recomputing` is never true."""
    block, x = Counted(), paddle.ones([3, 4])
    x.stop_gradient = False
    call(block, x, **kwargs).sum().backward()
    assert len(block.seen) == 2
    return block.seen[1]


def modules_of_users() -> dict[str, types.ModuleType]:
    """Modules that have imported fleet's recompute in every way there is."""
    ways = {
        "utils": "from paddle.distributed.fleet.utils import recompute",
        "package": "from paddle.distributed.fleet.recompute import recompute",
        "module": "from paddle.distributed.fleet.recompute.recompute import recompute",
        "renamed": "from paddle.distributed.fleet.utils import recompute as other\n"
        "def recompute(*args, **kwargs): return other(*args, **kwargs)",
        "attribute": "from paddle.distributed import fleet\n"
        "def recompute(*args, **kwargs): return fleet.utils.recompute(*args, **kwargs)",
    }
    made = {}
    for name, code in ways.items():
        made[name] = types.ModuleType(f"user_{name}")
        exec(code, made[name].__dict__)
    return made


def test_every_way_to_import_it(monkeypatch: pytest.MonkeyPatch) -> None:
    users = modules_of_users()
    for module in users.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not any(is_ours(module.recompute) for module in users.values())
    with patch_fleet() as patch:
        later = modules_of_users()
        for module in later.values():
            monkeypatch.setitem(sys.modules, f"later_{module.__name__}", module)
        for name in users:
            assert is_ours(users[name].recompute), name
            assert is_ours(later[name].recompute), name
        names = set(patch.rebound)
        assert {"user_utils.recompute", "user_renamed.other", "user_module.recompute"} <= names
        assert "paddle.distributed.fleet.recompute.recompute.recompute" in names
        assert "user_utils.recompute" in str(patch)
    for name in users:
        assert not is_ours(users[name].recompute), name
        assert not is_ours(later[name].recompute), name


@pytest.mark.skipif(
    not paddle.__version__.startswith("2.6"),
    reason="recompute_sequential of Paddle 3.3.1 itself takes the rows of a tensor for arguments",
)
def test_recompute_sequential() -> None:
    with patch_fleet():
        sequential = paddle.incubate.distributed.fleet.recompute_sequential
        assert is_ours(lambda block, x: sequential({"segments": 2}, [block, paddle.abs], x))


def test_the_options_of_fleet_and_no_others() -> None:
    class Offloading(Counted):
        def forward(self, x: paddle.Tensor, offload: str = "", **more: Any) -> paddle.Tensor:
            assert offload == "mine" and more == {"determinism_check": 3}
            return super().forward(x)

    with patch_fleet():
        for options in (
            {"use_reentrant": True},
            {"use_reentrant": False, "preserve_rng_state": False, "scale": 2.0},
            {"scale": 2.0},
        ):
            assert is_ours(fleet.utils.recompute, **options)
        x = paddle.ones([3, 4])
        fleet.utils.recompute(Offloading(), x, offload="mine", determinism_check=3).sum().backward()


def test_nested_patches_end_with_the_last() -> None:
    outer = patch_fleet()
    with patch_fleet():
        assert is_ours(fleet.utils.recompute)
    assert is_ours(fleet.utils.recompute)
    outer.unpatch()
    outer.unpatch()
    assert not is_ours(fleet.utils.recompute)


REFINED = """
from paddle.distributed.fleet.recompute.recompute import recompute as original_recompute
def no_recompute(function, *args, **kwargs):
    return function(*args, **kwargs)
def recompute(function, *args, **kwargs):
    if kwargs.get("use_reentrant", True):
        return original_recompute(function, *args, **kwargs)
    return function(*args)  # an engine of their own
"""


def test_the_private_copy_of_paddleformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its shape: `refined_recompute` of PaddleFormers 1.2, and a model that imports it."""
    copy = types.ModuleType("paddleformers.transformers.refined_recompute")
    exec(REFINED, copy.__dict__)
    monkeypatch.setattr(copy, "recompute", copy.recompute)  # whatever the patch leaves there
    theirs, user = copy.recompute, types.ModuleType("user")
    with patch_fleet():
        for module in (copy, user):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        user.recompute = theirs  # type: ignore[attr-defined]
        assert is_ours(lambda *args: copy.recompute(*args, use_reentrant=True)) is False
        with patch_fleet() as patch:
            assert {f"{copy.__name__}.recompute", "user.recompute"} <= set(patch.rebound)
            for recompute_of in (copy.recompute, user.recompute):
                assert is_ours(lambda *a, at=recompute_of: at(*a, use_reentrant=False))
    assert (copy.recompute, user.recompute) == (theirs, theirs)
    assert copy.original_recompute is INNER.recompute


def test_recompute_hybrid() -> None:
    hybrid = "paddle.distributed.fleet.meta_parallel.parallel_layers.pp_layers.recompute_hybrid"
    with patch_fleet() as patch:
        assert hybrid in patch.rebound
        pipeline = sys.modules[hybrid.rpartition(".")[0]]
        for offload in (False, True):
            context = {"mp_group": None, "offload": offload, "partition": False}
            assert is_ours(lambda *args, at=context: pipeline.recompute_hybrid(at, *args))
        with pytest.raises(ConfigError, match="partition=True splits the inputs"):
            pipeline.recompute_hybrid({"partition": True}, Counted(), paddle.ones([3, 4]))


def test_the_state_that_a_user_told_fleet_to_preserve(monkeypatch: pytest.MonkeyPatch) -> None:
    if paddle_version() < (3, 0):
        pytest.skip("Paddle 2.6 has no custom_state_manager")
    state = [5]
    seen = []
    manager = INNER.custom_state_manager
    monkeypatch.setattr(manager, "custom_get_state_func", lambda x=None: state[0])
    monkeypatch.setattr(manager, "custom_set_state_func", lambda value: state.__setitem__(0, value))

    def block(x: paddle.Tensor) -> paddle.Tensor:
        seen.append(manager.custom_get_state_func())
        return x.tanh()

    x = paddle.ones([3])
    x.stop_gradient = False
    with patch_fleet():
        loss = fleet.utils.recompute(block, x).sum()
        state[0] = 7
        loss.backward()
    assert seen == [5, 5] and state == [7]


@pytest.mark.parametrize("name", ["fleet.utils", "fleet.recompute", "inner"])
def test_a_user_puts_ours_there_by_hand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fleet.utils.recompute = paddle_recompute.recompute``, and then `engine: fleet`."""
    place = {"fleet.utils": fleet.utils, "fleet.recompute": fleet.recompute, "inner": INNER}[name]
    monkeypatch.setattr(place, "recompute", recompute)
    for reentrant in (True, False, None):
        assert is_ours(recompute, use_reentrant=reentrant)
    if name != "inner":
        assert is_ours(fleet.utils.recompute, use_reentrant=True)
    model = paddle.nn.Sequential(paddle.nn.Linear(4, 4))
    second = []
    model[0].register_forward_pre_hook(lambda *_: second.append(paddle_recompute.is_recomputing()))
    config = paddle_recompute.RecomputeConfig(engine="fleet", checkpoints=["*"])
    paddle_recompute.apply_recompute(model, config)
    x = paddle.ones([3, 4])
    x.stop_gradient = False
    model(x).sum().backward()
    assert second == [False, False]  # twice, and by fleet


SCRIPT = """
import sys
import paddle
import beside
from paddle.distributed.fleet.utils import recompute
assert __name__ == "__main__" and sys.argv[1:] == ["--steps", "3"], sys.argv
x = paddle.ones([2, 3])
x.stop_gradient = False
recompute(beside.block, x, use_reentrant=True).sum().backward()
print("second forward by ours:", beside.seen)
"""
BESIDE = """
from paddle_recompute import is_recomputing
seen = []
def block(x):
    seen.append(is_recomputing())
    return x.tanh()
"""


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return python(*arguments, folder=folder, env={"PATH": "/usr/bin:/bin"}, fails=True)


def test_the_command_runs_a_script_unchanged(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").write_text(BESIDE)
    ours = run("-m", "paddle_recompute.patch", "scripts/train.py", "--steps", "3", folder=tmp_path)
    assert "ours: [False, True]" in ours.stdout, ours.stderr
    assert "paddle.distributed.fleet.utils.recompute" in ours.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "paddle.distributed.launch", "a.py"], "paddle_recompute/patch.py SCRIPT.py"),
        (["a.py"], "a.py: there is no such file"),
        (["-m"], "usage: python -m paddle_recompute"),
    ],
)
def test_the_command_refuses_a_launcher_and_a_missing_file(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["patch", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
