"""`StrategyConfig` against the `DistributedStrategy` of the installed Paddle, name by name."""

from __future__ import annotations

import inspect
from typing import Any

import paddle
import pytest
from pydantic import ValidationError

from paddle_recompute.app.config import StrategyConfig
from paddle_recompute.app.config._section import subsection
from paddle_recompute.app.config._strategy import (
    _REFUSED,
    AmpSection,
    GradientMergeConfigs,
    LambConfigs,
    LarsConfigs,
)

# The message has no field for bfloat16 at level O1; `paddle.amp.auto_cast` has.
FROM_AUTO_CAST = ["dtype", "level"]


@pytest.fixture(scope="module")
def strategy() -> Any:
    from paddle.distributed import fleet

    return fleet.DistributedStrategy()


def names_of(strategy: Any) -> set[str]:
    """Public names that a user can set, and the fields of the message beneath them."""
    properties = {name for name, kind in vars(type(strategy)).items() if isinstance(kind, property)}
    message = {field.name for field in strategy.strategy.DESCRIPTOR.fields}
    attributes = set(vars(strategy)) - {"strategy"}
    return {name for name in properties | message | attributes if not name.startswith("_")}


def test_every_field_exists_in_paddle(strategy: Any) -> None:
    assert set(StrategyConfig.model_fields) <= names_of(strategy)


@pytest.mark.parametrize("section", [AmpSection, GradientMergeConfigs, LambConfigs, LarsConfigs])
def test_nested_keys_and_defaults_are_those_of_paddle(strategy: Any, section: Any) -> None:
    [name] = [n for n in StrategyConfig.model_fields if subsection(StrategyConfig, n) is section]
    theirs = dict(getattr(strategy, name))
    ours = section().model_dump()
    if section is AmpSection:
        defaults = inspect.signature(paddle.amp.auto_cast).parameters
        assert {name: ours.pop(name) for name in FROM_AUTO_CAST} == {
            name: defaults[name].default for name in FROM_AUTO_CAST
        }
    assert list(ours) == list(theirs)
    # Paddle keeps them in a float32 message, where 0.8 is 0.800000011920929.
    rounded = {key: round(v, 6) if isinstance(v, float) else v for key, v in theirs.items()}
    assert ours == rounded


def test_defaults_are_those_of_paddle(strategy: Any) -> None:
    plain = [n for n in StrategyConfig.model_fields if not subsection(StrategyConfig, n)]
    ours = {name: getattr(StrategyConfig(), name) for name in plain}
    assert ours == {name: getattr(strategy, name) for name in plain}


def test_every_field_of_paddle_is_honoured_or_refused_by_name(strategy: Any) -> None:
    theirs = names_of(strategy)
    assert set(_REFUSED) <= theirs
    refused = sorted(theirs - set(StrategyConfig.model_fields))
    with pytest.raises(ValidationError) as caught:
        StrategyConfig.model_validate(dict.fromkeys(refused, True))
    words = "is no field of DistributedStrategy that paddle_recompute honours"
    told = {str(one["loc"][0]): str(one["msg"]) for one in caught.value.errors()}
    assert sorted(told) == refused
    assert all(message.startswith(words) for message in told.values())
    for name, reason in _REFUSED.items():
        assert told[name] == f"{words}: {reason}"
