"""What a forward pass changes besides its result is changed once."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import recompute
from paddle_recompute.errors import RecomputeError
from tests.recompute.contract import (
    AUTO_CAST,
    Run,
    Seen,
    Using,
    case,
    clean_streams,
    is_rounding,
    leaf,
    loss_of,
    plain,
    seen,
    step,
    upstream,
)


def two_calls(run: Run, block: Any, first: paddle.Tensor, *, again: paddle.Tensor) -> Seen:
    """Two training steps, with two calls of the block in each: its state moves four times."""
    losses = []
    for _ in range(2):
        outputs = [run(block, upstream(first)), run(block, upstream(again))]
        loss = loss_of(outputs)
        loss.backward()
        losses.append(loss)
    return {"losses": losses, "inputs": [first, again], "layer": block}


class PowerIteration(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 5)
        self.norm = paddle.nn.SpectralNorm([4, 5], power_iters=2)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return (x @ self.norm(self.linear.weight)).tanh()


def shared_statistics() -> list[paddle.nn.Layer]:
    one, other = paddle.nn.BatchNorm1D(4), paddle.nn.BatchNorm1D(4)
    other._mean, other._variance = one._mean, one._variance
    return [one, paddle.nn.Tanh(), other]


def mixed_modes() -> list[paddle.nn.Layer]:
    one, other = paddle.nn.BatchNorm1D(4), paddle.nn.BatchNorm1D(4)
    one.eval()
    return [one, paddle.nn.Dropout(0.5), other]


class Lazy(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if "seen" not in self._buffers:
            self.register_buffer("seen", paddle.ones([4]))
        self.seen.set_value(self.seen * 0.5)
        # A copy: the plain backward reads what the operator saved, and set_value writes to it.
        return (self.linear(x) * self.seen.clone()).tanh()


NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "BatchNorm1D": (lambda: [paddle.nn.BatchNorm1D(4)], (6, 4)),
    "BatchNorm2D": (lambda: [paddle.nn.BatchNorm2D(3, momentum=0.5)], (2, 3, 4, 4)),
    "BatchNorm3D": (lambda: [paddle.nn.BatchNorm3D(2)], (2, 2, 3, 3, 3)),
    "BatchNorm": (lambda: [paddle.nn.BatchNorm(3)], (2, 3, 4, 4)),
    "BatchNorm2D with global statistics": (
        lambda: [paddle.nn.BatchNorm2D(3, use_global_stats=True)],
        (2, 3, 4, 4),
    ),
    "BatchNorm without affine parameters": (
        lambda: [paddle.nn.BatchNorm2D(3, weight_attr=False, bias_attr=False)],
        (2, 3, 4, 4),
    ),
    "InstanceNorm1D": (lambda: [paddle.nn.InstanceNorm1D(3)], (2, 3, 5)),
    "InstanceNorm2D": (lambda: [paddle.nn.InstanceNorm2D(3)], (2, 3, 4, 4)),
    "GroupNorm": (lambda: [paddle.nn.GroupNorm(2, 4)], (2, 4, 3, 3)),
    "the statistics of BatchNorm in a convolutional block": (
        lambda: [paddle.nn.Conv2D(2, 3, 3), paddle.nn.BatchNorm2D(3), paddle.nn.ReLU()],
        (2, 2, 5, 5),
    ),
    "the power iteration of nn.utils.spectral_norm": (
        lambda: [paddle.nn.utils.spectral_norm(paddle.nn.Linear(4, 5))],
        (3, 4),
    ),
    "the power iteration of nn.SpectralNorm": (lambda: [PowerIteration()], (3, 4)),
    "two BatchNorms with the same statistics": (shared_statistics, (6, 4)),
    "eval mode of one sublayer only": (mixed_modes, (6, 4)),
    "a buffer registered in the first forward": (lambda: [Lazy()], (3, 4)),
    "a buffer that state_dict leaves out": (
        lambda: [Counting("set_value", persistable=False)],
        (3, 4),
    ),
    "buffers of a block of blocks": (
        lambda: [
            Counting("set_value"),
            paddle.nn.Sequential(paddle.nn.BatchNorm1D(4), Counting("in-place addition")),
        ],
        (3, 4),
    ),
}


@case("{what}", what=list(NORMS))
def test_two_calls(run: Run, what: str) -> Seen:
    make, shape = NORMS[what]
    block = paddle.nn.Sequential(*make(), paddle.nn.Tanh())
    return two_calls(run, block, leaf(*shape), again=leaf(*shape))


@case("BatchNorm in eval mode")
def test_batch_norm_in_eval(run: Run) -> Seen:
    block = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4))
    block(leaf(6, 4))  # statistics of their own
    block.eval()
    return step(run, block, leaf(6, 4))


class ReadsItsStatistics(paddle.nn.BatchNorm1D):
    """Normalizes by the running mean, in training too."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = (x - self._mean) * self.weight
        with paddle.no_grad():
            self._mean.set_value(0.9 * self._mean + 0.1 * x.mean(0))
        return y


