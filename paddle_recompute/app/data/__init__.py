"""Text pairs: reading, mining, splitting, tokens and batches."""

from paddle_recompute.app.data.cedict import mine_cedict
from paddle_recompute.app.data.ceiling import Ceiling, ceiling
from paddle_recompute.app.data.loader import PairLoader, build_loader
from paddle_recompute.app.data.pairs import LONGEST_LINE, Pair, PairFile, read_lines, read_pairs
from paddle_recompute.app.data.prepare import PreparedData, Source, prepare_data
from paddle_recompute.app.data.split import Split, split_pairs
from paddle_recompute.app.data.tokenizer import PairTokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "LONGEST_LINE",
    "Ceiling",
    "Pair",
    "PairFile",
    "PairLoader",
    "PairTokenizer",
    "PreparedData",
    "Source",
    "Split",
    "build_loader",
    "ceiling",
    "load_tokenizer",
    "mine_cedict",
    "prepare_data",
    "read_lines",
    "read_pairs",
    "split_pairs",
    "train_tokenizer",
]
