"""The section ``model``: the encoder and its published sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from paddle_recompute.app.config._section import Section, Values
from paddle_recompute.app.config._types import Count, Probability, UserPath, Width
from paddle_recompute.options import Fault

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


_NAME = r"^(ernie|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"

# A Layer of the user's has no dimensions that are known here. These stand for them.
_OWN_MODEL: dict[str, int] = {
    "hidden_size": 1,
    "num_layers": 1,
    "num_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1_000_000,
    "type_vocab_size": 1,
}
_FOR_OWN_MODELS = (
    "name",
    "options",
    "init_from",
    "vocab_size",
    "max_position_embeddings",
    "query_prompt",
    "document_prompt",
)


class ModelConfig(Section):
    """The encoder. A preset sets every dimension that is not given."""

    @staticmethod
    def _heads_divide(v: Values) -> Iterator[Fault]:
        hidden, heads = v["hidden_size"], v["num_heads"]
        if hidden % heads:
            yield Fault(
                "num_heads",
                heads,
                f"must divide hidden_size = {hidden}; the remainder is {hidden % heads}",
            )

    @staticmethod
    def _settings_are_of_the_model(v: Values) -> Iterator[Fault]:
        name = v["name"]
        if ":" not in name:
            if v["options"]:
                yield Fault("options", v["options"], "are of a model of your own; remove them")
            return
        for field, info in ModelConfig.model_fields.items():
            default = _OWN_MODEL.get(field, info.get_default(call_default_factory=True))
            if field not in _FOR_OWN_MODELS and v[field] != default:
                yield Fault(
                    field,
                    v[field],
                    f"is a setting of the ernie encoder and not known to {name}; if it has such an "
                    "argument, set it in model.options",
                )

    rules = (_heads_divide, _settings_are_of_the_model)
    completed_by = "preset"

    name: Annotated[str, Field(pattern=_NAME)] = Field(
        "ernie",
        description="the architecture: ernie, or a Layer of your own as package.module:Class, "
        "which gets ids [batch, length] and returns vectors [batch, dim]",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="arguments of a Layer of your own"
    )
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
        description="file with initial weights, .pdparams or .safetensors, or folder with "
        "model.safetensors.index.json, of this library, of PaddleNLP (Ernie, Bert) or Hugging Face "
        "(BERT); none: random weights",
    )

    query_prompt: str = Field(
        "", max_length=10_000, description="put before each query, such as 'query: '"
    )
    document_prompt: str = Field(
        "", max_length=10_000, description="put before each positive and negative"
    )

    @property
    def prompts(self) -> tuple[str, str]:
        """That of queries and that of documents."""
        return self.query_prompt, self.document_prompt

    @property
    def is_own(self) -> bool:
        """Whether it is a Layer of the user's."""
        return ":" in self.name

    @classmethod
    def complete(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Fill in the dimensions of the preset; dimensions in the file override them."""
        if ":" in str(given.get("name", "")):
            return {**_OWN_MODEL, **given}
        preset = given.get("preset")
        return {**PRESETS.get(preset, {}), **given} if isinstance(preset, str) else given
