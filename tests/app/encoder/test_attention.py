"""The attention core: Paddle's numbers, a name for `keep`, flash attention on some devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle.nn import MultiHeadAttention

from paddle_recompute import RecomputeConfig, apply_recompute
from paddle_recompute._paddle import memory
from paddle_recompute._paddle.version import paddle_version
from paddle_recompute.app.encoder import attention, build_model, ernie
from paddle_recompute.app.encoder.attention import AttentionCore, SelfAttention
from paddle_recompute.recompute import undo_recompute
from tests.app.retrieval.pretrained import KINDS, model_of

ENCODERS = [kind for kind in KINDS if not kind.startswith("qwen")]
ATTEND = ["encoder.layers.*.self_attn.attend"]
FORMS = ["dygraph", "compiled", "static"]
PADDLES = {
    SelfAttention: MultiHeadAttention,
    ernie.Block: paddle.nn.TransformerEncoderLayer,
    ernie.Blocks: paddle.nn.TransformerEncoder,
}


def ids_of(kind: str, rows: int = 3) -> np.ndarray[Any, Any]:
    ids = np.random.default_rng(1).integers(5, 12, [rows, 7])
    ids[1, 4:] = model_of(kind).pad_token_id
    return ids


def made(kind: str, is_paddles: bool = False, **changes: Any) -> paddle.nn.Layer:
    """In training, from the seed; with Paddle's own attention and blocks if `is_paddles`."""
    paddle.seed(5)
    with paddle.utils.unique_name.guard():
        model = build_model(model_of(kind, **changes), 16)
    for layer in model.sublayers() if is_paddles else ():
        layer.__class__ = PADDLES.get(type(layer), type(layer))
    return model


def trained(model: paddle.nn.Layer, kind: str, autocast: bool = False) -> dict[str, bytes]:
    """The output and the gradients of one step."""
    paddle.seed(7)
    with paddle.amp.auto_cast(autocast, level="O1", dtype="bfloat16"):
        vectors = model(paddle.to_tensor(ids_of(kind)))
    vectors.square().sum().backward()
    found = {p.name: p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None}
    model.clear_gradients()
    return {"vectors": vectors.numpy().tobytes(), **found}


