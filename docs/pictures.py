"""Draw the pictures of the documentation: `python docs/pictures.py` writes docs/pictures/*.svg.

Each function draws one picture in coordinates of pixels, origin at the top left. Its words are
English; `CHINESE` has them for the second file. Pictures of measurements are not drawn here: they
come from `benchmarks/`.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "pictures"

INK, PALE, FRAME = "#263238", "#607d8b", "#cfd8dc"
BLUE, ORANGE, GREEN, GREY = "#90caf9", "#ffb74d", "#a5d6a7", "#eceff1"
FONT = "system-ui, 'Noto Sans CJK SC', 'Microsoft YaHei', sans-serif"

CHINESE = {
    "memory": "内存",
    "time of one step": "一步的时间",
    "forward": "前向",
    "backward": "反向",
    "without recompute: all activations wait for the backward": (
        "不做重计算：所有激活值一直留到反向"
    ),
    "with recompute: the inputs of the blocks wait": "做重计算：只保留各个模块的输入",
    "peak": "峰值",
    "second forward of a block": "模块的第二次前向",
    "parameters, gradients, optimizer state": "参数、梯度、优化器状态",
    "1  encode, without a graph": "1  逐块编码，不建图",
    "2  the loss of all vectors": "2  全部向量的损失",
    "3  encode again, with a graph": "3  再次逐块编码，建图",
    "encoder": "编码器",
    "vectors": "向量",
    "scores": "分数",
    "cache": "缓存",
    "every pair against all others": "每一对与其余所有对比较",
    "its backward gives dL/d(vectors)": "它的反向给出 dL/d(向量)",
    "gradients add up in the parameters": "梯度在参数中累加",
    "activations of one chunk at a time": "每次只有一个分块的激活值",
    "rank 0": "rank 0",
    "rank 1": "rank 1",
    "128 pairs": "128 对",
    "update": "更新",
    "4 micro-batches, one after the other (k_steps)": "4 个微批，依次计算（k_steps）",
    "one loss: the pairs of all ranks": "一个损失：所有 rank 的文本对",
    "global_batch = 2 ranks x 4 micro-batches x 128 pairs = 1024": (
        "global_batch = 2 个 rank x 4 个微批 x 128 对 = 1024"
    ),
    "no_sync and fused_allreduce_gradients": "no_sync 加 fused_allreduce_gradients",
    "GradientSync, overlap": "GradientSync，overlap 模式",
    "compute": "计算",
    "network": "网络",
    "bucket": "桶",
    "all gradients": "全部梯度",
    "time saved": "省下的时间",
    "parameters": "参数",
    "gradients": "梯度",
    "moments": "矩",
    "bytes per rank": "每个 rank 的字节数",
    "replicated": "不分片",
    "ShardedOptimizer": "ShardedOptimizer",
    'offload="ranks"': 'offload="ranks"',
    "every rank updates all": "每个 rank 更新全部",
    "owners send new values": "所有者发送更新后的值",
    "owners send copies to compute": "所有者发送计算用的副本",
    "16 P": "16 P",
    "8 P + 8 P / n": "8 P + 8 P / n",
    "16 P / n": "16 P / n",
    "norm": "归一化",
    "q k v": "q k v",
    "attention": "注意力",
    "dropout": "dropout",
    "linear1": "linear1",
    "gelu": "gelu",
    "linear2": "linear2",
    "plain call": "普通调用",
    "recompute": "重计算",
    "recompute with keep": "重计算加 keep",
    "keep": "keep",
    "waits for the backward": "留到反向",
    "runs again in the backward": "在反向中再次运行",
}


class Picture:
    """The elements of one SVG."""

    def __init__(self, width: int, height: int, language: str) -> None:
        self.size = (width, height)
        self._chinese = language == "_cn"
        self._elements: list[str] = []
        self.box(0, 0, width, height, "#ffffff", corner=8)

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, edge: str = "none", corner: int = 3
    ) -> None:
        dashes = ' stroke-dasharray="5 4"' if fill == "none" else ""
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{corner}" '
            f'fill="{fill}" stroke="{edge}"{dashes}/>'
        )

    def area(self, points: list[tuple[float, float]], fill: str, edge: str) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._elements.append(
            f'<polygon points="{path}" fill="{fill}" fill-opacity="0.6" stroke="{edge}"/>'
        )

    def line(
        self, x: float, y: float, x2: float, y2: float, arrow: bool = False, dashed: bool = False
    ) -> None:
        extra = ' marker-end="url(#tip)"' if arrow else ""
        extra += ' stroke-dasharray="5 4"' if dashed else ""
        self._elements.append(
            f'<line x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" stroke="{PALE}"{extra}/>'
        )

    def text(
        self, x: float, y: float, words: str, anchor: str = "start", bold: bool = False
    ) -> None:
        words = CHINESE[words] if self._chinese and len(words) > 1 else words
        weight = ' font-weight="600"' if bold else ""
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def labelled(self, x: float, y: float, w: float, h: float, fill: str, words: str) -> None:
        self.box(x, y, w, h, fill, PALE)
        self.text(x + w / 2, y + h / 2 + 4.5, words, "middle")

    def svg(self) -> str:
        width, height = self.size
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}" font-size="13" '
            f'fill="{INK}">\n<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{PALE}"/></marker>\n'
        )
        return head + "\n".join(self._elements) + "\n</svg>\n"


# ---------------------------------------------------------------------------------- the pictures

BLOCKS = 6


def _levels(recompute: bool) -> list[tuple[float, float]]:
    """What a step holds over time, as (end of the phase, level); a block's activations are 1."""
    kept = 0.15 if recompute else 1.0
    levels, now, held = [], 0.0, 0.0
    for _ in range(BLOCKS):
        now, held = now + 1, held + kept
        levels.append((now, held + (1 - kept)))  # while a block runs it holds all of its own
    for _ in range(BLOCKS):
        if recompute:
            now += 1
            levels.append((now, held + 1 - kept))
        now += 2
        levels.append((now, held + 1 - kept))
        held -= kept
    return levels


