"""Recompute as a pass over Programs of the old representation (Paddle 2.6)."""
