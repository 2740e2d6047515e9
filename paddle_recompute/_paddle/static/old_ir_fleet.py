"""Fleet's static-graph training of Paddle 2.6, and what it takes on CPUs, which it knows not.

What is private, and why: fleet writes communication operators for NCCL alone (its
``CollectiveHelper`` raises elsewhere, ``c_sync_*`` operators have no CPU kernel), and its mixed
precision knows float16 alone. Can go with Paddle 2.6.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import socket
from collections.abc import Collection, Iterator

import paddle
from paddle.base import core, framework
from paddle.distributed import fleet

from paddle_recompute._paddle.device import check_bfloat16
from paddle_recompute._paddle.static.old_ir import EMPTY, FLOAT32, Operator, Variable, main_block
from paddle_recompute.errors import StaticGraphError

_BF16 = core.VarDesc.VarType.BF16
_MATRIX_PRODUCTS = ("matmul", "matmul_v2", "mul")
_STREAM_OPERATORS = (
    "c_sync_calc_stream",
    "c_sync_comm_stream",
    "c_wait_comm",
    "c_wait_compute",
)


def on_cpu() -> bool:
    """Whether Programs run on the CPU."""
    return str(paddle.get_device()) == "cpu"


# ------------------------------------------------------------------------------ minimizing


def fleet_minimize(
    optimizer: paddle.optimizer.Optimizer,
    loss: Variable,
    strategy: fleet.DistributedStrategy,
    startup_program: paddle.static.Program,
) -> tuple[list[Operator], list[tuple[Variable, Variable]]]:
    """``fleet.distributed_optimizer(optimizer, strategy).minimize(loss, startup_program)``.

    Fleet is initialized if it was not, for as many ranks as the launch has. On several CPU ranks
    both Programs are made to run with gloo.
    """
    gloo = join_ranks() > 1 and on_cpu()
    with contextlib.redirect_stdout(None):
        # _role_maker is None until fleet.init; there is no public way to ask.
        if fleet.fleet._role_maker is None:
            fleet.init(is_collective=True, strategy=strategy)  # it sets the level of its logger
        with _quiet("paddle.distributed.fleet.utils.log_util"):
            distributed = fleet.distributed_optimizer(optimizer, strategy)
            with _no_nccl() if gloo else contextlib.nullcontext():
                result = distributed.minimize(loss, startup_program=startup_program)
    if gloo:
        for program in (loss.block.program, startup_program):
            _use_gloo(program)
    operators, params_grads = result
    return operators, params_grads


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Inside, this logger of Paddle speaks of errors only.

    Fleet warns of a strategy that comes with the optimizer, and prints its lists of optimizers; the
    lists of mixed precision speak of "the current GPU" where there is none.
    """
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def join_ranks() -> int:
    """Connect this process with the other ranks of the launch, on CPUs; returns how many there are.

    On devices the startup program does, which fleet writes.
    """
    num_ranks = int(paddle.distributed.get_world_size())
    if num_ranks > 1 and on_cpu():
        _join_gloo()
    return num_ranks


def sum_over_ranks(variable: Variable) -> Variable:
    """The sum of `variable` over all ranks."""
    from paddle.base.layer_helper import LayerHelper

    join_ranks()
    helper = LayerHelper("c_allreduce_sum")
    total = helper.create_variable_for_type_inference(variable.dtype)
    helper.append_op(
        type="c_allreduce_sum",
        inputs={"X": [variable]},
        outputs={"Out": [total]},
        attrs={"ring_id": 0, "use_calc_stream": True},
    )
    return total


@functools.cache
def _join_gloo() -> None:
    """Connect the ranks with the gloo context that ``c_*`` operators use on CPUs; once a process.

    It is another one than that of ``paddle.distributed.init_parallel_env``, and is public
    (``gloo_init_parallel_env``), but wants a port that is free on rank 0: rank 0 looks for one and
    tells it through the launch's TCP store (``core.create_or_get_global_tcp_store``).
    """
    from paddle import distributed as dist

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    host = dist.ParallelEnv().trainer_endpoints[0].rpartition(":")[0]
    store = core.create_or_get_global_tcp_store()
    key = "paddle_recompute/static_graph/gloo_port"
    if rank == 0:
        with socket.socket() as free:
            free.bind((host, 0))
            store.set(key, str(free.getsockname()[1]).encode())
    _import_without_log_file()
    dist.gloo_init_parallel_env(rank, num_ranks, f"{host}:{store.get(key).decode()}")


