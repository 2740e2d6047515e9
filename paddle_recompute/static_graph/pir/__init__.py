"""Recompute, gradient merge and data parallelism for Programs of PIR (Paddle 3.3)."""

from paddle_recompute.static_graph.pir.explain import explain
from paddle_recompute.static_graph.pir.minimize import minimize, prepare, recompute_calls

__all__ = ["explain", "minimize", "prepare", "recompute_calls"]
