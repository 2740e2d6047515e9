"""Configuration files that were not written to be read: each must end in one sentence of ours."""

from __future__ import annotations

GOOD = """\
model: {preset: tiny}
contrastive: {global_batch: 8}
train: {max_steps: 5, learning_rate: 1e-4}
"""


def with_setting(section: str, setting: str) -> str:
    """A sound file with one more setting."""
    if section in ("model", "contrastive", "train"):
        return GOOD.replace(f"{section}: {{", f"{section}: {{{setting}, ")
    return f"{GOOD}{section}: {{{setting}}}\n"


def laughs(levels: int) -> str:
    lines = ["l0: &l0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    for level in range(1, levels):
        inner = ", ".join([f"*l{level - 1}"] * 9)
        lines.append(f"l{level}: &l{level} [{inner}]")
    return GOOD + "\n".join(lines) + "\n"


BAD_FILES: dict[str, str] = {
    "a control character": GOOD + "data: {train_file: 'a\x01b'}\n",
    "a date that is none": with_setting("data", "train_file: 2024-13-45"),
    "!!bool x": with_setting("recompute", "enable: !!bool x"),
    "!!python/object": with_setting("train", "seed: !!python/object/apply:os.system ['true']"),
    "a tag of its own": with_setting("train", "seed: !mine 3"),
    "a NUL in a path": with_setting("train", 'output_dir: "a\\0b"'),
    "a path of 10,000 characters": with_setting("train", "output_dir: " + "a" * 10_000),
    "5,000 digits": with_setting("train", f"seed: {'9' * 5000}"),
    "infinity": with_setting("train", "weight_decay: .inf"),
    "30,000 open brackets": GOOD + "data: " + "[" * 30_000 + "\n",
    "a billion laughs": laughs(10),
    "an anchor that contains itself": GOOD + "data: &a {b: *a}\n",
    "a mapping as a key": GOOD + "? {a: 1}\n: 2\n",
    "hidden_size: 2**63": with_setting("model", f"hidden_size: {2**63}"),
    "max_steps: 1:30:30": GOOD.replace("max_steps: 5", "max_steps: 1:30:30"),
    "max_steps: yes": GOOD.replace("max_steps: 5", "max_steps: yes"),
    "a key of 30,000 characters": GOOD + "a" * 30_000 + ": 1\n",
    "a megabyte of one line": GOOD + "a: [" + "1," * 500_000 + "]\n",
    "two documents": GOOD + "---\n" + GOOD,
    "a text with no keys": "hello",
    "nothing": "",
    "a tab": "model:\n\tpreset: tiny\n",
}
"""Texts that no configuration is, by what is wrong with them."""

BAD_BYTES: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x00m",
    "random bytes": bytes(range(256)) * 8,
}
BAD_OVERRIDES: dict[str, str] = {
    "1,000 names": ".".join(["a"] * 1000) + "=1",
    "30,000 open brackets": "data.train_file=" + "[" * 30_000,
    "base 60": "train.max_steps=1:30:30",
    "a control character": "train.output_dir=a\x01b",
    "5,000 digits": "train.seed=" + "9" * 5000,
}
