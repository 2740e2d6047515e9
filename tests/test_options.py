"""Options of the library check themselves, and YAML may hold the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from paddle_recompute import AmpConfigs, RecomputeConfig
from paddle_recompute.app.config._section import Section
from paddle_recompute.app.config._strategy import AmpSection
from paddle_recompute.app.config.schema import RecomputeSection
from paddle_recompute.errors import ConfigError
from paddle_recompute.options import Options, byte_count
from paddle_recompute.static_graph import StaticConfig
from paddle_recompute.train_step import OptimizerConfig


@dataclass(frozen=True)
class Every(Options):
    word: Literal["a", "b"] = "a"
    count: int = field(default=1, metadata={"at_least": 1})
    share: float = field(default=0.5, metadata={"above": 0, "below": 1})
    switch: bool = False
    names: list[str] = field(default_factory=list)
    text: str | None = None
    inner: AmpConfigs | None = None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"word": "c"}, "word: received 'c'; must be 'a' or 'b'"),
        ({"word": 1}, "word: received 1; must be 'a' or 'b'"),
        ({"count": 0}, "count: received 0; must be at least 1"),
        ({"count": 1.0}, "count: received 1.0; must be a whole number"),
        ({"count": True}, "count: received True; must be a whole number"),
        ({"share": 0}, "share: received 0; must be greater than 0"),
        ({"share": 1.0}, "share: received 1.0; must be less than 1"),
        ({"share": float("nan")}, "share: received nan; must be a finite number"),
        ({"share": True}, "share: received True; must be a finite number"),
        ({"switch": 1}, "switch: received 1; must be True or False"),
        ({"names": "x"}, "names: received 'x'; must be a list, each of it text"),
        ({"names": ["x", 1]}, "must be a list, each of it text"),
        ({"text": 3}, "text: received 3; must be text or None"),
        ({"inner": {}}, "inner: received {}; must be of type AmpConfigs or None"),
    ],
)
def test_a_wrong_value_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Every(**values)
    assert words in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Every(word="c", count=0, switch=None)  # type: ignore[arg-type]
    assert str(caught.value).count("received") == 3


def test_good_values() -> None:
    given = Every("b", 2, 1e-9, True, ["x"], "y", AmpConfigs())
    assert dataclasses.replace(given, count=3).count == 3
    assert Every(names=("x",)).names == ("x",)  # type: ignore[arg-type]
    amp = AmpConfigs(use_pure_bf16=True)
    assert (amp.dtype, amp.level) == ("bfloat16", "O2")
    assert RecomputeConfig(checkpoints="auto") == RecomputeConfig()  # type: ignore[arg-type]
    sizes = {"7B": 7, "1.5GiB": 3 * 2**29, " 2 MiB": 2**21, "0.5KiB": 512, "15": 15}
    assert {text: byte_count(text) for text in sizes} == sizes


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RecomputeConfig(every_n=3), "every_n: .*no effect with policy: all"),
        (lambda: RecomputeConfig(policy="budget"), "policy: .*without memory_budget"),
        (lambda: RecomputeConfig(engine="fleet", offload="disk"), "does not go with engine: fleet"),
        (lambda: RecomputeConfig(num_shards=2), "no effect without offload_parameters"),
        (lambda: AmpConfigs("bfloat16", use_pure_fp16=True), "means dtype: float16 and level"),
        (lambda: AmpConfigs("bfloat16", incr_ratio=3.0), "with dtype: bfloat16: .* no loss scale"),
        (lambda: AmpConfigs(custom_white_list=["x"], custom_black_list=["x"]), "contains x"),
        (lambda: OptimizerConfig("sgd"), "'adamw' or 'lamb' or 'lars'"),  # type: ignore[arg-type]
        (lambda: StaticConfig(accumulate_steps=0), "accumulate_steps: .*at least 1"),
        (lambda: StaticConfig(clip_grad_norm=0.0), "clip_grad_norm: .*greater than 0"),
        *[
            (lambda text=text: byte_count(text), "no number of bytes")
            for text in ("", "12 bananas", "-1", "1e3", "1.5", "0", "0.0GiB", "9" * 30 + "B")
        ],
    ],
)
def test_options_that_contradict_each_other_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize(
    ("section", "options"), [(RecomputeSection, RecomputeConfig), (AmpSection, AmpConfigs)]
)
def test_yaml_has_the_fields_and_defaults_of_the_library(
    section: type[Section], options: type[Options]
) -> None:
    assert section().model_dump() == dataclasses.asdict(options())  # type: ignore[call-overload]
