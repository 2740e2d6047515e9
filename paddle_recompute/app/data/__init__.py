"""Text pairs: reading, mining, splitting, tokens and batches."""

from paddle_recompute.app.data.judged import JudgedQueries, read_judged
from paddle_recompute.app.data.lines import parsed
from paddle_recompute.app.data.loader import PairLoader, Position, build_loader, check_files
from paddle_recompute.app.data.pairs import Pair, read_pairs
from paddle_recompute.app.data.prepare import (
    DataDigest,
    PreparedData,
    check_vocabulary,
    prepare_data,
)
from paddle_recompute.app.data.split import normal_form, split_pairs
from paddle_recompute.app.data.tokenizer import PairTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "DataDigest",
    "JudgedQueries",
    "Pair",
    "PairLoader",
    "PairTokenizer",
    "Position",
    "PreparedData",
    "build_loader",
    "check_files",
    "check_vocabulary",
    "load_tokenizer",
    "normal_form",
    "parsed",
    "prepare_data",
    "read_judged",
    "read_pairs",
    "split_pairs",
    "train_tokenizer",
]
