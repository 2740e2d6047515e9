"""Every model that calls fleet's recompute uses ours, without a change of its code.

`patch_fleet` does it in a running program. ``python -m paddle_recompute.patch train.py ...`` does
it for a script.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable
from typing import Any, Literal

from paddle_recompute._nested import tensors_in
from paddle_recompute._paddle.fleet_recompute import (
    FORWARDS_TO_FLEET,
    custom_state_functions,
    fleet_recompute,
    fleet_recompute_hybrid,
    holders_of,
    options_of,
    private_copies,
    rebind,
)
from paddle_recompute.errors import ConfigError
from paddle_recompute.recompute import (
    RecomputeOptions,
    SomeOnHost,
    is_recomputing,
    refuse_unknown_options,
    run_recomputed,
)

__all__ = ["FleetPatch", "patch_fleet", "unpatch_fleet"]

_logger = logging.getLogger("paddle_recompute")

_USAGE = """\
usage: python -m paddle_recompute.patch SCRIPT.py [ARGUMENT]...
       python -m paddle_recompute.patch -m MODULE [ARGUMENT]...

Runs the script with paddle_recompute's recompute in place of fleet's. On several ranks, give this
module to Paddle's launcher as its script:
    python -m paddle.distributed.launch --nproc_per_node 2 {here} SCRIPT.py ...
"""
_LAUNCHERS = ("paddle.distributed.launch", "paddle.distributed.fleet.launch")


class FleetPatch:
    """What `patch_fleet` did; a context manager that undoes it at the end of its block.

    Attributes:
        rebound: The names that were given another function: ``"module.name"``.
    """

    def __init__(self, rebound: tuple[str, ...]) -> None:
        self.rebound = rebound
        self._is_active = True

    def unpatch(self) -> None:
        """Put fleet's functions back; a second call does nothing."""
        if self._is_active:
            self._is_active = False
            _leave()

    def __enter__(self) -> FleetPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.unpatch()

    def __str__(self) -> str:
        names = "".join(f"\n  {name}" for name in self.rebound)
        return (
            f"fleet's recompute is paddle_recompute's now, under {len(self.rebound)} names:{names}"
        )


_in_force: list[FleetPatch] = []
_names: dict[tuple[str, str], Callable[..., Any]] = {}
"""What stood under the name of a module before."""


def patch_fleet() -> FleetPatch:
    """Let every model that calls fleet's recompute use `paddle_recompute.recompute`.

    ``paddle.distributed.fleet.recompute.recompute`` and ``fleet.utils.recompute`` become ours, as
    does every global of a loaded module that is fleet's function: code that has imported it before
    uses ours, too, as does code that imports it later. ``recompute_sequential`` uses it.
    ``recompute_hybrid`` (pipelines) becomes ours, but for ``partition=True``, which is refused.
    A function that was stored elsewhere (a closure, a ``functools.partial``, a class attribute)
    stays fleet's.

    The private copy of PaddleFormers (1.2, ``transformers.refined_recompute``) becomes ours if it
    has been imported; after a later import call `patch_fleet` again. Its ``no_recompute`` is then a
    plain call: what it would keep is recomputed. ``RefinedRecomputeFunction``, of the model
    ``ernie4_5_moe_vl`` alone, is not reached: leave ``recompute_modules`` unset there. Nor does
    ``fleet.utils.is_in_recompute`` of Paddle's development branch know of our calls.

    A Layer that is wrapped by `apply_recompute` must not be recomputed by its model as well: that
    would be three forwards.

    Returns:
        The names that were rebound; call ``.unpatch()`` on it, or use it as a context manager.

    Examples:
        >>> import paddle
        >>> from paddle_recompute import patch_fleet
        >>> with patch_fleet() as patch:
        ...     name = paddle.distributed.fleet.utils.recompute.__module__
        >>> name
        'paddle_recompute.patch'
        >>> "paddle.distributed.fleet.utils.recompute" in patch.rebound
        True
    """
    if not _in_force:
        _names.clear()
    for original, own in _pairs():
        _names.update(dict.fromkeys(rebind(original, own), original))
    patch = FleetPatch(tuple(sorted(f"{module}.{name}" for module, name in _names)))
    _in_force.append(patch)
    if len(_in_force) == 1:
        _logger.info("%s", patch)
    return patch


def unpatch_fleet() -> None:
    """Put fleet's functions back, whoever called `patch_fleet` and how often."""
    for patch in list(_in_force):
        patch.unpatch()


def _leave() -> None:
    _in_force.pop()
    if _in_force:
        return
    for original, own in reversed(_pairs()):
        for module, name in holders_of(own):  # also of modules that were imported since
            setattr(module, name, _names.get((module.__name__, name), original))


