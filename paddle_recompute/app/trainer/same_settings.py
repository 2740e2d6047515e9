"""Ranks train together only with the same settings, versions and code."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path
from typing import Any

import numpy as np

from paddle_recompute import _version
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.app.config import Config
from paddle_recompute.distributed import Scope, connect_ranks, differences
from paddle_recompute.errors import ConfigError

MAY_DIFFER = (
    "data.cache_dir", "data.tokenizer", "data.train_file", "data.valid_file", "model.init_from",
    "train.output_dir",
)  # fmt: skip
"""Paths, for each machine has its own folders. What the ranks read there is compared
(`setup.check_same_on_ranks`); initial weights and checkpoints are those of rank 0.
"""
_MOST_SHOWN = 5


def check_same_settings(config: Config) -> None:
    """Check that all ranks have the settings of `config`, and the same versions.

    All ranks call it. A digest is sent; what differs, only where something does.

    Raises:
        ConfigError: They have not; names the first that differ, with each value and its ranks.
        PeerError: A rank has failed, or did not come.
    """
    client = connect_ranks()
    scope = Scope(client.all_ranks, client.state.limits)
    said = client.compare("the settings of the ranks", scope, compared(config))
    if said is not None:
        found = differences(said)
        more = f"; and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        raise ConfigError(
            f"the ranks do not have the same settings: {'; '.join(found[:_MOST_SHOWN])}{more}. "
            "Start all ranks with the same configuration, overrides and versions; only paths may "
            f"differ ({', '.join(MAY_DIFFER)})"
        )


def compared(config: Config) -> dict[str, Any]:
    """What must be the same on all ranks, by name."""
    settings = {name: value for name, value in config.settings().items() if name not in MAY_DIFFER}
    return settings | {
        "the version of Paddle": ".".join(map(str, paddle_version())),
        "the version of Python": platform.python_version(),
        "the version of numpy": np.__version__,
        "the version of paddle_recompute": f"{_version.__version__} (code {_digest()})",
    }


@functools.cache
def _digest() -> str:
    """Of the code of this package."""
    folder = Path(_version.__file__).parent
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]
