"""``model.towers: separate``: an encoder for queries, and one for positives and negatives.

References:
    Karpukhin et al., "Dense Passage Retrieval for Open-Domain Question Answering",
    arXiv:2004.04906; Qu et al., "RocketQA", arXiv:2010.08191.
"""

from __future__ import annotations

from typing import Literal

import paddle


class TwoTowers(paddle.nn.Layer):
    """Two encoders with weights of their own.

    Args:
        query: Of queries.
        positive: Of positives and negatives.
        frozen: The one that is not trained: it stays in evaluation mode, without dropout.
    """

    def __init__(
        self,
        query: paddle.nn.Layer,
        positive: paddle.nn.Layer,
        *,
        frozen: Literal["query", "positive"] | None = None,
    ) -> None:
        super().__init__()
        self.query, self.positive = query, positive
        self._frozen = frozen
        for parameter in getattr(self, frozen).parameters() if frozen is not None else ():
            parameter.stop_gradient = True

    def train(self) -> None:
        super().train()
        if self._frozen is not None:
            getattr(self, self._frozen).eval()


def encoder_of(model: paddle.nn.Layer, side: str) -> paddle.nn.Layer:
    """The encoder in `model` of the side ``query``, or of another one."""
    if not isinstance(model, TwoTowers):
        return model
    return model.query if side == "query" else model.positive


def encoders_of(model: paddle.nn.Layer) -> list[paddle.nn.Layer]:
    """All encoders in `model`, that of queries first."""
    return [model.query, model.positive] if isinstance(model, TwoTowers) else [model]
