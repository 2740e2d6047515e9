"""Small random models of PaddleNLP and PaddleFormers, each with a batch and its loss.

Both libraries check the network and print a great deal when they are imported. They come before
any Layer is built: PaddleNLP replaces classes of ``paddle.nn``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

ROWS, LENGTH, WORDS = 8, 64, 500


@dataclass(frozen=True)
class Case:
    """A model of a library.

    Attributes:
        library: The package.
        name: What the table calls it.
        config: Class of its configuration, and its arguments.
        model: Its class.
        decoder: Whether it wants ids for its decoder, too.
        after: Called with the model, before its first call.
    """

    library: str
    name: str
    config: tuple[str, dict[str, Any]]
    model: str
    decoder: bool = False
    after: Callable[[Any], Any] = field(default=lambda model: model)

    def build(self, *, use_cache: bool = False) -> paddle.nn.Layer:
        """The model with weights of seed 1, in training mode."""
        module = importlib.import_module(f"{self.library}.transformers")
        kind, arguments = self.config
        config = getattr(module, kind)(**arguments)
        paddle.seed(1)
        np.random.seed(1)
        if hasattr(config, "use_cache"):
            config.use_cache = use_cache
        model = self.after(getattr(module, self.model)(config))
        model.train()
        return model

    def batch(self) -> dict[str, paddle.Tensor]:
        """Random ids; a seq2seq model gets some for its decoder too."""
        ids = np.random.default_rng(0).integers(3, WORDS, (ROWS, LENGTH))
        batch = {"input_ids": paddle.to_tensor(ids, dtype="int64")}
        if self.decoder:
            batch["decoder_input_ids"] = paddle.to_tensor(ids[:, ::-1].copy(), dtype="int64")
        return batch


def loss_of(outputs: Any) -> paddle.Tensor:
    """The mean square of the first output, logits or hidden states."""
    while not isinstance(outputs, paddle.Tensor):
        outputs = outputs[0] if isinstance(outputs, (tuple, list)) else next(iter(outputs.values()))
    return outputs.astype("float32").square().mean()


def switch_own_recompute(model: Any) -> None:
    """Let the model recompute its blocks itself, with whatever fleet's recompute is now."""
    for layer in model.sublayers(include_self=True):
        if hasattr(layer, "enable_recompute"):
            layer.enable_recompute = True
        config = getattr(layer, "config", None)
        if hasattr(config, "to_dict") or hasattr(config, "recompute_granularity"):
            config.recompute = True
            config.recompute_granularity = "full"
            config.recompute_method = "uniform"
            config.recompute_num_layers = 1
            config.recompute_modules = None
            config.recompute_use_reentrant = True
    if hasattr(model, "recompute_enable"):
        model.recompute_enable()


def with_lora(model: Any) -> Any:
    """`model` with adapters of rank 4, and all else frozen."""
    peft = importlib.import_module("paddleformers.peft")
    config = peft.LoRAConfig(target_modules=[".*q_proj.*", ".*v_proj.*"], r=4, lora_alpha=8)
    model = peft.LoRAModel(model, config)
    model.mark_only_lora_as_trainable()
    return model


_BERT = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "max_position_embeddings": 128,
}
_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 192,
    "max_position_embeddings": 128,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def _nlp(name: str, config: dict[str, Any], model: str = "Model", **more: Any) -> Case:
    prefix = name.split(" ")[0]
    return Case("paddlenlp", name, (f"{prefix}Config", config), f"{prefix}{model}", **more)


def _formers(name: str, config: dict[str, Any], model: str = "Model", **more: Any) -> Case:
    prefix = name.split(" ")[0]
    given = {"fuse_rms_norm": False, "fuse_swiglu": False, "pad_token_id": 0, **config}
    return Case("paddleformers", name, (f"{prefix}Config", given), f"{prefix}{model}", **more)


PADDLENLP = [
    _nlp("Ernie", {**_BERT, "task_type_vocab_size": 3}),
    _nlp("Bert", _BERT),
    _nlp("Roberta", _BERT),
    _nlp("Electra", {**_BERT, "embedding_size": 64}),
    _nlp("Llama", {**_LLAMA, "use_flash_attention": False}),
    _nlp(
        "GPT",
        {**_BERT, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1},
    ),
    _nlp(
        "T5",
        {"vocab_size": WORDS, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4,
         "num_heads": 4, "feed_forward_proj": "relu"},
        decoder=True,
    ),
    _nlp(
        "Bart",
        {"vocab_size": WORDS, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128,
         "decoder_ffn_dim": 128, "max_position_embeddings": 128},
        decoder=True,
    ),
    _nlp(
        "Bloom",
        {"vocab_size": WORDS, "hidden_size": 64, "n_layer": 6, "n_head": 4,
         "use_flash_attention": False},
    ),
    _nlp(
        "ChatGLMv2",
        {"padded_vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 6,
         "ffn_hidden_size": 128, "num_attention_heads": 4, "kv_channels": 16, "seq_length": 128,
         "multi_query_group_num": 2},
    ),
    _nlp("Albert", {**_BERT, "embedding_size": 64, "num_hidden_groups": 1, "inner_group_num": 1}),
    _nlp("Mixtral", {**_LLAMA, "num_local_experts": 4, "use_flash_attention": False}),
    _nlp("OPT", {"vocab_size": WORDS, "hidden_size": 64, "num_hidden_layers": 6,
                 "num_attention_heads": 4, "intermediate_size": 256, "word_embed_proj_dim": 64,
                 "max_position_embeddings": 128}),
]  # fmt: skip

PADDLEFORMERS = [
    _formers("Llama", _LLAMA),
    _formers("Phi3", _LLAMA),
    _formers("Ernie4_5", _LLAMA),
    _formers("Gemma3Text", {**_LLAMA, "head_dim": 16, "sliding_window": 16}),
    _formers(
        "GptOss",
        {**_LLAMA, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
         "sliding_window": 16},
    ),
    _formers("Llama + LoRA", _LLAMA, after=with_lora),
    _formers("Qwen2", _LLAMA),
    _formers("Qwen3", {**_LLAMA, "head_dim": 16}),
    _formers("Qwen2Moe", {**_LLAMA, **_EXPERTS, "shared_expert_intermediate_size": 64}),
    _formers("Qwen3Moe", {**_LLAMA, **_EXPERTS, "head_dim": 16}),
    _formers(
        "Ernie4_5_Moe",
        {**_LLAMA, "moe_num_experts": 4, "moe_intermediate_size": 64, "moe_k": 2,
         "num_nextn_predict_layers": 0},
    ),
    _formers(
        "DeepseekV3",
        {**_LLAMA, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
         "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 16,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "rope_scaling": None},
    ),
    _formers(
        "Glm4Moe",
        {**_LLAMA, **_EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1,
         "first_k_dense_replace": 1},
    ),
]  # fmt: skip

CASES = {"paddlenlp": PADDLENLP, "paddleformers": PADDLEFORMERS}
