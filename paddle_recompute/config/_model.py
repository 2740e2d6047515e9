"""The section ``model``: the encoder and its published sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from paddle_recompute.config._section import Broken, Section, Values
from paddle_recompute.config._types import Count, Probability, UserPath, Width

# Published sizes. `tiny` is ERNIE 3.0 Nano and `base` ERNIE 3.0 Base (PaddleNLP,
# model_zoo/ernie-3.0, ernie-3.0-{nano,base}-zh/config.json); `large` is ERNIE 2.0 Large
# (ernie-2.0-large-en/config.json), which has the dimensions of BERT Large.
PRESETS: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 312,
        "num_layers": 4,
        "num_heads": 12,
        "intermediate_size": 1248,
        "max_position_embeddings": 2048,
        "type_vocab_size": 4,
    },
    "base": {
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
        "type_vocab_size": 4,
    },
    "large": {
        "hidden_size": 1024,
        "num_layers": 24,
        "num_heads": 16,
        "intermediate_size": 4096,
        "max_position_embeddings": 512,
        "type_vocab_size": 4,
    },
}


class ModelConfig(Section):
    """The encoder. A preset sets every dimension that is not given."""

    @staticmethod
    def _heads_divide(v: Values) -> Iterator[Broken]:
        hidden, heads = v["hidden_size"], v["num_heads"]
        if hidden % heads:
            yield Broken(
                "num_heads",
                heads,
                f"must divide hidden_size = {hidden}; the remainder is {hidden % heads}",
            )

    rules = (_heads_divide,)
    filled_in_by = "preset"

    name: Literal["ernie"] = Field("ernie", description="the architecture")
    preset: Literal["tiny", "base", "large"] | None = Field(
        None,
        description="published dimensions; dimensions that are given override them; none: all "
        "dimensions are required",
    )
    vocab_size: Count | None = Field(
        None, description="rows of the word embedding; none: the size of the tokenizer's vocabulary"
    )
    hidden_size: Width = Field(description="width of the encoder, in features")
    num_layers: Count = Field(description="number of Transformer blocks")
    num_heads: Count = Field(description="attention heads; must divide hidden_size")
    intermediate_size: Width = Field(description="width of the feed-forward layer, in features")
    max_position_embeddings: Count = Field(description="longest text the model can read, in tokens")
    type_vocab_size: Count = Field(description="number of sentence types")
    hidden_dropout: Probability = Field(
        0.1, description="probability of dropping a hidden feature (published for ERNIE)"
    )
    attention_dropout: Probability = Field(
        0.1, description="probability of dropping an attention weight (published for ERNIE)"
    )
    activation: Literal["gelu", "relu"] = Field(
        "gelu", description="activation function of the feed-forward layer"
    )
    pooling: Literal["cls", "mean"] = Field(
        "cls",
        description="cls: first token, then tanh; mean: average over all tokens except padding",
    )
    projection_size: Width | None = Field(
        None, description="width of the text vector, in features; none: hidden_size, no projection"
    )
    layer_norm_epsilon: float = Field(
        1e-12, gt=0, le=1e-3, description="added to a variance (ERNIE: 1e-12); Paddle takes no more"
    )
    initializer_range: float = Field(
        0.02, gt=0, description="standard deviation of the initial weights (published for ERNIE)"
    )
    init_from: UserPath | None = Field(
        None,
        description="file with initial weights, .pdparams or .safetensors; none: random weights",
    )

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in the dimensions of the preset; dimensions in the file override them."""
        preset = given.get("preset")
        return {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given
