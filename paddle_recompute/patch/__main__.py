"""``python -m paddle_recompute.patch train.py ...``: a script, with our recompute for fleet's."""

from __future__ import annotations

import os
import runpy
import sys

_USAGE = """\
usage: python -m paddle_recompute.patch SCRIPT.py [ARGUMENT]...
       python -m paddle_recompute.patch -m MODULE [ARGUMENT]...

Runs the script with paddle_recompute's recompute in place of fleet's. On several ranks, give this
module to Paddle's launcher as its script:
    python -m paddle.distributed.launch --nproc_per_node 2 {here} SCRIPT.py ...
"""
_LAUNCHERS = ("paddle.distributed.launch", "paddle.distributed.fleet.launch")


def main() -> None:
    """Patch, then run what the command line names, as Python itself would."""
    # The launcher runs this file as a script: then the folder of this file is first in the path.
    if sys.path and os.path.abspath(sys.path[0] or os.curdir) == os.path.dirname(
        os.path.abspath(__file__)
    ):
        sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
    from paddle_recompute.patch import patch_fleet

    print(f"paddle_recompute.patch: {patch_fleet()}", file=sys.stderr)
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
