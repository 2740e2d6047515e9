"""Run by `make wheel-test` outside of the repo, with the unpacked wheel first on the path.

Usage: python wheel_check.py REPO
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path


def main(repo: Path) -> None:
    import paddle_recompute

    assert paddle_recompute.__file__ is not None
    installed = Path(paddle_recompute.__file__).parent
    assert repo / "build" / "site" in installed.parents, f"imported from {installed}"

    assert (installed / "py.typed").is_file()  # type checkers look for it

    names = [
        module.name
        for module in pkgutil.walk_packages(paddle_recompute.__path__, "paddle_recompute.")
    ]
    sources = {
        ".".join(path.relative_to(repo).with_suffix("").parts).removesuffix(".__init__")
        for path in (repo / "paddle_recompute").rglob("*.py")
    }
    assert sources == {*names, "paddle_recompute"}, sources ^ {*names, "paddle_recompute"}
    for name in names:
        importlib.import_module(name)
    for name in paddle_recompute.__all__:
        getattr(paddle_recompute, name)

    for name in ("page.html", "parts.html", "run.html", "theme.yaml"):
        assert (installed / "app" / "report" / name).is_file()

    configs = sorted((repo / "fleet_configs").glob("*.yaml"))
    for path in configs:
        paddle_recompute.load_config(path)

    from paddle_recompute.app.cli._init import _shipped

    assert {file.name for file in _shipped().values()} == {path.name for path in configs}
    assert all(installed in file.parents for file in _shipped().values())

    command = [
        sys.executable,
        "-m",
        "paddle_recompute",
        "train",
        "--config",
        "nowhere.yaml",
    ]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2 and "nowhere.yaml" in refused.stderr, refused

    print(f"wheel: {len(names)} modules import, {len(configs)} configurations load")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
