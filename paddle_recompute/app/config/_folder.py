"""What the folder of a model says of it: architecture, dimensions, pooling, prompts, tokenizer.

A folder is a run, its ``checkpoint`` or ``best``, one checkpoint in them, or what Hugging Face,
sentence-transformers, PaddleNLP and ``export`` write. Only JSON is read, without Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from paddle_recompute._files import read_json
from paddle_recompute._run_folder import CHECKPOINTS, MANIFEST, checkpoints_in
from paddle_recompute.errors import ConfigError

OWN_KEY = "paddle_recompute"
"""In a ``config.json`` of ours: the section ``model``, and the digest of the vocabulary."""
_OF_TRAINING = ("hidden_dropout", "attention_dropout", "initializer_range")
"""Settings of ``model`` that are in no weight and no vector."""


class Architecture(NamedTuple):
    """In what an encoder differs from BERT.

    Attributes:
        first_position: The row of the position table for the first token.
        relative_buckets: Rows of a table of distances that is added to the scores.
        is_decoder: Causal, with RMSNorm, rotary positions, grouped heads and SwiGLU.
        has_bias: Whether the decoder's queries, keys and values have a bias.
        norms_heads: Whether it normalizes the queries and keys of each head.
    """

    first_position: int = 0
    relative_buckets: int = 0
    is_decoder: bool = False
    has_bias: bool = False
    norms_heads: bool = False


ARCHITECTURES = {
    "ernie": Architecture(),
    "bert": Architecture(),
    "distilbert": Architecture(),
    "roberta": Architecture(first_position=2),
    "xlm-roberta": Architecture(first_position=2),
    "mpnet": Architecture(first_position=2, relative_buckets=32),
    "qwen2": Architecture(is_decoder=True, has_bias=True),
    "qwen3": Architecture(is_decoder=True, norms_heads=True),
}
_SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("type_vocab_size", "initializer_range", "pad_token_id"),
)
_NAMES = {
    **dict(zip(_SAME, _SAME, strict=True)),
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""Ours and those of a BERT's ``config.json``."""
_DISTILBERT = {
    **_NAMES,
    **{"hidden_size": "dim", "num_layers": "n_layers", "num_heads": "n_heads"},
    **{"intermediate_size": "hidden_dim", "activation": "activation"},
    **{"hidden_dropout": "dropout", "attention_dropout": "attention_dropout"},
}
_OF_HEADS = ("num_key_value_heads", "head_dim", "rope_theta", "attention_dropout")
_DECODER = {
    **_NAMES,
    **dict(zip(_OF_HEADS, _OF_HEADS, strict=True)),
    "layer_norm_epsilon": "rms_norm_eps",
}
# What `config.json` need not say: BERT's defaults in `transformers`, which write all they change.
_NOT_SAID = {
    **{"activation": "gelu", "layer_norm_epsilon": 1e-12, "type_vocab_size": 2},
    **{"pad_token_id": 0, "max_position_embeddings": 512},
}
_NOT_SAID_OF: dict[str, dict[str, Any]] = {
    "distilbert": {"type_vocab_size": 0},
    "mpnet": {"type_vocab_size": 0, "pad_token_id": 1},
    "roberta": {"pad_token_id": 1},
    "xlm-roberta": {"pad_token_id": 1},
}
_NOT_SAID_OF_DECODERS = {
    **{"activation": "silu", "layer_norm_epsilon": 1e-6, "type_vocab_size": 0},
    **{"hidden_dropout": 0.0, "rope_theta": 10_000.0},
}
# The one value with which the layers here compute the same, besides null; all others are refused.
_ONLY = {
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "is_causal": True,
    "relative_attention_num_buckets": 32,
    "use_sliding_window": False,
    "rope_scaling": None,
    "rope_type": "default",
    "quantization_config": None,
}
_POOLINGS = {"cls": "first", "mean": "mean", "max": "max", "lasttoken": "last"}
_TOKENIZERS = ("tokenizer.json", "vocab.txt")
_SIDES = {"query_prompt": ("query",), "document_prompt": ("document", "passage", "corpus")}


