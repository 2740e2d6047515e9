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


def merges(levels: int) -> str:
    lines = ["m0: &m0 {a: 1}"]
    lines += [f"m{n}: &m{n} {{<<: [*m{n - 1}, *m{n - 1}]}}" for n in range(1, levels)]
    return GOOD + "\n".join(lines) + "\n"


BAD_FILES: dict[str, str] = {
    "a control character": GOOD + "data: {train_file: 'a\x01b'}\n",
    "an escape sequence": GOOD + "\x1b[2J\n",
    "a lone NUL": "\x00",
    "a date that is none": with_setting("data", "train_file: 2024-13-45"),
    "a date": with_setting("data", "train_file: 2024-12-24"),
    "!!bool x": with_setting("recompute", "enable: !!bool x"),
    "!!int x": with_setting("train", "seed: !!int x"),
    "!!timestamp x": with_setting("train", "seed: !!timestamp x"),
    "!!python/object": with_setting("train", "seed: !!python/object/apply:os.system ['true']"),
    "!!binary": with_setting("data", "train_file: !!binary 'a'"),
    "a tag of its own": with_setting("train", "seed: !mine 3"),
    "a user who is not there": with_setting("train", "output_dir: ~nosuchuser/x"),
    "a NUL in a path": with_setting("train", 'output_dir: "a\\0b"'),
    "a line break in a path": with_setting("train", 'output_dir: "a\\nb"'),
    "a path of 10,000 characters": with_setting("train", "output_dir: " + "a" * 10_000),
    "400 digits of bytes": with_setting("contrastive", f"memory_budget: {'9' * 400}GiB"),
    "400 digits": with_setting("contrastive", f"memory_budget: {'9' * 400}"),
    "5,000 digits": with_setting("train", f"seed: {'9' * 5000}"),
    "10,000 digits in hexadecimal": with_setting("train", f"seed: 0x{'f' * 10_000}"),
    "400 digits of a rate": with_setting("train", f"weight_decay: {'9' * 400}"),
    "1e999": with_setting("train", "weight_decay: 1e999"),
    "infinity": with_setting("train", "weight_decay: .inf"),
    "not a number": with_setting("train", "weight_decay: .nan"),
    "2,000 levels": GOOD + "data: " + "{a: " * 2000 + "1" + "}" * 2000 + "\n",
    "30,000 open brackets": GOOD + "data: " + "[" * 30_000 + "\n",
    "2,000 levels by indentation": GOOD + "".join(f"{' ' * n}a:\n" for n in range(200)),
    "a billion laughs": laughs(10),
    "2**40 merges": merges(40),
    "an anchor that contains itself": GOOD + "data: &a {b: *a}\n",
    "a list that contains itself": GOOD + "data: &a [*a]\n",
    "an alias of nothing": GOOD + "data: *nothing\n",
    "a mapping as a key": GOOD + "? {a: 1}\n: 2\n",
    "a list as a key": GOOD + "? [a, b]\n: 2\n",
    "hidden_size: 2**63": with_setting("model", f"hidden_size: {2**63}"),
    "hidden_size: 2**62": with_setting("model", f"hidden_size: {2**62}"),
    "pool_size: 10**30": with_setting("data", f"pool_size: {10**30}"),
    "num_workers: 4": with_setting("data", "num_workers: 4"),
    "num_ranks: 10**30": with_setting("launch", f"num_ranks: {10**30}"),
    "max_steps: 1:30:30": GOOD.replace("max_steps: 5", "max_steps: 1:30:30"),
    "weight_decay: 1:30.5": with_setting("train", "weight_decay: 1:30.5"),
    "max_steps: 010": GOOD.replace("max_steps: 5", "max_steps: 010"),
    "max_steps: 10**30": GOOD.replace("max_steps: 5", f"max_steps: {10**30}"),
    "max_steps: yes": GOOD.replace("max_steps: 5", "max_steps: yes"),
    "5,000 unknown keys": GOOD + "".join(f"key{n}: 1\n" for n in range(5000)),
    "a key of 30,000 characters": GOOD + "a" * 30_000 + ": 1\n",
    "a value of 60,000 characters": with_setting("train", "decay: " + "a" * 60_000),
    "1 MB of spaces": GOOD + " " * (1 << 20),
    "a megabyte of one line": GOOD + "a: [" + "1," * 500_000 + "]\n",
    "two documents": GOOD + "---\n" + GOOD,
    "a surrogate": GOOD + 'data: {train_file: "\\ud800"}\n',
    "a text with no keys": "hello",
    "a number": "3",
    "nothing": "",
    "a list": "- 1\n",
    "a tab": "model:\n\tpreset: tiny\n",
    "a percent sign": "%YAML 9.9\n---\na: 1\n",
    "an unknown directive": "%FOO\n" + GOOD,
    "an open quote": GOOD + 'data: "\n',
    "an open brace": "model: {",
    "a key twice": GOOD + "train: {max_steps: 6, learning_rate: 1.0}\n",
}
"""Texts that no configuration is, by what is wrong with them."""

BAD_BYTES: dict[str, bytes] = {
    "not UTF-8": b"\xff\xfe\x00m",
    "UTF-16": GOOD.encode("utf-16"),
    "random bytes": bytes(range(256)) * 8,
    "a gzip file": b"\x1f\x8b\x08\x00" + bytes(40),
}
BAD_OVERRIDES: dict[str, str] = {
    "no equals sign": "train.max_steps",
    "no key": "=3",
    "an empty name": "train..max_steps=3",
    "1,000 names": ".".join(["a"] * 1000) + "=1",
    "30,000 open brackets": "data.train_file=" + "[" * 30_000,
    "a tag": "train.max_steps=!!int 3",
    "a date": "train.max_steps=2024-01-01",
    "base 60": "train.max_steps=1:30:30",
    "a control character": "train.output_dir=a\x01b",
    "a NUL": 'train.output_dir="a\\0b"',
    "5,000 digits": "train.seed=" + "9" * 5000,
    "a mapping over a value": "train.max_steps.x=1",
    "a section": "train=3",
    "an alias": "train.max_steps=*a",
}