def _pairs() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Fleet's functions and copies of them, and ours for each; `recompute` for fleet's is last."""
    return [
        (FORWARDS_TO_FLEET, recompute),
        *((copy, recompute) for copy in private_copies() if copy is not recompute),
        (fleet_recompute, recompute),
        (fleet_recompute_hybrid, recompute_hybrid),
    ]


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`paddle_recompute.recompute` in place of ``paddle.distributed.fleet.utils.recompute``.

    Takes the options of fleet and no more: every other keyword argument is one of `function`.

    Args:
        function: A Layer or any callable.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments, and ``preserve_rng_state``, ``offload_indices``,
            ``use_reentrant`` and ``preserve_external_rng_state`` (the last two have no effect), on
            each Paddle.

    Raises:
        ConfigError: A keyword is another option of this Paddle's recompute, and `function` has no
            parameter of its name.
    """
    return _run(function, args, kwargs)


def recompute_hybrid(
    ctx: dict[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`paddle_recompute.recompute` in place of fleet's ``recompute_hybrid`` (pipelines).

    Args:
        ctx: ``offload``: the arguments wait in host memory. ``mp_group`` is not needed.
        function: A Layer or any callable.
        *args: Its positional arguments.
        **kwargs: As of `recompute`.

    Raises:
        ConfigError: ``ctx["partition"]`` is true; or `ctx` has an option of this Paddle that is
            none of these, or `kwargs` as of `recompute`.
    """
    if ctx.get("partition", False):
        raise ConfigError(
            "recompute_hybrid: partition=True splits the inputs over the ranks of mp_group, which "
            "paddle_recompute does not do. Set recompute_partition to False, or call unpatch_fleet"
        )
    known = {"mp_group", "offload", "partition"}
    for name in sorted((options_of(fleet_recompute_hybrid, "ctx.get") - known).intersection(ctx)):
        raise ConfigError(
            f"recompute_hybrid: {name} in ctx is an option of fleet's, which paddle_recompute does "
            "not have. Remove it, or call unpatch_fleet"
        )
    return _run(function, args, kwargs, is_offloaded=bool(ctx.get("offload", False)))


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_offloaded: bool = False,
) -> Any:
    kwargs.pop("use_reentrant", None)
    kwargs.pop("preserve_external_rng_state", None)
    offload: Literal["host"] | None = "host" if is_offloaded else None
    options = RecomputeOptions(kwargs.pop("preserve_rng_state", True), offload=offload)
    indices = kwargs.pop("offload_indices", ())
    if kwargs:
        refuse_unknown_options(function, kwargs)
    storage = SomeOnHost(t for i in indices for t in tensors_in(args[i])) if indices else None
    return run_recomputed(_with_custom_state(function), args, kwargs, options, storage=storage)


def _with_custom_state(function: Callable[..., Any]) -> Callable[..., Any]:
    functions = custom_state_functions()
    return function if functions is None else _Stateful(function, *functions)


class _Stateful:
    """A function whose second call finds the state that a user told fleet to preserve."""

    def __init__(
        self, function: Callable[..., Any], get: Callable[..., Any], put: Callable[..., Any]
    ) -> None:
        self._function, self._get, self._put = function, get, put
        self._state = get()
        self.__qualname__ = getattr(function, "__qualname__", type(function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not is_recomputing():
            return self._function(*args, **kwargs)
        now = self._get()
        self._put(self._state)
        try:
            return self._function(*args, **kwargs)
        finally:
            self._put(now)


def main() -> None:
    """Patch, then run what the command line names, as Python itself would."""
    # The launcher runs this file as a script: then the folder of this file is first in the path.
    package = os.path.dirname(os.path.abspath(__file__))
    if sys.path and os.path.abspath(sys.path[0] or os.curdir) == package:
        sys.path[0] = os.path.dirname(package)
    arguments = sys.argv[1:]
    usage = _USAGE.format(here=os.path.abspath(__file__))
    if arguments in ([], ["-m"]) or arguments[0] in ("-h", "--help"):
        is_asked = arguments[:1] not in ([], ["-m"])
        print(usage, file=sys.stdout if is_asked else sys.stderr)
        sys.exit(0 if is_asked else 2)
    is_module = arguments[0] == "-m"
    target = arguments[1] if is_module else arguments[0]
    if target in _LAUNCHERS:
        print(
            f"paddle_recompute.patch: {target} starts other processes, which would not be patched. "
            f"Let the launcher run this module instead.\n{usage}",
            file=sys.stderr,
        )
        sys.exit(2)
    if not is_module and not os.path.isfile(target):
        print(f"paddle_recompute.patch: {target}: there is no such file\n{usage}", file=sys.stderr)
        sys.exit(2)
    from paddle_recompute.patch import patch_fleet as patch_once  # this file may be __main__ too

    print(f"paddle_recompute.patch: {patch_once()}", file=sys.stderr)
    if is_module:
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(target)))
        runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main()