def recompute_memory(language: str) -> Picture:
    """What a step holds over its time, with six blocks; the heights are chosen, not measured."""
    picture = Picture(780, 400, language)
    left, bottom, unit_x, unit_y = 74, 326, 26, 32
    for recompute, fill, edge in ((False, BLUE, "#1976d2"), (True, ORANGE, "#e65100")):
        points, start = [(float(left), float(bottom))], float(left)
        for end, level in _levels(recompute):
            points += [(start, bottom - level * unit_y), (left + end * unit_x, 0)]
            points[-1] = (left + end * unit_x, bottom - level * unit_y)
            start = left + end * unit_x
        picture.area([*points, (start, bottom)], fill, edge)
        top = min(y for _, y in points)
        picture.line(left, top, 710, top, dashed=True)
        picture.text(716, top + 4, "peak")
    for block in range(BLOCKS):
        x = left + (BLOCKS + 3 * block) * unit_x
        picture.box(x, bottom + 3, unit_x, 7, "#e65100", corner=0)
    picture.box(left, bottom + 10, 24 * unit_x, 22, GREY, FRAME)
    picture.text(left + 8, bottom + 26, "parameters, gradients, optimizer state")
    picture.line(left, bottom + 32, left, 84, arrow=True)
    picture.line(left, bottom + 32, 730, bottom + 32, arrow=True)
    picture.text(left - 8, 98, "memory", "end")
    picture.text(730, bottom + 52, "time of one step", "end")
    picture.text(left + BLOCKS / 2 * unit_x, bottom + 52, "forward", "middle")
    picture.line(left + BLOCKS * unit_x, bottom, left + BLOCKS * unit_x, 108, dashed=True)
    picture.text(left + (BLOCKS + 6) * unit_x, bottom + 52, "backward", "middle")
    legend = (
        (BLUE, "without recompute: all activations wait for the backward"),
        (ORANGE, "with recompute: the inputs of the blocks wait"),
        ("#e65100", "second forward of a block"),
    )
    for row, (colour, words) in enumerate(legend):
        picture.box(left, 16 + 22 * row, 12, 12 if row < 2 else 7, colour, corner=0)
        picture.text(left + 20, 27 + 22 * row, words)
    return picture