@dataclass
class ModelFolder:
    """What is known of a model without its weights.

    Attributes:
        weights: The file or folder of its weights.
        said_in: The file that describes it.
        settings: Of the section ``model``.
        assumed: The same, of which the folder says nothing and a configuration may choose another.
        dense: Layers beside the encoder: the name of ours, and the folder with its weights.
        limits: Where queries and documents are cut, in tokens; None: not said.
        vocabulary: The digest of the vocabulary that the weights were trained with; "": not said.
    """

    weights: Path
    said_in: Path
    settings: dict[str, Any]
    assumed: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, Path] = field(default_factory=dict)
    limits: tuple[int, int] | None = None
    vocabulary: str = ""

    def completed(self, given: dict[str, Any]) -> dict[str, Any]:
        """`given`, the section ``model``, with what the folder says.

        Raises:
            ConfigError: They contradict each other.
        """
        faults = [
            f"model.{key} is {given[key]!r}, and {self.said_in} says {there!r}"
            for key, there in self.settings.items()
            if key not in _OF_TRAINING and given.get(key, there) != there
        ]
        if faults:
            raise ConfigError(
                f"{'; '.join(faults)}. The weights belong to that; "
                "remove the setting from the configuration"
            )
        return {**self.assumed, **self.settings, **given}


def tokenizer_beside(path: Path) -> Path | None:
    """The tokenizer in the folder of a model, or in the folder of a file of weights."""
    found = model_folder(path)
    places = [path if path.is_dir() else path.parent]
    if found is not None:
        places.insert(0, found.said_in.parent)
    files = (place / name for place in places for name in _TOKENIZERS)
    return next((file for file in files if file.is_file()), None)


