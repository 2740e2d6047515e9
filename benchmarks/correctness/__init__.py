"""Are the numbers those of plain Paddle?

``python -m benchmarks.correctness`` runs the cases of recompute's contract.
"""