def _import_without_log_file() -> None:
    """The module through which gloo's ranks meet opens ``http.log`` in the current folder (2.6)."""
    original = logging.FileHandler
    logging.FileHandler = lambda *_, **__: logging.NullHandler()  # type: ignore[misc,assignment]
    try:
        importlib.import_module("paddle.distributed.fleet.utils.http_server")
    finally:
        logging.FileHandler = original  # type: ignore[misc]


@contextlib.contextmanager
def _no_nccl() -> Iterator[None]:
    """Inside, fleet does not write the start of NCCL into the startup program; it would raise."""
    from paddle.distributed.fleet.meta_optimizers.common import CollectiveHelper

    original = CollectiveHelper._init_communicator
    CollectiveHelper._init_communicator = lambda *_, **__: None
    try:
        yield
    finally:
        CollectiveHelper._init_communicator = original


def _use_gloo(program: paddle.static.Program) -> None:
    """Let the collectives of `program` run in order on the CPU, instead of on streams."""
    for block in program.blocks:
        for position in reversed(range(len(block.ops))):
            operator = block.ops[position]
            if operator.type in _STREAM_OPERATORS:
                block._remove_op(position, sync=False)
            elif operator.type.startswith("c_") and operator.has_attr("use_calc_stream"):
                operator._set_attr("use_calc_stream", True)
    program._sync_with_cpp()


# -------------------------------------------------------------------------- mixed precision


def cast_to_bfloat16(
    program: paddle.static.Program,
    *,
    white_list: Collection[str],
    black_list: Collection[str],
    black_variables: Collection[str],
) -> None:
    """Insert the casts of bfloat16, level O1, into a forward.

    ``amp.fp16_utils.cast_model_to_fp16`` (2.6) is what ``paddle.static.amp.decorate`` calls; that
    itself would take fleet's place around the optimizer. On CPU Paddle looks up what a
    *GPU* can do in bfloat16, and casts nothing in a build without one; there the matrix products
    are cast, which have a CPU kernel in both directions (of oneDNN), and nothing else.

    Raises:
        StaticGraphError: `white_list` names what the CPU cannot do, or it has no bfloat16.
    """
    from paddle.static.amp import CustomOpLists, fp16_utils

    # Their results, which nobody else computes: what they read may come from a matrix product.
    stays = {
        name
        for block in program.blocks
        for operator in block.ops
        if operator.has_attr(FLOAT32)
        for name in operator.output_arg_names
    }
    custom = set(white_list), set(black_list), {*black_variables, *stays}
    with _quiet("paddle.static.amp.fp16_lists") if on_cpu() else contextlib.nullcontext():
        lists = CustomOpLists(*custom, dtype="bfloat16")
    if on_cpu():
        impossible = sorted(set(white_list) - set(_MATRIX_PRODUCTS))
        if impossible:
            raise StaticGraphError(
                f"amp_configs.custom_white_list names {', '.join(impossible)}; on a CPU, Paddle "
                f"2.6 trains in bfloat16 only {', '.join(_MATRIX_PRODUCTS)}; remove the others"
            )
        products = set(_MATRIX_PRODUCTS) - set(black_list)
        everything = {op.type for block in program.blocks for op in block.ops}
        lists.unsupported_list = everything - products - {"cast"}
    fp16_utils.cast_model_to_fp16(program, lists, use_fp16_guard=False, dest_type=_BF16, level="O1")
    if on_cpu():
        for operator in _bfloat16_products(program, _MATRIX_PRODUCTS):
            check_bfloat16()
            operator._set_attr("use_mkldnn", True)  # the only kernel there is


def complete_bfloat16_gradients(program: paddle.static.Program) -> None:
    """Let oneDNN's gradients of matrix products compute both sides, as it cannot compute one.

    Its kernel for bfloat16 crashes (SIGSEGV; 2.6.2, 3.3.1) where one factor needs no gradient: the
    input data, or a frozen weight. The missing one gets a variable that no operator reads.
    """
    if not on_cpu():
        return
    block = main_block(program)
    gradients = [f"{name}_grad" for name in _MATRIX_PRODUCTS]
    for operator in _bfloat16_products(program, gradients):
        for factor in ("X", "Y"):
            slot = framework.grad_var_name(factor)
            if operator.desc.output(slot) in ([], [EMPTY]):
                (name,) = operator.input(factor)
                unread = paddle.utils.unique_name.generate(f"{name}@GRAD@UNREAD")
                block.create_var(name=unread, shape=block.var(name).shape, dtype=_BF16)
                operator.desc.set_output(slot, [unread])
    program._sync_with_cpp()


def _bfloat16_products(program: paddle.static.Program, kinds: Collection[str]) -> list[Operator]:
    block = main_block(program)
    return [
        operator
        for operator in block.ops
        if operator.type in kinds and block.var(operator.input("X")[0]).dtype == _BF16
    ]