def model_folder(path: Path) -> ModelFolder | None:
    """What is said of the model in `path`; None: nothing is, it is a file of weights alone.

    Args:
        path: A folder, or a file of weights in it.

    Raises:
        ConfigError: A file of it cannot be read, or it needs something that is not supported.
    """
    if not path.exists():
        return None
    folder = path if path.is_dir() else path.parent
    if path.is_dir() and (found := newest_checkpoint(path)) is not None:
        folder = found
    if (folder / MANIFEST).is_file():
        told = _tree(folder / "state.json").get("config")
        if not isinstance(told, dict) or not isinstance(told.get("model"), dict):
            raise ConfigError(f"{folder / 'state.json'}: is damaged (it has no configuration)")
        weights = folder / "model.safetensors"
        return ModelFolder(weights, folder / "state.json", _of_weights(told["model"]))
    modules = _modules(folder)
    inner = folder / modules[0][0] if modules else folder
    for file in (inner / "config.json", inner / "model_config.json"):
        if file.is_file():
            break
    else:
        return None
    tree = _tree(file)
    weights = path if path.is_file() else inner
    if isinstance(own := tree.get(OWN_KEY), dict):
        files = [file for kind in ("safetensors", "pdparams") for file in inner.glob(f"*.{kind}")]
        weights = path if path.is_file() or not files else files[0]
        try:
            query, document = own["limits"]
            return ModelFolder(
                *(weights, file, _of_weights(own["model"])),
                limits=(int(query), int(document)),
                vocabulary=str(own["vocabulary"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"{file}: is damaged ({error!r:.200})") from error
    described = ModelFolder(weights, file, {})
    _settings(tree, file, described)
    _add_modules(described, folder, modules)
    return described


def _of_weights(section: dict[str, Any]) -> dict[str, Any]:
    """What of a section ``model`` is true of the weights that it has made."""
    unused = {"init_from", "preset", "positive_from", "frozen", "resize_embeddings"}
    if section.get("resize_embeddings"):
        unused.add("vocab_size")  # it is that of the tokenizer now
    if section.get("towers") == "shared":
        unused.add("towers")  # two may start from it
    given = {name: value for name, value in section.items() if value is not None}
    return {name: value for name, value in given.items() if name not in unused}


def newest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint that `path` is or holds: a run, its ``checkpoint`` or ``best``."""
    if (path / MANIFEST).is_file():
        return path
    found = checkpoints_in(path / CHECKPOINTS) or checkpoints_in(path)
    return found[0][1] if found else None


def _settings(tree: dict[str, Any], file: Path, found: ModelFolder) -> None:
    """Put what a ``config.json`` says of the section ``model`` into `found`."""
    inner = tree.get("init_args")  # model_config.json of PaddleNLP 2
    if isinstance(inner, list | tuple) and inner and isinstance(inner[0], dict):
        tree = {**inner[0], **tree}
    kind = _kind(tree)
    if kind not in ARCHITECTURES:
        raise ConfigError(
            f"{file}: describes a model of the type {kind or 'that it does not name'}; allowed are "
            f"{', '.join(ARCHITECTURES)}. For another one, wrap its Layer (model.name: "
            "package.module:Class)"
        )
    of_kind = ARCHITECTURES[kind]
    rope = tree.get("rope_parameters") or {}
    tree = {**rope, **tree}
    faults = [
        f"{n} is {tree[n]!r}" for n, allowed in _ONLY.items() if tree.get(n) not in (None, allowed)
    ]
    settings = {o: tree[t] for o, t in names_there(kind).items() if tree.get(t) is not None}
    settings["name"] = kind
    of_decoder = _NOT_SAID_OF_DECODERS if of_kind.is_decoder else {}
    not_said = {**_NOT_SAID, **_NOT_SAID_OF.get(kind, {}), **of_decoder}
    pad = settings.get("pad_token_id", not_said["pad_token_id"])
    if any(layer_type != "full_attention" for layer_type in tree.get("layer_types") or ()):
        faults.append("layer_types has other layers than full_attention")
    if kind in ("roberta", "xlm-roberta") and pad == 0 and "cls_token_id" in tree:
        settings["name"] = "bert"  # PaddleNLP's RoBERTa of BERT's vocabulary counts from 0
    elif of_kind.first_position and pad != of_kind.first_position - 1:
        faults.append(f"pad_token_id is {pad}, from which positions count")
    if of_kind.is_decoder:
        # A Qwen ends a text with what it pads with. Padding is masked, so any row does that no
        # text has; the last one is that of no token, or of a special one.
        settings["pad_token_id"] = settings.get("vocab_size", 1) - 1
        not_said["num_key_value_heads"] = heads = settings.get("num_heads", 1)
        not_said["head_dim"] = settings.get("hidden_size", 1) // heads
    activation = settings.get("activation", not_said["activation"])
    if activation not in ("gelu", "relu", "silu"):
        faults.append(f"its activation is {activation}")
    if faults:
        raise ConfigError(f"{file}: {'; '.join(faults)}; the encoder here does not compute that")
    found.settings, found.assumed = settings, not_said


def names_there(kind: str) -> dict[str, str]:
    """The names of our settings in the ``config.json`` of an architecture."""
    if ARCHITECTURES[kind].is_decoder:
        return _DECODER
    return _DISTILBERT if kind == "distilbert" else _NAMES


def _kind(tree: dict[str, Any]) -> str:
    """The type of a model; PaddleNLP may name only its class, such as ErnieModel."""
    if isinstance(kind := tree.get("model_type"), str):
        return kind
    names = [*(tree.get("architectures") or ()), tree.get("init_class") or ""]
    spelled = {name.replace("-", ""): name for name in ARCHITECTURES}
    found = [
        kind
        for plain, kind in spelled.items()
        if any(str(name).lower().startswith(plain) for name in names)
    ]
    return found[0] if found else " ".join(map(str, names)).strip()


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Path and class of each module of sentence-transformers; none without ``modules.json``."""
    file = folder / "modules.json"
    if not file.is_file():
        return []
    try:
        found = [
            (str(module["path"]), str(module["type"]).rpartition(".")[2])
            for module in read_json(file)
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file}: cannot be read ({str(error)[:200]})") from error
    kinds = [kind for _, kind in found]
    dense = kinds.count("Dense")
    if kinds not in (
        ["Transformer", "Pooling", *["Dense"] * dense, *normalize]
        for normalize in ([], ["Normalize"])
    ):
        raise ConfigError(
            f"{file}: has the modules {', '.join(kinds)}; allowed are Transformer, Pooling, Dense, "
            "Normalize, in this order"
        )
    if any(Path(path).is_absolute() or ".." in Path(path).parts for path, _ in found):
        raise ConfigError(f"{file}: names a folder outside of {folder}")
    return found


def _add_modules(found: ModelFolder, folder: Path, modules: list[tuple[str, str]]) -> None:
    """What the files of sentence-transformers say, and those of its tokenizer."""
    inner, settings, faults = found.said_in.parent, found.settings, []
    limits = [_tree(inner / "tokenizer_config.json", {}).get("model_max_length")]
    of_texts = _tree(inner / "sentence_bert_config.json", {})
    limits.insert(0, of_texts.get("max_seq_length"))
    longest = settings.get("max_position_embeddings", 512)
    longest -= ARCHITECTURES[settings["name"]].first_position
    said = next((int(limit) for limit in limits if isinstance(limit, int | float)), longest)
    found.limits = (min(said, longest), min(said, longest))
    if of_texts.get("do_lower_case"):
        faults.append("sentence_bert_config.json: do_lower_case is true")
    if not modules and not faults:
        is_decoder = ARCHITECTURES[settings["name"]].is_decoder
        found.assumed["pooling"] = "last" if is_decoder else "mean"  # as sentence-transformers
    for path, kind in modules[1:]:
        told = _tree(folder / path / "config.json", {})
        if kind == "Pooling":
            modes = told.get("pooling_mode") or [
                name.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens")
                for name, on in told.items()
                if name.startswith("pooling_mode_") and on is True
            ]
            modes = [modes] if isinstance(modes, str) else list(modes)
            if len(modes) != 1 or modes[0] not in _POOLINGS:
                faults.append(f"{path}: its pooling is {' and '.join(map(str, modes)) or 'none'}")
                continue
            settings["pooling"] = _POOLINGS[modes[0]]
            if told.get("include_prompt") is False:
                faults.append(f"{path}: include_prompt is false")
        elif kind == "Dense":
            faults += _add_dense(found, folder / path, told)
    told = _tree(folder / "config_sentence_transformers.json", {})
    prompts = told.get("prompts") or {}
    default = prompts.get(told.get("default_prompt_name")) or ""
    for name, sides in _SIDES.items():
        if text := next((prompts[side] for side in sides if side in prompts), default):
            settings[name] = text
    has_length = bool(modules) and modules[-1][1] != "Normalize"
    similarity = told.get("similarity_fn_name") or "cosine"
    if similarity != "cosine" and has_length:
        faults.append(f"its similarity is {similarity} of vectors that are not normalized")
    if faults:
        raise ConfigError(f"{folder}: {'; '.join(faults)}; the encoder here does not compute that")


def _add_dense(found: ModelFolder, folder: Path, told: dict[str, Any]) -> list[str]:
    settings = found.settings
    activation = str(told.get("activation_function", "")).rpartition(".")[2]
    sizes = (told.get("in_features"), told.get("out_features"))
    width = settings.get("hidden_size")
    if (
        settings.get("pooling") == "first"
        and (activation, *sizes) == ("Tanh", width, width)
        and told.get("bias", True)
    ):
        settings["pooling"] = "cls"
        found.dense["pooler.dense"] = folder
        return []
    if activation not in ("Identity", "Tanh") or "projection" in found.dense:
        return [f"{folder.name}: a Dense with the activation {activation}, or a second one"]
    settings["projection_size"] = sizes[1]
    if activation == "Tanh":
        settings["projection_activation"] = "tanh"
    found.dense["projection"] = folder
    return []


def _tree(file: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not file.is_file():
        return missing
    try:
        tree = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({str(error)[:200]})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must hold a JSON object")
    return tree