class ReadsStatisticsOfItsNorm(paddle.nn.Layer):
    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.norm, self.name = paddle.nn.BatchNorm1D(4), name

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.norm(x)
        return y * (x - (getattr(self.norm, self.name) if self.name else self.norm._mean))


class EvaluatesFirst(paddle.nn.Layer):
    """Normalizes by the statistics in eval mode, and updates them in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.how = paddle.nn.BatchNorm1D(4), how

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.how == "training":
            self.norm.training = False
        elif self.how == "use_global_stats":
            self.norm._use_global_stats = True
        else:
            self.norm.eval()
        y = self.norm(x)
        self.norm.train()
        self.norm._use_global_stats = None
        self.norm(y * 3 + 1)
        return y


class CountingNorm(paddle.nn.BatchNorm1D):
    """Has a buffer of its own, which its forward reads and changes."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.register_buffer("calls", paddle.ones([1]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        normed = super().forward(x) * self.calls
        self.calls = self.calls + 1
        return normed


def norm_with_a_hook() -> paddle.nn.Layer:
    norm = paddle.nn.BatchNorm1D(4)
    norm.register_forward_post_hook(lambda layer, inputs, y: y * (inputs[0] - layer._variance))
    return norm


READERS_OF_STATISTICS: dict[str, Any] = {
    "a subclass": lambda: ReadsItsStatistics(4),
    "the Layer around it": ReadsStatisticsOfItsNorm,
    "getattr": lambda: ReadsStatisticsOfItsNorm("_mean"),
    "a hook": norm_with_a_hook,
    "a subclass with a buffer of its own": lambda: CountingNorm(4),
}


@case(
    "statistics of a training BatchNorm that {who} reads",
    who=list(READERS_OF_STATISTICS),
    num_listed=4,
)
def test_statistics_read_in_training(run: Run, who: str) -> Seen:
    block = paddle.nn.Sequential(READERS_OF_STATISTICS[who](), paddle.nn.Tanh())
    return two_calls(run, block, leaf(6, 4), again=leaf(6, 4))


@case(
    "a BatchNorm in eval mode and in training in one forward, by {how}",
    how=["eval", "training", "use_global_stats"],
    num_listed=2,
)
def test_eval_within_the_forward(run: Run, how: str) -> Seen:
    """One call: the plain backward of a first one would read the statistics of the second."""
    return step(run, EvaluatesFirst(how), leaf(6, 4))


@pytest.mark.parametrize("how", ["eval", "training", "use_global_stats"])
def test_statistics_that_a_later_call_changes(how: str) -> None:
    """The gradient is that of a backward right behind each call. The plain backward of both calls
    at once reads what the second one has left behind: Paddle keeps the statistics themselves.
    """

    def gradients(run: Run, *, is_late: bool) -> Seen:
        with clean_streams():
            block, x, losses = EvaluatesFirst(how), leaf(6, 4), []
            for scale in (1, 2):
                losses.append(loss_of(run(block, x * scale)))
                if not is_late:
                    losses.pop().backward()
            if is_late:
                (losses[0] + losses[1]).backward()
        return dict(seen({"x": x, "block": block}))

    wanted = gradients(plain, is_late=False)
    assert is_rounding(gradients(recompute, is_late=True), wanted)
    assert not is_rounding(gradients(plain, is_late=True), wanted)


