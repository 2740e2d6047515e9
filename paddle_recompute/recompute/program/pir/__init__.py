"""Recompute as a pass over Programs of PIR (Paddle 3.3)."""
