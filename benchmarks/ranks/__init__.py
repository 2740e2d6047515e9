"""Gradient synchronization between ranks: time, and equal bits."""
