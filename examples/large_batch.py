"""A batch of any size in a loop of one's own: GradCache for the memory, GradientSync for the ranks.

python examples/large_batch.py                               # one process
fleetrun --nproc_per_node 2 examples/large_batch.py          # two ranks
python examples/large_batch.py --pairs 8192 --chunk-tokens 2048 --steps 5

Copy it and put in your own encoder and batches. It learns a made-up translation, letter by letter,
from texts of 4 to 24 letters, and needs no data and no GPU. Whatever --pairs is, the activations
in memory are those of --chunk-tokens tokens; the gradients are those of the whole batch, of all
ranks, and are sent while the last chunk is still in its backward.
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_recompute import ContrastiveLoss, GradCache, GradientSync
from paddle_recompute.distributed import broadcast_from_rank0

NUM_LETTERS, LONGEST, WIDTH = 30, 24, 64


class Encoder(paddle.nn.Layer):
    """Ids ``[batch, length]``, int64, 0 where there is padding, to vectors ``[batch, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = paddle.nn.Embedding(2 * NUM_LETTERS + 1, WIDTH)
        self.places = paddle.nn.Embedding(LONGEST, WIDTH)
        block = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1)
        self.blocks = paddle.nn.TransformerEncoder(block, 2)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        is_letter = (ids != 0).astype("float32")
        hidden = self.letters(ids) + self.places(paddle.arange(ids.shape[1]))
        mask = (is_letter - 1).unsqueeze([1, 2]) * 1e4  # padding is masked
        hidden = self.blocks(hidden, mask) * is_letter.unsqueeze(-1)
        return hidden.sum(axis=1) / is_letter.sum(axis=1, keepdim=True)


def make_batch(random: np.random.Generator, pairs: int) -> list[paddle.Tensor]:
    """Texts, and their translations: the letter n becomes n + NUM_LETTERS, in reverse order."""
    query, positive = np.zeros([2, pairs, LONGEST], np.int64)
    for row, length in enumerate(random.integers(4, LONGEST + 1, pairs)):
        text = random.integers(1, NUM_LETTERS + 1, length)
        query[row, :length], positive[row, :length] = text, text[::-1] + NUM_LETTERS
    return [paddle.to_tensor(query), paddle.to_tensor(positive)]


def main() -> None:
    """Train, and say what each step did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1024, help="in a step, over all ranks")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="encoded at once by a rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    settings = parser.parse_args()

    dist.init_parallel_env()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own_pairs = settings.pairs // num_ranks

    model = Encoder()
    broadcast_from_rank0(model)
    loss = ContrastiveLoss(0.07, learnable_temperature=True, tile=512, normalize=True)
    trained = [*model.parameters(), *loss.parameters()]
    optimizer = paddle.optimizer.AdamW(
        settings.learning_rate,
        parameters=trained,
        apply_decay_param_fun=lambda name: name != loss.logit_scale.name,
    )
    cache = GradCache(model, loss, chunk_tokens=settings.chunk_tokens, sync=GradientSync(trained))

    random = np.random.default_rng(rank)  # every rank has pairs of its own
    for step in range(1, settings.steps + 1):
        own_loss = cache.backward(*make_batch(random, own_pairs))
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        if rank == 0:  # the loss of its own pairs; the gradient was that of all pairs
            print(
                f"step {step}  loss {float(own_loss):.4f}  temperature {loss.temperature:.4f}  "
                f"chunks {cache.num_chunks}",
                flush=True,
            )


if __name__ == "__main__":
    main()
