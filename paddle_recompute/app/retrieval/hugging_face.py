"""A trained encoder as a folder that `transformers` and `sentence-transformers` load."""

from __future__ import annotations

from pathlib import Path

import safetensors.numpy

from paddle_recompute._files import new_folder, write_json
from paddle_recompute.app.encoder import hugging_face_config
from paddle_recompute.app.retrieval.trained import TrainedEncoder
from paddle_recompute.errors import ConfigError
from paddle_recompute.weights import save_weights

_SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_MODULES = "sentence_transformers.models"
_TANH = "torch.nn.modules.activation.Tanh"
_IDENTITY = "torch.nn.modules.linear.Identity"
_POOLINGS = {
    "cls": "cls_token",
    "first": "cls_token",
    "mean": "mean_tokens",
    "max": "max_tokens",
    "last": "lasttoken",
}


def write_hugging_face(encoder: TrainedEncoder, folder: str | Path) -> None:
    """Write model and tokenizer for Hugging Face, and how its text vector is computed.

    ``AutoModel`` and ``AutoTokenizer`` load them. ``SentenceTransformer(folder).encode`` has the
    vectors of `encode_texts`: pooling, the dense layer of the pooler, the projection and the
    normalisation are its modules, and it has the prompts of both sides.

    Raises:
        ConfigError: The model is a Layer of the user's own.
        OutputError: `folder` exists, or cannot be written.
    """
    config = encoder.config
    if config.is_own:
        raise ConfigError(
            f"{encoder.folder}: its model is {config.name}, which `transformers` does not know"
        )
    with new_folder(Path(folder)) as new:
        save_weights(encoder.model, new / "model.safetensors", to="huggingface")
        write_description(encoder, new)


def write_description(encoder: TrainedEncoder, new: Path) -> None:
    """Write all files of `write_hugging_face` but the weights."""
    config = encoder.config
    state = {name: tensor.numpy() for name, tensor in encoder.model.state_dict().items()}
    rows = len(state["embeddings.word.weight"])
    write_json(new / "config.json", hugging_face_config(config, rows))
    encoder.tokenizer.save_for_others(new / "tokenizer.json", encoder.longest("document"))
    known = encoder.tokenizer.special_tokens
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": encoder.longest("document"),
        "split_special_tokens": True,  # a text [SEP] is ordinary text
        "clean_up_tokenization_spaces": False,
        **{key: token for key, token in _SPECIAL.items() if token in known},
        "pad_token": encoder.tokenizer.pad_token,
    }
    write_json(new / "tokenizer_config.json", tokenizer)
    write_json(new / "sentence_bert_config.json", {"max_seq_length": encoder.longest("document")})
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    pooling: dict[str, int | bool] = {"word_embedding_dimension": config.hidden_size}
    for mode in _POOLINGS.values():
        pooling[f"pooling_mode_{mode}"] = mode == _POOLINGS[config.pooling]
    write_json(new / "1_Pooling" / "config.json", pooling)
    of_projection = _TANH if config.projection_activation == "tanh" else _IDENTITY
    for name, activation in (("pooler.dense", _TANH), ("projection", of_projection)):
        if f"{name}.weight" not in state:
            continue
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        path = f"{len(modules)}_Dense"
        modules.append((path, "Dense"))
        dense = {
            "in_features": weight.shape[0],
            "out_features": weight.shape[1],
            "bias": True,
            "activation_function": activation,
        }
        write_json(new / path / "config.json", dense)
        of_torch = {"linear.weight": weight.T.copy(), "linear.bias": bias}
        written = safetensors.numpy.save(of_torch, {"format": "pt"})
        (new / path / "model.safetensors").write_bytes(written)
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    (new / modules[-1][0]).mkdir()
    entries = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    write_json(new / "modules.json", entries)
    # encode_query and encode_document of sentence-transformers put them before the texts.
    write_json(new / "config_sentence_transformers.json", {"prompts": encoder.prompts})