def trained_static(kind: str, is_paddles: bool) -> dict[str, bytes]:
    paddle.enable_static()
    try:
        main, startup = paddle.static.Program(), paddle.static.Program()
        scope = paddle.static.Scope()
        main.random_seed = startup.random_seed = 3
        with paddle.static.scope_guard(scope), paddle.static.program_guard(main, startup):
            model = made(kind, is_paddles)
            vectors = model(paddle.static.data("ids", [-1, -1], "int64"))
            pairs = paddle.static.append_backward(vectors.square().sum())
            wanted = [vectors, *(gradient for _, gradient in pairs if gradient is not None)]
            executor = paddle.static.Executor()
            executor.run(startup)
            found = executor.run(main, feed={"ids": ids_of(kind)}, fetch_list=wanted)
        return {str(number): one.tobytes() for number, one in enumerate(found)}
    finally:
        paddle.disable_static()


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place':UserWarning")  # Paddle 3's own
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["bert", "distilbert", "mpnet"])
def test_it_computes_the_bits_of_paddle(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout in the scores and elsewhere, and padding computed as Paddle does."""
    monkeypatch.setattr(ernie, "indices_of", lambda keep: None)
    if form == "static":
        assert trained_static(kind, False) == trained_static(kind, True)
        return
    ours, paddles = made(kind), made(kind, is_paddles=True)
    assert type(ours.encoder.layers[0].self_attn) is SelfAttention
    assert {n: p.name for n, p in ours.named_parameters()} == {
        n: p.name for n, p in paddles.named_parameters()
    }
    if form == "compiled":
        ours, paddles = (paddle.jit.to_static(one, full_graph=True) for one in (ours, paddles))
    found = trained(ours, kind)
    assert found == trained(paddles, kind)
    assert len(found) > 30


@pytest.mark.skipif(paddle.get_device() == "cpu", reason="without effect on a CPU")
def test_it_casts_as_paddle_does() -> None:
    assert trained(made("bert"), "bert", True) == trained(
        made("bert", is_paddles=True), "bert", True
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_encoder_has_a_name_for_keep(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second forward does not attend, and the bits are those of the plain step."""
    calls = []
    plain = AttentionCore.attend

    def attend(*given: Any) -> paddle.Tensor:
        calls.append("attend")
        return plain(*given)

    monkeypatch.setattr(AttentionCore, "attend", attend)
    model = made(kind)
    wanted, count = trained(model, kind), len(calls)
    config = RecomputeConfig(checkpoints=["encoder.layers.*"], keep=["**.self_attn.attend"])
    assert apply_recompute(model, config).kept == tuple(
        f"encoder.layers.{number}.self_attn.attend" for number in range(count)
    )
    assert trained(model, kind) == wanted
    assert len(calls) == 2 * count == 4
    undo_recompute(model)


@pytest.mark.skipif(paddle_version() < (3, 0), reason="a transposed tensor is a copy on 2.6")
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_what_is_kept_of_it(kind: str) -> None:
    """The plain form keeps its output, the scaled queries and the weights; keys and values lie in
    its arguments.
    """
    rows, length, layers = 16, 7, 2
    model, ids = made(kind, attention_dropout=0.0), paddle.to_tensor(ids_of(kind, rows))
    kept = []
    for keep in ([], ATTEND):
        apply_recompute(model, RecomputeConfig(checkpoints=["encoder.layers.*"], keep=keep))
        before = memory.current_bytes()
        vectors = model(ids)
        kept.append(memory.current_bytes() - before)
        del vectors
        undo_recompute(model)
    heads, dim = model_of(kind).num_heads, model.encoder.layers[0].self_attn.head_dim
    states, weights = rows * length * heads * dim * 4, rows * heads * length * length * 4
    assert kept[1] - kept[0] == pytest.approx(layers * (2 * states + weights), rel=0.02)


# -------------------------------------------------------------------------------- flash attention

HALF = {"dtype": "float16", "head_dim": 64}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float32"}, False),
        ({"dtype": "float64"}, False),
        ({"device": "cpu"}, False),
        ({"device": "fake_device:0"}, False),
        ({"device": "xpu:0"}, False),
        ({"capability": (7, 5)}, False),
        ({"version": (3, 2, 9)}, False),
        ({"version": (2, 6, 2)}, False),
        ({"head_dim": 60}, False),
        ({"head_dim": 264}, False),
        ({"dropout": 0.1}, False),
        ({"dropout": 0.1, "training": False}, True),
        ({"learns_scores": True, "training": False}, False),
    ],
)
def test_where_flash_attention_computes_it(
    changes: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        **{"dtype": "float16", "device": "gpu:0", "capability": (8, 0), "version": (3, 3, 0)},
        **{"head_dim": 64, "dropout": 0.0, "training": True, "learns_scores": False},
        **changes,
    }
    attention._has_flash_attention.cache_clear()
    monkeypatch.setattr(paddle, "get_device", lambda: given["device"])
    monkeypatch.setattr(attention, "paddle_version", lambda: given["version"])
    asked = lambda device: given["capability"]  # noqa: E731
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", asked)
    core = AttentionCore()
    for name in ("head_dim", "dropout", "training", "learns_scores"):
        setattr(core, name, given[name])
    query = paddle.empty([1, 2, 2, 8], dtype=given["dtype"])
    assert core.is_fused(query) == expected
    attention._has_flash_attention.cache_clear()


def test_which_encoders_learn_what_is_added_to_the_scores() -> None:
    learning = {
        kind: {one.learns_scores for one in made(kind).sublayers() if hasattr(one, "attend")}
        for kind in KINDS
    }
    assert learning == {kind: {kind == "mpnet"} for kind in KINDS}


@pytest.mark.skipif(paddle_version() < (3, 3), reason="it computes it on GPUs only")
@pytest.mark.parametrize("form", ["dygraph", "compiled"])
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_the_fused_form_computes_the_same(
    kind: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the operators that Paddle takes for ``scaled_dot_product_attention`` on a CPU."""
    wanted = made(kind, attention_dropout=0.0, hidden_dropout=0.0)
    vectors = wanted(paddle.to_tensor(ids_of(kind)))
    vectors.square().sum().backward()
    calls = []
    fused = attention.scaled_dot_product_attention

    def called(*given: Any, **more: Any) -> paddle.Tensor:
        calls.append("fused")
        return fused(*given, **more)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", called)
    monkeypatch.setattr(AttentionCore, "is_fused", paddle.jit.not_to_static(lambda *_: True))
    model = made(kind, attention_dropout=0.0, hidden_dropout=0.0)
    config = RecomputeConfig(checkpoints=["encoder.layers.*"], keep=ATTEND)
    apply_recompute(model, config)
    run = paddle.jit.to_static(model, full_graph=True) if form == "compiled" else model
    found = run(paddle.to_tensor(ids_of(kind)))
    found.square().sum().backward()
    assert calls == ["fused"] * 2
    np.testing.assert_allclose(found.numpy(), vectors.numpy(), rtol=0, atol=2e-6)
    for ours, theirs in zip(model.parameters(), wanted.parameters(), strict=True):
        if theirs.grad is not None:  # of both, in another order of additions
            scale = float(theirs.grad.abs().max())
            np.testing.assert_allclose(
                ours.grad.numpy(), theirs.grad.numpy(), rtol=0, atol=1e-5 * max(1.0, scale)
            )