@case("BatchNorm that goes to eval mode between forward and backward")
def test_eval_before_the_backward(run: Run) -> Seen:
    block, x = paddle.nn.Sequential(paddle.nn.BatchNorm1D(4), paddle.nn.Dropout(0.5)), leaf(6, 4)
    y = run(block, x * 2)
    block.eval()
    y.square().sum().backward()
    return {"y": y, "x": x, "block": block}


@case("a function that enters auto_cast itself, and one in another dtype after it")
@pytest.mark.filterwarnings("ignore")
def test_auto_cast_inside(run: Run) -> Seen:
    """On a CPU nothing is cast; but Paddle keeps the dtype, which a GradScaler reads."""
    layer, x = paddle.nn.Linear(4, 4), leaf(3, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        with paddle.amp.auto_cast(dtype="bfloat16"):
            return layer(x).tanh()

    y = run(function, x * 2)
    with paddle.amp.auto_cast(dtype="float16"):
        z = layer(x)
    y.square().sum().backward()
    dtype = AUTO_CAST.amp_global_state().amp_dtype
    return {"x": x, "y": y, "z": z, "layer": layer, "global AMP dtype": dtype}


class Owner:
    """Holds a Layer without being one."""

    def __init__(self, norm: paddle.nn.Layer) -> None:
        self.norm = norm

    def block(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(x).tanh()


REACHED = ["reached by a closure", "in a method of an object that is no Layer"]


@case("BatchNorm {way}", way=REACHED)
def test_batch_norm_reached(run: Run, way: str) -> Seen:
    norm, x = paddle.nn.BatchNorm1D(4), leaf(6, 4)
    y = run(Owner(norm).block if way == REACHED[1] else lambda x: norm(x).tanh(), x * 2)
    y.square().sum().backward()
    return {"y": y, "x": x, "norm": norm}


class Counting(paddle.nn.Layer):
    """A Layer with a running mean and a counter, updated the way that `how` says."""

    def __init__(self, how: str, persistable: bool = True) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("mean", paddle.zeros([4]), persistable)
        self.register_buffer("count", paddle.zeros([], "int64"))
        self.register_buffer("nothing", None)
        self._how = how

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        new = 0.5 * self.mean + x.detach().mean(0)
        count = self.count + 1
        if self._how == "set_value":
            self.mean.set_value(new)
            self.count.set_value(count)
        elif self._how == "in-place addition":
            self.mean.add_(new)
            self.count.add_(paddle.ones([], "int64"))
        elif self._how == "augmented assignment":
            self.mean += new
            self.count += 1
        elif self._how == "assignment of a new tensor":
            self.mean = new
            self.count = count
        elif self._how == "an item":
            self.mean[1:] = new[1:]
            self.count.fill_(int(count))
        elif self._how == "paddle.assign":
            paddle.assign(new, self.mean)
            paddle.assign(count, self.count)
        return (self.linear(x) + self.mean * count).tanh()


WAYS = [
    "set_value", "in-place addition", "augmented assignment", "assignment of a new tensor",
    "an item", "paddle.assign",
]  # fmt: skip


@case("a buffer updated by {how}", how=WAYS, num_listed=1)
def test_buffer(run: Run, how: str) -> Seen:
    return two_calls(run, Counting(how), leaf(3, 4), again=leaf(3, 4))


class Filling(paddle.nn.Layer):
    """Its first forward fills a state that was empty, and computes otherwise than the later ones.

    Args:
        kept: How it keeps the state.
        later: What a later forward does with the state.
        has_flag: Whether a flag tells that it is filled.
    """

    state: Any

    def __init__(self, kept: str, later: str, has_flag: bool) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        if kept == "as an attribute":
            self.state = None
        elif kept != "nowhere":
            value = paddle.zeros([4]) if kept == "in zeros" else None
            self.register_buffer("state", value, persistable=kept != "as a passing buffer")
        self._later, self._has_flag, self.is_filled = later, has_flag, False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        new = x.detach().mean(0).tanh()
        is_filled = self.is_filled if self._has_flag else getattr(self, "state", None) is not None
        if not is_filled:
            self.state = new
            if self._has_flag:
                self.is_filled = True
            return (self.linear(x) * 2 + self.state.clone()).tanh()
        if self._later == "empties it":
            state, self.state = self.state, None
            if self._has_flag:
                self.is_filled = False
            return (self.linear(x) * state).tanh()
        if self._later == "adds in place":
            self.state.add_(new)
        elif self._later == "sets its value":
            self.state.set_value(self.state * 0.5 + new)
        else:
            self.state = self.state * 0.5 + new
        return (self.linear(x) * 3 + self.state.clone()).tanh()


LATER = ["exchanges it", "adds in place", "sets its value", "empties it"]


@case(
    "a state that the first forward fills, kept {kept}; a later forward {later}"
    ", with a flag: {has_flag}, {where}",
    kept=["as a buffer", "as a passing buffer", "as an attribute", "nowhere", "in zeros"],
    later=LATER,
    has_flag=[False, True],
    where=["in a block", "in a block of blocks", "recomputed inside"],
    num_listed=0,
)
def test_filled_state(run: Run, kept: str, later: str, has_flag: bool, where: str) -> Seen:
    filling = Filling(kept, later, has_flag)
    block: paddle.nn.Layer = filling
    if where == "in a block of blocks":
        block = paddle.nn.Sequential(paddle.nn.Linear(4, 4), filling, paddle.nn.BatchNorm1D(4))
    elif where == "recomputed inside":
        block = Using(filling, run)
    x, again = leaf(3, 4), leaf(3, 4)
    outputs = [run(block, upstream(one)) for one in (x, again, x)]
    sum(number * one.square().sum() for number, one in enumerate(outputs, start=1)).backward()
    return {"layer": block, "x": x, "again": again, "flag": filling.is_filled}


class Counts(paddle.nn.BatchNorm1D):
    """The mean of all batches, not a moving one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.num_batches = 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.num_batches += 1
        self._momentum = 1 - 1 / self.num_batches
        return super().forward(x)


@case("a BatchNorm that counts its batches")
def test_counting_norm(run: Run) -> Seen:
    block = Counts()
    found = two_calls(run, block, leaf(6, 4), again=leaf(6, 4))
    return {**found, "number": block.num_batches}


class Removing(paddle.nn.Layer):
    """Removes its only buffer, which may be None, and makes it again in the next call."""

    def __init__(self, value: paddle.Tensor | None, has_flag: bool) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(4, 4)
        self.register_buffer("state", value)
        self._has_flag, self.is_filled = has_flag, True

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.is_filled if self._has_flag else "state" in self._buffers:
            factor = 2.0 if self.state is None else 2.0 + self.state
            del self._buffers["state"]
            if self._has_flag:
                self.is_filled = False
            return (self.linear(x) * factor).tanh()
        self.register_buffer("state", x.detach().mean(0))
        if self._has_flag:
            self.is_filled = True
        return (self.linear(x) * 3).tanh()


@case(
    "a buffer that is removed and made again, at first {first}, with a flag: {has_flag}",
    first=["None", "ones"],
    has_flag=[False, True],
    num_listed=0,
)
def test_removed_buffer(run: Run, first: str, has_flag: bool) -> Seen:
    block = Removing(paddle.ones([4]) if first == "ones" else None, has_flag)
    return two_calls(run, block, leaf(3, 4), again=leaf(3, 4))


class Building(paddle.nn.Layer):
    """Builds a parameter in its first forward, out of numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", paddle.ones([4]))
        self._numbers, self.is_built = np.random.default_rng(0), False

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if not self.is_built:
            numbers = self._numbers.standard_normal((4, 4)).astype("float32")
            self.weight = self.create_parameter(
                [4, 4], default_initializer=paddle.nn.initializer.Assign(numbers)
            )
            self.is_built = True
        return (x @ self.weight + self.offset).tanh()


@case("a parameter that a Layer with buffers builds, with a flag")
def test_flag_of_what_is_built(run: Run) -> Seen:
    return two_calls(run, Building(), leaf(3, 4), again=leaf(3, 4))


class Holding:
    """No Layer, but with an attribute of the name under which a Layer has its buffers."""

    def __init__(self, content: Any) -> None:
        self._buffers, self.calls = content, 0


@case("an object that counts, with _buffers that are {kind}", kind=["an array", "a tensor"])
def test_buffers_of_no_layer(run: Run, kind: str) -> Seen:
    holding = Holding(np.zeros(3) if kind == "an array" else paddle.zeros([3]))
    linear = paddle.nn.Linear(4, 4)

    def function(x: paddle.Tensor) -> paddle.Tensor:
        holding.calls += 1
        return linear(x).tanh() * len(holding._buffers)

    return {**step(run, function, leaf(3, 4)), "layer": linear}


@case(
    "a buffer that the user changes between forward and backward by {how}",
    how=WAYS,
    or_error=True,
    num_listed=1,
)
def test_buffer_changed_by_the_user(run: Run, how: str) -> Seen:
    """A queue of negatives, say, that is read by the block and filled after it."""
    block, queue, x = Counting("not at all"), Counting(how), leaf(3, 4)
    queue.mean, queue.count = block.mean, block.count
    y = run(block, x * 2)
    queue(leaf(3, 4))
    if how == "assignment of a new tensor":
        block.mean, block.count = queue.mean, queue.count
    y.sum().backward()
    return {"y": y, "x": x, "block": block}


def test_the_buffer_stays_the_same_object() -> None:
    norm, x = paddle.nn.BatchNorm1D(4), leaf(6, 4)
    mean = norm._mean
    recompute(norm, x).sum().backward()
    assert norm._mean is mean and norm.state_dict()["_mean"] is mean


class Auxiliary(paddle.nn.Layer):
    """Stores a loss of its forward on itself, for the loop to add."""

    def __init__(self, stored: str) -> None:
        super().__init__()
        self.linear, self.router = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)
        self.stored = stored

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        y = self.linear(x).tanh()
        loss = (self.router(x.detach()) * y).tanh().square().sum()
        if self.stored == "in a tuple":
            self.kept: Any = (y, loss)
        elif self.stored == "in a list":
            self.kept = [y, loss]
        else:
            self.kept = loss
        return y

    @property
    def loss(self) -> paddle.Tensor:
        return self.kept[1] if self.stored.startswith("in") else self.kept


@case(
    "a loss that the block stores {stored}, {when}",
    num_listed=0,
    stored=["as a tensor", "in a tuple", "in a list"],
    when=["in one backward", "in a second backward"],
)
def test_stored_loss(run: Run, stored: str, when: str) -> Seen:
    block, x = Auxiliary(stored), leaf(3, 4)
    losses = []
    for _ in range(3):
        y = run(block, upstream(x))
        if when == "in one backward":
            (y.square().sum() + block.loss).backward()
        else:
            y.square().sum().backward(retain_graph=True)
            block.loss.backward()
        losses.append(block.loss.detach())
    return {"layer": block, "x": x, "losses": losses}


class TwoGraphs(paddle.nn.Layer):
    """The graph of the stored loss and that of the output have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.router = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.loss = self.router(x.detach()).square().tanh().sum()
        return self.linear(x).tanh()


@case("a stored loss whose own backward comes after that of the output", num_listed=0)
def test_a_backward_for_each_graph(run: Run) -> Seen:
    block, x = TwoGraphs(), leaf(3, 4)
    run(block, upstream(x)).sum().backward()
    block.loss.backward()
    return {"layer": block, "x": x}


def test_a_write_between_the_backwards_of_two_graphs_is_refused() -> None:
    """As in the plain call: the operators of the second graph would read other numbers."""
    block, x = TwoGraphs(), leaf(3, 4)
    recompute(block, x).sum().backward()
    with paddle.no_grad():
        x.add_(paddle.ones([3, 4]))
    with pytest.raises(RecomputeError, match="changed in place afterwards"):
        block.loss.backward()
