"""Parameters travel while the program goes on, and whoever uses one waits for it.

`held` lets a piece travel when somebody waits for it, and not before, on every rank: what does not
wait gets the values before the update.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_recompute import GradCache, ShardedOptimizer
from paddle_recompute.distributed import Job, barrier
from paddle_recompute.errors import PeerError
from paddle_recompute.sharding import _travel
from paddle_recompute.sharding._settling import are_coming, settle
from tests.distributed.mortal_ranks import MortalRanks, results_of
from tests.ranks import each_on_ranks
from tests.sharding.runs import WIDTH, Case, Net, Training, equal, filled, make_of

pytestmark = pytest.mark.skipif(paddle.__version__ < "3", reason="overlap=True needs Paddle 3")


@contextlib.contextmanager
def held() -> Iterator[list[threading.Event]]:
    """Inside, pieces travel when they are waited for; gives what was waited for."""
    asked: list[threading.Event] = []
    news = threading.Condition()
    carry_all, wait_for = _travel._carry_all, Job.wait_for

    def carry_when_asked(pieces: Any, group: Any, arrived: Any) -> None:
        for place, (piece, event) in enumerate(zip(pieces, arrived, strict=True)):
            wanted = {*map(id, arrived[place:])}
            with news:
                news.wait_for(lambda wanted=wanted: wanted & {*map(id, asked)}, timeout=60)
            carry_all([piece], group, [event])

    def ask(self: Any, part: threading.Event) -> None:
        with news:
            asked.append(part)
            news.notify_all()
        wait_for(self, part)

    with (
        mock.patch.object(_travel, "_carry_all", carry_when_asked),
        mock.patch.object(Job, "wait_for", ask),
    ):
        yield asked


def plain_and_sharded(case: Case) -> list[Training]:
    options = {"sharded": True, "overlap": True}
    return [Training(case, sharded=False).run(0, 1), Training(case, **options).run(0, 1)]


X = np.linspace(-1, 1, 2 * WIDTH, dtype="float32").reshape(2, WIDTH)


def forward(layer: Callable[[paddle.Tensor], paddle.Tensor], seed: int = 5) -> np.ndarray:
    paddle.seed(seed)
    return np.asarray(layer(paddle.to_tensor(X)))


def saved_and_read(model: paddle.nn.Layer) -> list[np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        paddle.save(model.state_dict(), f"{folder}/model.pdparams")
        return [np.asarray(one) for one in paddle.load(f"{folder}/model.pdparams").values()]


def without_gradients(model: Net) -> np.ndarray:
    with paddle.no_grad():
        return forward(model)


def summed_over_ranks(model: Net) -> np.ndarray:
    dist.all_reduce(model.head.weight)
    return model.head.weight.numpy()


def written(model: Net) -> np.ndarray:
    """What is written after the update stays."""
    model.head.weight.set_value(paddle.ones([WIDTH, WIDTH]))
    settle(model.parameters())
    return model.head.weight.numpy()


def into_another(model: Net) -> np.ndarray:
    other = paddle.zeros([WIDTH, WIDTH])
    other[:] = model.head.weight
    return other.numpy()


def cached_vectors(model: Net) -> list[np.ndarray]:
    """The loss and the gradients of a gradient cache."""
    paddle.seed(5)
    loss = GradCache(model, lambda q, p: (q * p).mean(), chunk_size=1).backward(
        paddle.to_tensor(X), paddle.to_tensor(X + 1)
    )
    return [loss.numpy(), *(p.grad.numpy() for p in model.parameters())]


def gradients(model: Net) -> list[np.ndarray]:
    paddle.seed(5)
    model(paddle.to_tensor(X)).square().mean().backward()
    return [p.grad.numpy() for p in model.parameters()]


USES: dict[str, Callable[[Any], Any]] = {
    "forward": forward,
    "forward of a sublayer": lambda model: forward(model.blocks[1].up),
    "forward without gradients": without_gradients,
    "forward and backward": gradients,
    "gradient cache": cached_vectors,
    "numpy": lambda model: model.stem.weight.numpy(),
    "asarray": lambda model: np.asarray(model.stem.bias),
    "matmul": lambda model: paddle.matmul(paddle.to_tensor(X), model.head.weight).numpy(),
    "operator": lambda model: (model.head.weight + 1).numpy(),
    "reflected": lambda model: (paddle.to_tensor(X) @ model.head.weight).numpy(),
    "in a list": lambda model: paddle.concat([paddle.zeros([1]), model.head.bias]).numpy(),
    "index": lambda model: model.head.weight[1].numpy(),
    "into another": into_another,
    "state_dict": lambda model: [one.numpy() for one in model.state_dict().values()],
    "save": saved_and_read,
    "deepcopy": lambda model: forward(copy.deepcopy(model.head)),
    "set_value": written,
    "collective": summed_over_ranks,
}


def check_every_use() -> None:
    """A use that runs the model, with recompute as well."""
    cases = [(name, False) for name in USES]
    cases += [(name, True) for name in USES if "forward" in name or "cache" in name]
    for name, recompute in cases:
        with held():
            plain, sharded = plain_and_sharded(Case(recompute=recompute))
            assert are_coming(sharded.model.parameters()), name
            found = [USES[name](one.model) for one in (plain, sharded)]
            both = [one if isinstance(one, list) else [one] for one in found]
            assert all(map(np.array_equal, *both)), name
            settle()


def check_a_backward() -> None:
    """A graph of before the update, which Paddle lets go on with the new values."""
    found = []
    with held():
        for training in plain_and_sharded(Case(recompute=False)):
            paddle.seed(3)
            x = paddle.to_tensor(X, stop_gradient=False)
            y = training.model(x)
            for parameter in training.model.parameters():
                parameter.grad = paddle.ones_like(parameter)
            training.optimizer.step()
            training.optimizer.clear_grad()
            (gradient,) = paddle.grad(y.sum(), [x])
            found.append(gradient.numpy())
    assert np.array_equal(*found)


def check_the_next_update_and_the_state() -> None:
    """Updates without a forward between them; and the state after one."""
    with held():
        plain, sharded = plain_and_sharded(Case(recompute=False))
        for training in (plain, sharded):
            for value in (1.0, 2.0):
                for parameter in training.model.parameters():
                    parameter.grad = paddle.full_like(parameter, value)
                training.optimizer.step()
        assert sharded.optimizer.is_updating
        state = sharded.optimizer.state_dict()
        assert not sharded.optimizer.is_updating
        assert len(state) == len(plain.optimizer.state_dict())
        assert equal(plain.weights(), sharded.weights())


def check_a_fork() -> None:
    """A child has no thread that could bring a parameter; a data loader's may read one."""
    with held():
        plain, sharded = plain_and_sharded(Case(recompute=False))
        assert are_coming(sharded.model.parameters())
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # ends a child that waits for ever
            os._exit(0 if equal(plain.weights(), sharded.weights()) else 1)
        assert os.waitpid(child, 0)[1] == 0


