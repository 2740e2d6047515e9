"""In training on a CPU nothing is computed for padding, and the numbers stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_recompute import RecomputeConfig, apply_recompute
from paddle_recompute.app.encoder import ernie
from tests.app.encoder.test_attention import made
from tests.app.retrieval.pretrained import KINDS, model_of
from tests.bits import assert_same_bits
from tests.fake_device import selected

on_cpu = pytest.mark.skipif(selected.is_selected(), reason="a device computes padding like tokens")
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
# Another number of rows of a matrix product, and of terms of a sum that were 0: float32 rounds
# elsewhere. Measured over all kinds: at most 3e-6.
TOLERANCE: dict[str, float] = {"rtol": 2e-5, "atol": 2e-5}


def lengths_and_sides(kind: str, lengths: list[int], side: str) -> tuple[paddle.Tensor, Any]:
    """Ids of 7 columns with padding at this side, and their mask."""
    ids = np.random.default_rng(1).integers(5, 12, [len(lengths), 7])
    mask = np.arange(7) < np.array(lengths)[:, None]
    mask = mask if side == "right" else mask[:, ::-1]
    ids[~mask] = model_of(kind).pad_token_id
    return paddle.to_tensor(ids), paddle.to_tensor(mask.astype("int64"))


def step(model: paddle.nn.Layer, *inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    vectors = model(*inputs)
    (vectors * paddle.linspace(-1, 1, vectors.size).reshape(vectors.shape)).sum().backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"vectors": vectors.numpy(), **found}


@on_cpu
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_and_gradients_are_those_with_padding(
    kind: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text is full, one has a single token, one none, which is read as a full one."""
    ids, mask = lengths_and_sides(kind, [7, 1, 4, 0, 6], side)
    types = (ids > 8).astype("int64") if model_of(kind).type_vocab_size > 1 else None
    found = step(made(kind, **NO_DROPOUT), ids, types, mask)
    monkeypatch.setattr(ernie, "indices_of", lambda keep: None)
    wanted = step(made(kind, **NO_DROPOUT), ids, types, mask)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], **TOLERANCE, err_msg=name)


@on_cpu
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_a_batch_without_padding_has_the_same_bits(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the one row of sentence type 0: its gradient sums all tokens at once, not by rows."""
    ids, _ = lengths_and_sides(kind, [7] * 4, "right")
    found = []
    for replaced in (False, True):
        if replaced:
            monkeypatch.setattr(ernie, "indices_of", lambda keep: None)
        model = made(kind)
        paddle.seed(3)
        found.append(step(model, ids))
    for name in found[0].keys() - {"embeddings.token_type.weight"}:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


@pytest.mark.parametrize("is_recomputed", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("kind", ["bert", "mpnet", "qwen3"])
def test_the_layers_of_a_token_get_tokens_alone(kind: str, is_recomputed: bool) -> None:
    """In training on a CPU. In evaluation, whose encoders are exported, and on a device all."""
    ids, _ = lengths_and_sides(kind, [7, 1, 4], "right")
    model, shapes = made(kind), []
    model.encoder.layers[0].register_forward_pre_hook(
        lambda layer, inputs: shapes.append(list(inputs[0].shape))
    )
    if is_recomputed:
        apply_recompute(model, RecomputeConfig(checkpoints=["encoder.layers.*"]))
    model(ids)
    model.eval()
    model(ids)
    width = model_of(kind).hidden_size
    padded = [3, 7, width]
    assert shapes == [padded if selected.is_selected() else [12, width], padded]


@pytest.mark.parametrize("replaced", ["attention", "block", "encoder"])
def test_parts_of_paddle_in_the_encoder_get_padding(
    replaced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = lengths_and_sides("bert", [7, 1, 4], "right")
    model = made("bert", **NO_DROPOUT)
    block = paddle.nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0)
    if replaced == "attention":
        model.encoder.layers[1].self_attn = block.self_attn
    elif replaced == "block":
        model.encoder.layers[1] = block
    else:
        model.encoder = paddle.nn.TransformerEncoder(block, 1)
    found = step(model, ids, None, mask)
    model.clear_gradients()
    monkeypatch.setattr(ernie, "indices_of", lambda keep: None)
    assert_same_bits(found, step(model, ids, None, mask))


def test_the_blocks_have_the_arguments_of_paddle() -> None:
    """A mask may be missing, as in Paddle's."""
    encoder, x = made("bert", **NO_DROPOUT).encoder, paddle.randn([2, 5, 16])
    assert_same_bits(encoder(x), encoder(x, paddle.zeros([2, 1, 1, 5])))
    assert_same_bits(encoder.layers[0](x), encoder.layers[0](x, src_mask=None))