def grad_cache_phases(language: str) -> Picture:
    """`GradCache.backward` in its three phases."""
    picture = Picture(800, 330, language)
    chunks, size, top = 4, 40, 70
    titles = (
        "1  encode, without a graph",
        "2  the loss of all vectors",
        "3  encode again, with a graph",
    )
    for panel, title in enumerate(titles):
        x = 12 + 262 * panel
        picture.box(x, 12, 252, 306, GREY, FRAME, 6)
        picture.text(x + 126, 38, title, "middle", bold=True)
    for left, back in ((24, False), (548, True)):
        for chunk in range(chunks):
            y = top + chunk * (size + 6)
            running = chunk == 1
            picture.labelled(left, y, 40, size, ORANGE if running else "#ffffff", str(chunk))
            picture.box(left + 190, y, 38, size, GREEN if not back else BLUE, PALE)
            picture.line(left + 40, y + size / 2, left + 66, y + size / 2, arrow=True)
            if back:
                picture.line(left + 190, y + size / 2, left + 162, y + size / 2, arrow=True)
            else:
                picture.line(left + 160, y + size / 2, left + 188, y + size / 2, arrow=True)
        picture.labelled(left + 68, top, 92, 4 * size + 18, "#ffffff", "encoder")
        picture.text(left + 209, top - 8, "cache" if back else "vectors", "middle")
        picture.text(left + 114, 274, "activations of one chunk at a time", "middle")
    picture.text(662, 296, "gradients add up in the parameters", "middle")
    left, cell = 290, 11
    for row in range(16):
        for column in range(16):
            own = row == column
            picture.box(
                left + column * cell,
                top + row * cell,
                cell - 1,
                cell - 1,
                "#388e3c" if own else "#ffffff",
                corner=0,
            )
    picture.text(left + 88, top - 8, "scores", "middle")
    picture.line(left + 180, top + 88, left + 200, top + 88, arrow=True)
    for chunk in range(chunks):
        picture.box(left + 202, top + chunk * 44, 18, 42, BLUE, PALE)
    picture.text(left + 211, top - 8, "cache", "middle")
    picture.text(400, 274, "every pair against all others", "middle")
    picture.text(400, 296, "its backward gives dL/d(vectors)", "middle")
    return picture


def global_batch(language: str) -> Picture:
    """The batch of the configuration page, and the rows that share a loss."""
    picture = Picture(780, 246, language)
    left, top, width, height = 90, 84, 118, 46
    for rank in range(2):
        y = top + rank * 62
        picture.text(left - 14, y + 28, f"rank {rank}", "end")
        for micro_batch in range(4):
            x = left + micro_batch * (width + 18)
            picture.labelled(x, y, width, height, BLUE, "128 pairs")
        picture.line(left + 4 * (width + 18) - 16, y + 23, 640, y + 23, arrow=True)
        picture.labelled(642, y, 76, height, GREEN, "update")
    for micro_batch in range(4):
        x = left + micro_batch * (width + 18)
        picture.box(x - 7, top - 8, width + 14, 124, "none", "#e65100", 6)
    picture.line(left, 60, left + 4 * width + 54, 60, arrow=True)
    picture.text(
        left + 2 * width + 27, 50, "4 micro-batches, one after the other (k_steps)", "middle"
    )
    picture.line(left + width / 2, 202, left + width / 2, 216)
    picture.text(left - 7, 230, "one loss: the pairs of all ranks")
    picture.text(
        390, 26, "global_batch = 2 ranks x 4 micro-batches x 128 pairs = 1024", "middle", bold=True
    )
    return picture


def overlapped_sends(language: str) -> Picture:
    """When gradients travel: after the backward, or under it."""
    picture = Picture(800, 330, language)
    left, forward, buckets, back, send, update = 90, 120, 3, 84, 84, 60
    begin = left + forward
    end = begin + buckets * back

    def lanes(y: int, title: str) -> None:
        picture.text(16, y, title, bold=True)
        picture.text(left - 10, y + 34, "compute", "end")
        picture.text(left - 10, y + 72, "network", "end")
        picture.labelled(left, y + 14, forward, 30, BLUE, "forward")
        for bucket in range(buckets):
            picture.box(begin + bucket * back, y + 14, back, 30, ORANGE, PALE)
        picture.text(begin + buckets * back / 2, y + 33, "backward", "middle")

    lanes(34, "no_sync and fused_allreduce_gradients")
    picture.labelled(end, 86, buckets * send, 30, GREEN, "all gradients")
    picture.labelled(end + buckets * send, 48, update, 30, GREY, "update")
    lanes(180, "GradientSync, overlap")
    sent = 0.0
    for bucket in range(buckets):
        ready = begin + (bucket + 1) * back
        start = max(ready, sent)
        sent = start + send
        picture.labelled(start, 232, send, 30, GREEN, "bucket")
        picture.line(ready, 224, start + 2, 231, arrow=True)
    picture.labelled(sent, 194, update, 30, GREY, "update")
    last = end + buckets * send + update
    picture.line(sent + update, 190, sent + update, 292, dashed=True)
    picture.line(last, 44, last, 292, dashed=True)
    picture.line(last, 282, sent + update, 282, arrow=True)
    picture.text((last + sent + update) / 2, 302, "time saved", "middle")
    return picture