def check_a_forward_waits_for_what_it_reads_alone() -> None:
    """How many parameters of a block are on their way, and of what follows; before and after it."""
    with held():
        training = Training(Case(kind="plain"), sharded=True, overlap=True).run(0, 1)
        model, seen = training.model, []

        def note(layer: paddle.nn.Layer, *_: Any) -> None:
            behind = [*model.blocks[1:].parameters(), *model.head.parameters()]
            seen.append([sum(are_coming([p]) for p in of) for of in (layer.parameters(), behind)])

        model.blocks[0].register_forward_pre_hook(note)
        model.blocks[0].register_forward_post_hook(note)
        with paddle.no_grad():
            forward(model)
        settle()
    (before, _), (after, behind) = seen[:2]
    assert before > 0 and after == 0 and behind == 14


test_what_waits = each_on_ranks(
    check_every_use,
    check_a_backward,
    check_the_next_update_and_the_state,
    check_a_fork,
    check_a_forward_waits_for_what_it_reads_alone,
)


def worker_of_failure() -> list[str]:
    """On rank 1 the second piece does not travel."""
    training = Training(Case(), sharded=True, overlap=True).run(0, 1)
    settle()
    told = []
    sound, calls = _travel._carry, []

    def carry(*args: Any) -> None:
        calls.append(args)
        if dist.get_rank() == 1 and len(calls) == 2:
            raise OSError("planted")
        sound(*args)

    with mock.patch.object(_travel, "_carry", carry):
        training.run(1, 2)
        for call in (
            lambda: training.run(2, 3),
            training.step.state_dict,
            training.optimizer.step,
            lambda: training.weights(),
        ):
            with pytest.raises(PeerError) as caught:
                call()
            told.append(str(caught.value))
    assert training.optimizer.is_updating
    return told


def test_a_send_that_fails_is_told_at_every_use() -> None:
    for told in results_of(worker_of_failure, 2):
        assert all("rank 1" in one for one in told), told


def worker_that_leaves(folder: str) -> None:
    """Rank 1 ends after its update, without looking at anything; rank 0 needs what it sends."""
    model = filled(Net())
    optimizer = ShardedOptimizer(make_of("sgd"), model, overlap=True)
    barrier()
    for parameter in model.parameters():
        parameter.grad = paddle.ones_like(parameter)
    if dist.get_rank() == 1:
        _until_the_end.enter_context(held())
    optimizer.step()
    if dist.get_rank() == 1:
        sys.exit(0)
    plain = filled(Net())
    for parameter in plain.parameters():
        parameter.grad = paddle.ones_like(parameter)
    make_of("sgd")(plain.parameters()).step()
    both = ([p.numpy() for p in one.parameters()] for one in (plain, model))
    Path(folder, "same").write_text(str(all(map(np.array_equal, *both))))
    os._exit(0)  # without a barrier


_until_the_end = contextlib.ExitStack()


def test_the_end_of_a_process_waits(tmp_path: Path) -> None:
    with MortalRanks(worker_that_leaves, folder=str(tmp_path)) as ranks:
        ends = [ranks.end_of(rank, within=60) for rank in (0, 1)]
    assert [code for code, _ in ends] == [0, 0], ends
    assert (tmp_path / "same").read_text() == "True"
