"""The section ``model``: the encoder and its published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from paddle_recompute.app.config._folder import ARCHITECTURES, Architecture, model_folder
from paddle_recompute.app.config._section import Broken, Section, Values, default_of, fault
from paddle_recompute.app.config._types import Count, Probability, UserPath, Width
from paddle_recompute.errors import ConfigError
from paddle_recompute.options import needs

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
    "towers",
    "positive_from",
    "frozen",
)


def _heads_divide(v: Values) -> Broken:
    hidden, heads = v["hidden_size"], v["num_heads"]
    if hidden % heads:
        yield "num_heads", f"must divide hidden_size = {hidden}; the remainder is {hidden % heads}"


def _settings_are_of_the_architecture(v: Values) -> Broken:
    name = v["name"]
    if ":" in name:
        return
    is_decoder = ARCHITECTURES[name].is_decoder
    for field in ("num_key_value_heads", "head_dim", "rope_theta"):
        if (v[field] is not None) != is_decoder:
            words = f"is required with name: {name}" if is_decoder else f"is not known to {name}"
            yield field, words
    if is_decoder and v["num_key_value_heads"] and v["num_heads"] % v["num_key_value_heads"]:
        yield "num_key_value_heads", f"must divide num_heads = {v['num_heads']}"
    if (v["activation"] == "silu") != is_decoder:
        yield "activation", "silu is that of the decoders, which have no other"
    if (first := ARCHITECTURES[name].first_position) and v["pad_token_id"] != first - 1:
        yield "pad_token_id", f"must be {first - 1}: {name} counts positions from behind it"
    if v["type_vocab_size"] and is_decoder:
        yield "type_vocab_size", f"must be 0: {name} has no sentence types"
    if v["pooling"] == "cls" and (is_decoder or name in ("mpnet", "distilbert")):
        yield "pooling", f"cls is BERT's pooler, which {name} does not have; first takes the token"


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
        name: The architecture, or a Layer of your own as package.module:Class, which gets
            ids [batch, length] and returns vectors [batch, dim].
        options: Arguments of a Layer of your own.
        preset: Published dimensions; dimensions that are given override them; None: all dimensions
            are required.
        vocab_size: Rows of the word embedding; None: the size of the tokenizer's vocabulary.
        hidden_size: Width of the encoder, in features.
        num_layers: Number of Transformer blocks.
        num_heads: Attention heads; must divide `hidden_size`.
        num_key_value_heads: Heads of the keys and values of a decoder; must divide `num_heads`.
        head_dim: Width of a head of a decoder, in features.
        rope_theta: Base of the rotary positions of a decoder.
        intermediate_size: Width of the feed-forward layer, in features.
        max_position_embeddings: Rows of the position table, which is the longest text the model
            can read, in tokens; RoBERTa and MPNet leave 2 of them empty.
        type_vocab_size: Number of sentence types; 0: none.
        pad_token_id: The id of padding; that of the tokenizer.
        hidden_dropout: Probability of dropping a hidden feature (published for ERNIE).
        attention_dropout: Probability of dropping an attention weight (published for ERNIE).
        activation: Activation function of the feed-forward layer.
        pooling: cls: first token, then BERT's dense layer and tanh; first, last: that token as it
            is; mean, max: of all tokens except padding.
        projection_size: Width of the text vector, in features; None: `hidden_size`, no projection.
        projection_activation: Behind the projection; None: none.
        layer_norm_epsilon: Added to a variance (ERNIE: 1e-12); Paddle takes no more than 1e-3.
        initializer_range: Standard deviation of the initial weights (published for ERNIE).
        init_from: Folder of a model: a run, a checkpoint, or of Hugging Face,
            sentence-transformers or PaddleNLP; what it says need not be given here. Or a file of
            weights, .pdparams or .safetensors; None: random weights.
        resize_embeddings: True: the word embedding of `init_from` gets a row for each entry that
            the tokenizer has more, drawn like other initial weights.
        towers: Shared: one encoder for all texts; separate: one for queries and one for positives
            and negatives, of the same architecture, both from `init_from`.
        positive_from: Folder of the weights of the positives' encoder, in place of `init_from`.
        frozen: The encoder that is not trained and has no dropout; None: both are trained.
        query_prompt: Put before each query, such as 'query: '.
        document_prompt: Put before each positive and negative.
    """

    rules = (
        _heads_divide,
        _settings_are_of_the_architecture,
        _settings_are_of_the_model,
        *needs("towers=separate", "positive_from", "frozen"),
        *needs("init_from", "positive_from"),
    )
    completed_by = "preset"

    name: str = Field(
        "ernie", pattern=rf"^({'|'.join(ARCHITECTURES)}|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$"
    )
    options: dict[str, Any] = Field(default_factory=dict)
    preset: Literal["tiny", "base", "large"] | None = None
    vocab_size: Count | None = None
    hidden_size: Width = Field(description="width of the encoder, in features")
    num_layers: Count = Field(description="number of Transformer blocks")
    num_heads: Count = Field(description="attention heads; must divide hidden_size")
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: float | None = Field(None, gt=0)
    intermediate_size: Width = Field(description="width of the feed-forward layer, in features")
    max_position_embeddings: Count = Field(description="longest text the model can read, in tokens")
    type_vocab_size: int = Field(ge=0, le=2**31 - 1, description="number of sentence types")
    pad_token_id: int = Field(0, ge=0, le=2**31 - 1)
    hidden_dropout: Probability = 0.1
    attention_dropout: Probability = 0.1
    activation: Literal["gelu", "relu", "silu"] = "gelu"
    pooling: Literal["cls", "first", "mean", "max", "last"] = "cls"
    projection_size: Width | None = None
    projection_activation: Literal["tanh"] | None = None
    layer_norm_epsilon: float = Field(1e-12, gt=0, le=1e-3)
    initializer_range: float = Field(0.02, gt=0)
    init_from: UserPath | None = None
    resize_embeddings: bool = False
    towers: Literal["shared", "separate"] = "shared"
    positive_from: UserPath | None = None
    frozen: Literal["query", "positive"] | None = None
    query_prompt: str = Field("", max_length=10_000)
    document_prompt: str = Field("", max_length=10_000)

    @property
    def prompts(self) -> tuple[str, str]:
        """The prompts of queries and of documents."""
        return self.query_prompt, self.document_prompt

    @property
    def is_own(self) -> bool:
        """Whether it is a Layer of the user's."""
        return ":" in self.name

    @property
    def architecture(self) -> Architecture:
        """In what it differs from BERT."""
        return ARCHITECTURES.get(self.name, Architecture())

    @property
    def max_tokens(self) -> int:
        """The longest text that it reads."""
        return self.max_position_embeddings - self.architecture.first_position

    def rows(self, vocab_size: int) -> int:
        """Rows of the word embedding, before they are resized.

        Args:
            vocab_size: Entries of the tokenizer.

        Raises:
            ConfigError: They are too few, or enough with `resize_embeddings`.
        """
        rows = self.vocab_size or vocab_size
        if rows < vocab_size and not self.resize_embeddings:
            advice = "remove model.vocab_size to use that size"
            if self.init_from is not None:
                advice = "model.resize_embeddings: true adds rows with random values"
            raise ConfigError(
                f"model.vocab_size: received {rows}; must be at least {vocab_size}, the size of "
                f"the tokenizer's vocabulary; {advice}"
            )
        if rows >= vocab_size and self.resize_embeddings:
            raise ConfigError(
                f"model.resize_embeddings: {rows} rows are enough for the {vocab_size} entries of "
                "the tokenizer; remove the setting"
            )
        return rows

    def without_weights(self) -> ModelConfig:
        """The same model from random weights, with all rows of its word embedding."""
        update: dict[str, Any] = {"init_from": None, "positive_from": None}
        if self.resize_embeddings:
            update |= {"resize_embeddings": False, "vocab_size": None}
        return self.model_copy(update=update)

    @staticmethod
    def complete(given: dict[str, Any]) -> dict[str, Any]:
        """Fill in what the preset and the folder of the weights say.

        Raises:
            ValidationError: The folder says something else than `given`, or cannot be used.
        """
        if ":" in str(given.get("name", "")):
            return {**_OWN_MODEL, **given}
        preset = given.get("preset")
        if isinstance(preset, str):
            given = {**PRESETS.get(preset, {}), **given}
        for name in ("init_from", "positive_from"):
            place = given.get(name)
            if not isinstance(place, str | Path):
                continue
            try:
                if (found := model_folder(Path(place).expanduser())) is not None:
                    if name == "positive_from" and found.settings.get("towers") == "separate":
                        raise ConfigError(
                            "holds two encoders, and one is needed; `paddle-recompute export` "
                            "writes each of them into a folder of its own"
                        )
                    given = found.completed(given)
                elif not Path(place).expanduser().exists() and "hidden_size" not in given:
                    raise ConfigError("there is no such file or folder")
            except ConfigError as error:
                words = str(error).replace("{", "{{").replace("}", "}}")
                raise ValidationError.from_exception_data(
                    "ModelConfig", [fault(name, words, place)]
                ) from error
        return given
