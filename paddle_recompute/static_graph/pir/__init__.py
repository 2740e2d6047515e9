"""Recompute, gradient merge and data parallelism for Programs of PIR (Paddle 3.3)."""
