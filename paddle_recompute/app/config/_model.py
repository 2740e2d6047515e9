"""The section ``model``: the encoder and its published sizes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Broken, Section, Values, default_of
from paddle_recompute.app.config._types import Count, Probability, UserPath, Width

DIMENSIONS = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
# Published sizes. `tiny` is ERNIE 3.0 Nano and `base` ERNIE 3.0 Base (PaddleNLP,
# model_zoo/ernie-3.0, ernie-3.0-{nano,base}-zh/config.json); `large` is ERNIE 2.0 Large
# (ernie-2.0-large-en/config.json), which has the dimensions of BERT Large.
PRESETS: dict[str, dict[str, int]] = {
    name: dict(zip(DIMENSIONS, sizes, strict=True))
    for name, sizes in {
        "tiny": (312, 4, 12, 1248, 2048, 4),
        "base": (768, 12, 12, 3072, 2048, 4),
        "large": (1024, 24, 16, 4096, 512, 4),
    }.items()
}
# A Layer of the user's has no dimensions that are known here. These stand for them.
_OWN_MODEL = {**dict.fromkeys(DIMENSIONS, 1), "max_position_embeddings": 1_000_000}
_FOR_OWN_MODELS = (
    "name",
    "options",
    "init_from",
    "vocab_size",
    "max_position_embeddings",
    "query_prompt",
    "document_prompt",
)


def _heads_divide(v: Values) -> Broken:
    hidden, heads = v["hidden_size"], v["num_heads"]
    if hidden % heads:
        yield "num_heads", f"must divide hidden_size = {hidden}; the remainder is {hidden % heads}"


def _settings_are_of_the_model(v: Values) -> Broken:
    name = v["name"]
    if ":" not in name:
        if v["options"]:
            yield "options", "are of a model of your own; remove them"
        return
    for field in ModelConfig.model_fields:
        default = _OWN_MODEL.get(field, default_of(ModelConfig, field))
        if field not in _FOR_OWN_MODELS and v[field] != default:
            yield (
                field,
                f"is a setting of the ernie encoder and not known to {name}; if it has such an "
                "argument, set it in model.options",
            )


class ModelConfig(Section):
    """The encoder. A preset sets every dimension that is not given.

    Attributes:
        name: The architecture: ernie, or a Layer of your own as package.module:Class, which gets
            ids [batch, length] and returns vectors [batch, dim].
        options: Arguments of a Layer of your own.
        preset: Published dimensions; dimensions that are given override them; None: all dimensions
            are required.
        vocab_size: Rows of the word embedding; None: the size of the tokenizer's vocabulary.
        hidden_size: Width of the encoder, in features.
        num_layers: Number of Transformer blocks.
        num_heads: Attention heads; must divide `hidden_size`.
        intermediate_size: Width of the feed-forward layer, in features.
        max_position_embeddings: Longest text the model can read, in tokens.
        type_vocab_size: Number of sentence types.
        hidden_dropout: Probability of dropping a hidden feature (published for ERNIE).
        attention_dropout: Probability of dropping an attention weight (published for ERNIE).
        activation: Activation function of the feed-forward layer.
        pooling: cls: first token, then tanh; mean: average over all tokens except padding.
        projection_size: Width of the text vector, in features; None: `hidden_size`, no projection.
        layer_norm_epsilon: Added to a variance (ERNIE: 1e-12); Paddle takes no more than 1e-3.
        initializer_range: Standard deviation of the initial weights (published for ERNIE).
        init_from: File with initial weights, .pdparams or .safetensors, or folder with
            model.safetensors.index.json, of this library, of PaddleNLP (Ernie, Bert) or Hugging
            Face (BERT); None: random weights.
        query_prompt: Put before each query, such as 'query: '.
        document_prompt: Put before each positive and negative.
    """

    rules = (_heads_divide, _settings_are_of_the_model)
    completed_by = "preset"

    name: str = Field("ernie", pattern=r"^(ernie|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")
    options: dict[str, Any] = Field(default_factory=dict)
    preset: Literal["tiny", "base", "large"] | None = None
    vocab_size: Count | None = None
    hidden_size: Width = Field(description="width of the encoder, in features")
    num_layers: Count = Field(description="number of Transformer blocks")
    num_heads: Count = Field(description="attention heads; must divide hidden_size")
    intermediate_size: Width = Field(description="width of the feed-forward layer, in features")
    max_position_embeddings: Count = Field(description="longest text the model can read, in tokens")
    type_vocab_size: Count = Field(description="number of sentence types")
    hidden_dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation: Literal["gelu", "relu"] = "gelu"
    pooling: Literal["cls", "mean"] = "cls"
    projection_size: Width | None = None
    layer_norm_epsilon: float = Field(1e-12, gt=0, le=1e-3)
    initializer_range: float = Field(0.02, gt=0)
    init_from: UserPath | None = None
    query_prompt: str = Field("", max_length=10_000)
    document_prompt: str = Field("", max_length=10_000)

    @property
    def prompts(self) -> tuple[str, str]:
        """That of queries and that of documents."""
        return self.query_prompt, self.document_prompt

    @property
    def is_own(self) -> bool:
        """Whether it is a Layer of the user's."""
        return ":" in self.name

    @staticmethod
    def complete(given: dict[str, Any]) -> dict[str, Any]:
        """Fill in the dimensions of the preset; dimensions in the file override them."""
        if ":" in str(given.get("name", "")):
            return {**_OWN_MODEL, **given}
        preset = given.get("preset")
        return {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given
