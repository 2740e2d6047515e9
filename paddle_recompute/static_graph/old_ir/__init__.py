"""Recompute for Programs of the old representation (Paddle 2.6); fleet does the rest."""

from paddle_recompute.static_graph.old_ir.explain import explain
from paddle_recompute.static_graph.old_ir.minimize import minimize

__all__ = ["explain", "minimize"]
