"""A trained encoder in use: evaluate, encode, search."""

from paddle_recompute.app.retrieval.encoding import encode_file, texts_of
from paddle_recompute.app.retrieval.evaluation import encode_batches, retrieval_metrics
from paddle_recompute.app.retrieval.hugging_face import write_hugging_face
from paddle_recompute.app.retrieval.index import Index
from paddle_recompute.app.retrieval.mining import MiningOptions, mine
from paddle_recompute.app.retrieval.serving import (
    write_inference,
    write_onnx,
    write_tokenizer,
    write_weights,
)
from paddle_recompute.app.retrieval.trained import (
    TrainedEncoder,
    encode_texts,
    evaluate_encoder,
    load_encoder,
)

__all__ = [
    "Index",
    "MiningOptions",
    "TrainedEncoder",
    "encode_batches",
    "encode_file",
    "encode_texts",
    "evaluate_encoder",
    "load_encoder",
    "mine",
    "retrieval_metrics",
    "texts_of",
    "write_hugging_face",
    "write_inference",
    "write_onnx",
    "write_tokenizer",
    "write_weights",
]
