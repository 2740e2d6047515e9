"""Several threads that train at the same time: each is served as if it were alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import functional as F

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from paddle_recompute.recompute import is_recomputing
from tests.processes import python
from tests.recompute.contract import Run, Seen, assert_as_plain, leaf, plain

STEPS = 6


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """What the functions return, or the errors that they raise, each in a thread of its own."""
    results: list[Any] = [None] * len(functions)

    def work(number: int) -> None:
        try:
            results[number] = functions[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return results


class Model(paddle.nn.Layer):
    def __init__(self, run: Run, inside: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.layers = paddle.nn.LayerList([paddle.nn.Linear(8, 8) for _ in range(4)])
        self.norm = paddle.nn.BatchNorm1D(8)
        self._run, self._inside = run, inside

    def block(self, layer: paddle.nn.Layer, x: paddle.Tensor) -> paddle.Tensor:
        self._inside()
        return self._run(lambda t: F.gelu(layer(t)), x) + x

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        for layer in self.layers:
            x = self._run(lambda t, layer=layer: self.block(layer, t), x)
        return self.norm(x)


def trained(model: Model, x: paddle.Tensor) -> list[bytes]:
    """The bits of all losses, weights and statistics of some steps."""
    optimizer = paddle.optimizer.SGD(0.05, parameters=model.parameters())
    losses = []
    for _ in range(STEPS):
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(loss.numpy().tobytes())
    return losses + [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def ones(*shape: int) -> paddle.Tensor:
    """Not drawn: two threads that draw at a time are refused."""
    x = paddle.ones(list(shape))
    x.stop_gradient = False
    return x


def models(*runs: Run, inside: Callable[[], None] = lambda: None) -> list[Callable[[], Any]]:
    """One training for each of `runs`, all from other weights."""
    paddle.seed(7)
    made = [(Model(run, inside), paddle.randn([6, 8])) for run in runs]
    return [lambda model=model, x=x: trained(model, x) for model, x in made]


def disk(*args: Any, **kwargs: Any) -> Any:
    return recompute(*args, offload="disk", **kwargs)


@pytest.mark.parametrize(
    "runs", [(recompute, plain), (disk, disk)], ids=["recompute beside plain", "both on disk"]
)
def test_two_models_in_two_threads(runs: tuple[Run, Run]) -> None:
    alone = [one() for one in models(plain, plain)]
    assert in_threads(*models(*runs)) == alone


def test_threads_that_take_turns_inside_their_blocks() -> None:
    """Each block of one thread begins while one of the other is running."""
    alone = [one() for one in models(plain, plain)]
    barrier = threading.Barrier(2)
    meetings = [0]

    def meet() -> None:
        if not is_recomputing():
            meetings[0] += 1
            barrier.wait(20)

    assert in_threads(*models(recompute, recompute, inside=meet)) == alone
    assert meetings[0] == 2 * 4 * STEPS


def test_a_thread_beside_a_recorder_keeps_what_its_operators_save() -> None:
    x = leaf(3, 4)
    other: dict[str, np.ndarray] = {}

    def beside() -> None:
        y = paddle.to_tensor(x.numpy(), stop_gradient=False)
        (y.exp() * y).sum().backward()
        other["gradient"] = y.grad.numpy()

    calls = []

    def block(t: paddle.Tensor) -> paddle.Tensor:
        calls.append(is_recomputing())
        t = t.tanh()
        assert in_threads(beside) == [None]
        return t * t

    recompute(block, x * 1).sum().backward()
    assert calls == [False, True]
    want = np.exp(x.numpy()) * (1 + x.numpy())
    assert np.allclose(other["gradient"], want, atol=1e-6)


def test_an_exception_in_one_thread_leaves_the_other_alone() -> None:
    alone = models(plain)[0]()

    def raises(t: paddle.Tensor) -> paddle.Tensor:
        t = t.tanh()
        if is_recomputing():
            raise KeyError("second")
        return t * t

    def failing() -> str:
        for _ in range(30):
            with pytest.raises(KeyError):
                recompute(raises, ones(2, 4)).sum().backward()
        return "done"

    assert in_threads(models(recompute)[0], failing) == [alone, "done"]


def test_after_threads_a_user_may_have_hooks() -> None:
    barrier = threading.Barrier(2)

    def work() -> None:
        barrier.wait(20)
        recompute(paddle.nn.Linear(4, 4), paddle.ones([2, 4])).sum().backward()
        barrier.wait(20)

    def user() -> list[int]:
        barrier.wait(20)
        x = ones(2)
        (x * x).sum().backward()
        barrier.wait(20)
        packed = []
        # A copy: Paddle 2.6 takes the memory away from what the second hook returns.
        pair = (lambda t: packed.append(1) or t, lambda t: t.clone())
        with paddle.autograd.saved_tensors_hooks(*pair):
            (x * x).sum().backward()
        return packed

    done, packed = in_threads(work, user)
    assert done is None and packed


def test_a_backward_in_another_thread() -> None:
    def outcome(run: Run) -> Seen:
        linear = paddle.nn.Linear(4, 4)
        loss = run(lambda t: F.dropout(linear(t).tanh(), 0.3), leaf(3, 4)).sum()
        paddle.seed(6)
        assert in_threads(loss.backward) == [None]
        return {"linear": linear}

    assert_as_plain(outcome)


# -------------------------------------------------------------------------------- random numbers


def draws(t: paddle.Tensor) -> paddle.Tensor:
    return F.dropout(t.exp(), 0.5)


def test_random_numbers_that_another_thread_draws_inside_are_told() -> None:
    """The stream is one for all threads: the second forward cannot draw what the first drew."""

    def block(t: paddle.Tensor) -> paddle.Tensor:
        if not is_recomputing():
            in_threads(lambda: paddle.rand([3]))
        return draws(t)

    x = ones(4, 4)
    with pytest.raises(RecomputeError, match="random stream"):
        recompute(block, x).sum().backward()


def test_two_recomputing_threads_that_draw_at_the_same_time_are_told() -> None:
    barrier = threading.Barrier(2)

    def work() -> None:
        x = ones(4, 4)

        def block(t: paddle.Tensor) -> paddle.Tensor:
            if not is_recomputing():
                barrier.wait(20)
            t = draws(t)
            if not is_recomputing():
                barrier.wait(20)
            return draws(t)

        y = recompute(block, x).sum()
        barrier.wait(20)
        y.backward()

    # One of them may end the race with the stream where it began.
    told = [error for error in in_threads(work, work) if error is not None]
    assert told and all(isinstance(error, RecomputeError) for error in told), told
    assert "function of another thread" in str(told[0])


def test_a_function_that_draws_nothing_leaves_the_streams_alone() -> None:
    x, drawn = ones(4, 4), []

    def block(t: paddle.Tensor) -> paddle.Tensor:
        if is_recomputing():
            in_threads(lambda: drawn.append(paddle.rand([2]).tolist()))
        return t.exp()

    y = recompute(block, x).sum()
    y.backward()
    drawn.append(paddle.rand([2]).tolist())
    paddle.seed(1)
    assert drawn == [paddle.rand([2]).tolist() for _ in range(2)]


def test_without_preserve_rng_state_a_thread_may_draw_beside() -> None:
    x = ones(4, 4)

    def block(t: paddle.Tensor) -> paddle.Tensor:
        in_threads(lambda: paddle.rand([3]))
        return t.exp()

    recompute(block, x, preserve_rng_state=False).sum().backward()
    assert np.allclose(x.grad.numpy(), np.exp(1))


def test_a_process_ends_whose_second_thread_has_recomputed() -> None:
    code = """
import threading, paddle
from paddle_recompute import recompute
layer, x = paddle.nn.Linear(4, 4), paddle.ones([2, 4])
recompute(layer, x).sum().backward()
thread = threading.Thread(target=lambda: recompute(layer, x).sum().backward())
thread.start()
thread.join()
print("done")
"""
    assert python("-c", code).stdout == "done\n"