def who_holds_what(language: str) -> Picture:
    """What each of two ranks has of four parts of a model with AdamW; a height is a size."""
    picture = Picture(832, 276, language)
    left, cell, top = 136, 23, 70
    rows = (("parameters", 30, BLUE), ("gradients", 30, ORANGE), ("moments", 60, GREEN))
    y = top
    for name, height, _ in rows:
        picture.text(left - 10, y + height / 2 + 4.5, name, "end")
        y += height + 8
    picture.text(left - 10, y + 46, "bytes per rank", "end")
    ways = (  # which rows are spread
        ("replicated", (), "every rank updates all", "16 P"),
        ("ShardedOptimizer", ("moments",), "owners send new values", "8 P + 8 P / n"),
        (
            'offload="ranks"',
            ("parameters", "gradients", "moments"),
            "owners send copies to compute",
            "16 P / n",
        ),
    )
    for panel, (title, spread, travel, size) in enumerate(ways):
        x = left + 230 * panel
        picture.box(x, 10, 222, 256, GREY, FRAME, 6)
        picture.text(x + 111, 32, title, "middle", bold=True)
        for rank in range(2):
            begin = x + 10 + 110 * rank
            picture.text(begin + 2 * cell, 56, f"rank {rank}", "middle")
            y = top
            for name, height, colour in rows:
                for place, part in enumerate("ABCD"):
                    is_here = name not in spread or place % 2 == rank
                    at = begin + place * cell
                    picture.box(at, y, cell - 2, height, colour if is_here else "none", PALE)
                    if is_here:
                        picture.text(at + cell / 2 - 1, y + height / 2 + 4.5, part, "middle")
                y += height + 8
        if spread:
            picture.line(x + 56, y + 6, x + 164, y + 6, arrow=True)
            picture.line(x + 164, y + 6, x + 56, y + 6, arrow=True)
        picture.text(x + 111, y + 24, travel, "middle")
        picture.text(x + 111, y + 46, size, "middle", bold=True)
    return picture


OPERATORS = ("norm", "q k v", "attention", "dropout", "linear1", "gelu", "linear2")


def what_is_kept(language: str) -> Picture:
    """What of a block waits for the backward, and what runs again: plain, recompute, keep."""
    picture = Picture(780, 330, language)
    left, width, step = 190, 66, 80
    kept = {"attention", "linear2"}
    rows: tuple[tuple[str, set[str], set[str]], ...] = (
        ("plain call", set(OPERATORS), set()),
        ("recompute", set(), set(OPERATORS)),
        ("recompute with keep", {"attention"}, set(OPERATORS) - kept),
    )
    for column, name in enumerate(OPERATORS):
        fill = GREEN if name in kept else GREY
        picture.labelled(left + column * step, 60, width, 26, fill, name)
        picture.line(left + column * step - 14, 73, left + column * step - 1, 73, arrow=True)
    for number, (title, waits, again) in enumerate(rows):
        y = 112 + 72 * number
        picture.text(16, y + 20, title, bold=True)
        picture.box(left - 28, y, 14, 30, BLUE, "#1976d2")
        for column, name in enumerate(OPERATORS):
            x = left + column * step
            if name in waits:
                picture.box(x + width - 12, y, 14, 30, BLUE, "#1976d2")
            if name in again:
                picture.box(x, y + 38, width, 7, "#e65100", corner=0)
    picture.text(left + 2 * step + width / 2, 50, "keep", "middle", bold=True)
    picture.text(left + 6 * step + width / 2, 50, "keep", "middle", bold=True)
    legend = ((BLUE, "waits for the backward"), ("#e65100", "runs again in the backward"))
    for number, (colour, words) in enumerate(legend):
        picture.box(16 + 200 * number, 16, 12, 12 if not number else 7, colour, corner=0)
        picture.text(36 + 200 * number, 27, words)
    return picture


PICTURES: tuple[Callable[[str], Picture], ...] = (
    recompute_memory,
    grad_cache_phases,
    global_batch,
    overlapped_sends,
    who_holds_what,
    what_is_kept,
)


def drawn() -> dict[str, str]:
    """The content of each file, by its name."""
    return {
        f"{draw.__name__}{language}.svg": draw(language).svg()
        for draw in PICTURES
        for language in ("", "_cn")
    }


if __name__ == "__main__":
    for name, content in drawn().items():
        (FOLDER / name).write_text(content, encoding="utf-8")
