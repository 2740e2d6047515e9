"""Large-batch contrastive training and retrieval.

``python -m benchmarks.contrastive`` measures memory and time.
"""
