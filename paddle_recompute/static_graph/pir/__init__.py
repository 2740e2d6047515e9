"""Recompute, gradient merge and data parallelism for Programs of PIR (Paddle 3.3)."""

from paddle_recompute.static_graph.pir.detached import copy_detached
from paddle_recompute.static_graph.pir.explain import explain
from paddle_recompute.static_graph.pir.minimize import minimize, recompute_calls

__all__ = ["copy_detached", "explain", "minimize", "recompute_calls"]
