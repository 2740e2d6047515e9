"""Every model that calls fleet's recompute uses ours, without a change of its code.

`patch_fleet` does it in a running program. ``python -m paddle_recompute.patch train.py ...`` does
it for a script.
"""

from paddle_recompute.patch.patching import FleetPatch, patch_fleet, unpatch_fleet

__all__ = ["FleetPatch", "patch_fleet", "unpatch_fleet"]
