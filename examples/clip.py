"""Images and words in one space (CLIP): two towers, GradCache, recompute, synchronized gradients.

python examples/clip.py                                      # one process, about a minute on a CPU
fleetrun --nproc_per_node 2 --backend gloo examples/clip.py  # two ranks on a CPU

The images are the handwritten digits that come with scikit-learn; each is paired with one of
several words for its digit, in English or German. The image tower is a ResNet-18 of paddle.vision,
the text tower a small Transformer over letters. The batch is encoded 64 rows at a time, in which
the blocks of both towers are recomputed. Retrieval is measured on images that were not trained on.
"""

from __future__ import annotations

import argparse

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.nn import functional as F
from sklearn.datasets import load_digits

from paddle_recompute import (
    ContrastiveLoss,
    GradCache,
    GradientSync,
    RecomputeConfig,
    apply_recompute,
)
from paddle_recompute.distributed import broadcast_from_rank0

WORDS = [
    ("zero", "null", "nought"), ("one", "eins", "single"), ("two", "zwei", "pair"),
    ("three", "drei", "triple"), ("four", "vier", "quartet"), ("five", "fuenf", "quintet"),
    ("six", "sechs", "sextet"), ("seven", "sieben", "septet"), ("eight", "acht", "octet"),
    ("nine", "neun", "nonet"),
]  # fmt: skip
LONGEST, WIDTH = 8, 64


class ImageTower(paddle.nn.Layer):
    """Images ``[batch, 1, 8, 8]`` to vectors ``[batch, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = paddle.vision.models.resnet18(num_classes=WIDTH)

    def forward(self, pixels: paddle.Tensor) -> paddle.Tensor:
        pixels = F.interpolate(pixels, size=[16, 16], mode="bilinear")
        return self.backbone(pixels.expand([-1, 3, -1, -1]))


class TextTower(paddle.nn.Layer):
    """Letters ``[batch, LONGEST]``, 0 where there is padding, to vectors ``[batch, WIDTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = paddle.nn.Embedding(27, WIDTH)
        self.places = paddle.nn.Embedding(LONGEST, WIDTH)
        block = paddle.nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1)
        self.blocks = paddle.nn.TransformerEncoder(block, 2)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        is_letter = (ids != 0).astype("float32")
        hidden = self.letters(ids) + self.places(paddle.arange(ids.shape[1]))
        hidden = self.blocks(hidden, (is_letter - 1).unsqueeze([1, 2]) * 1e4)
        return (hidden * is_letter.unsqueeze(-1)).sum(axis=1) / is_letter.sum(axis=1, keepdim=True)


def letters(words: list[str]) -> paddle.Tensor:
    """The places of the letters in the alphabet, from 1."""
    ids = np.zeros([len(words), LONGEST], np.int64)
    for row, word in enumerate(words):
        ids[row, : len(word)] = [ord(letter) - 96 for letter in word]
    return paddle.to_tensor(ids)


@paddle.no_grad()
def retrieval(image: ImageTower, text: TextTower, pixels: paddle.Tensor, digits: list[int]) -> str:
    """How often the best word for an image, and the best image for a word, has its digit."""
    image.eval()
    text.eval()
    names = [(word, digit) for digit, words in enumerate(WORDS) for word in words]
    scores = F.normalize(text(letters([word for word, _ in names])))
    scores = paddle.matmul(F.normalize(image(pixels)), scores, transpose_y=True).numpy()
    image.train()
    text.train()
    to_word = np.mean(
        [names[best][1] == d for best, d in zip(scores.argmax(1), digits, strict=True)]
    )
    to_image = np.mean(
        [digits[best] == d for best, (_, d) in zip(scores.argmax(0), names, strict=True)]
    )
    return f"image to word R@1 {to_word:.3f}  word to image R@1 {to_image:.3f}"


def main() -> None:
    """Train, and print the loss, and retrieval in both directions before and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=128, help="in a step, over all ranks")
    parser.add_argument("--chunk-size", type=int, default=64, help="rows encoded at once")
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    dist.init_parallel_env()
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    pixels = paddle.to_tensor((digits.images / 16).astype("float32")).unsqueeze(1)
    held_out = pixels[1500:], list(digits.target[1500:])

    paddle.seed(0)
    image, text = ImageTower(), TextTower()
    loss = ContrastiveLoss(
        temperature=0.07, learnable_temperature=True, normalize=True, mask_false_negatives=True
    )
    towers = paddle.nn.LayerDict({"image": image, "text": text, "loss": loss})
    broadcast_from_rank0(towers)
    report = apply_recompute(towers, RecomputeConfig())
    sync = GradientSync(towers)
    cache = GradCache((image, text), loss, chunk_size=options.chunk_size, sync=sync)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=towers.parameters())
    if rank == 0:
        print(report)
        print("before: ", retrieval(image, text, *held_out))
    random = np.random.default_rng(0)
    for step in range(1, options.steps + 1):
        rows = random.permutation(1500)[: options.pairs][rank::num_ranks]
        words = [WORDS[digits.target[row]][random.integers(3)] for row in rows]
        same = paddle.to_tensor(digits.target[rows].astype("int64"))  # words of one digit
        value = cache.backward(
            pixels[paddle.to_tensor(rows)], letters(words), loss_arguments={"positive_ids": same}
        )
        optimizer.step()
        optimizer.clear_grad()
        if rank == 0 and (step % 10 == 0 or step == 1):
            print(f"step {step:3d}  loss {float(value):.3f}", flush=True)
    report.verify()
    if rank == 0:
        print("after:  ", retrieval(image, text, *held_out))


if __name__ == "__main__":
    main()
