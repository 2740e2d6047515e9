"""A trained encoder in use: evaluate, encode, search."""

from paddle_recompute.app.retrieval.encoding import encode_file
from paddle_recompute.app.retrieval.evaluation import encode_texts, retrieval_metrics
from paddle_recompute.app.retrieval.index import Index, search
from paddle_recompute.app.retrieval.trained import load_encoder

__all__ = ["Index", "encode_file", "encode_texts", "load_encoder", "retrieval_metrics", "search"]
