"""What must agree, how closely, and that whatever does not is named. Without Paddle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paddle_recompute.app.config import Config
from paddle_recompute.app.parity.comparison import (
    BETWEEN_MODES,
    BETWEEN_RANKS,
    EXACT,
    Tolerance,
    Verdict,
    compare,
    pairs,
)
from paddle_recompute.app.parity.outcome import Outcome, disagreement
from paddle_recompute.app.parity.variants import Variant, config_for, plan
from paddle_recompute.errors import ConfigError

RATE = 1e-3
NAMES = ("first.weight", "second.bias", "third.weight")
LEFT, RIGHT = (Variant(mode, True, 1, dropout=False) for mode in ("dygraph", "static"))


def weights() -> dict[str, Any]:
    random = np.random.default_rng(0)
    return {name: random.normal(size=[4, 3]).astype("float32") for name in NAMES}


def outcome() -> Outcome:
    """As after one step of AdamW: every element has moved by the learning rate."""
    random = np.random.default_rng(1)
    gradients = {name: random.normal(size=[4, 3]).astype("float32") for name in NAMES}
    parameters = {
        name: weights()[name] - RATE * np.sign(gradient) for name, gradient in gradients.items()
    }
    return Outcome([2.0, 1.0], [3.0, 2.5], [RATE], None, gradients, parameters)


def verdict(
    right: Outcome, tolerance: Tolerance = BETWEEN_MODES, left: Outcome | None = None
) -> Verdict:
    return compare((LEFT, RIGHT, tolerance), left or outcome(), right, weights())


def changed(section: str, name: str, by: float) -> Outcome:
    """An outcome with one element changed."""
    found = outcome()
    getattr(found, section)[name][1, 2] += np.float32(by)
    return found


@pytest.mark.parametrize("tolerance", [EXACT, BETWEEN_MODES, BETWEEN_RANKS])
def test_equal_runs_agree(tolerance: Tolerance) -> None:
    found = verdict(outcome(), tolerance)
    assert found.fault is None
    assert found.loss_difference == found.gradient_difference == found.parameter_difference == 0


@pytest.mark.parametrize("section", ["gradients", "parameters"])
@pytest.mark.parametrize("name", NAMES)
def test_the_parameter_that_differs_is_named(section: str, name: str) -> None:
    found = verdict(changed(section, name, 0.1))
    assert found.fault is not None
    assert name in found.fault
    assert section.rstrip("s") in found.fault


def test_of_several_the_first_is_named() -> None:
    spoiled = changed("gradients", "third.weight", 0.1)
    spoiled.gradients["second.bias"][0, 0] += 0.1
    assert "gradient of second.bias" in (verdict(spoiled).fault or "")


def test_the_smallest_difference_is_one_too_much_for_exact_and_none_for_the_others() -> None:
    spoiled = outcome()
    element = spoiled.gradients["first.weight"]
    element[0, 0] = np.nextafter(element[0, 0], np.float32(9))
    assert "first.weight" in (verdict(spoiled, EXACT).fault or "")
    assert verdict(spoiled, BETWEEN_MODES).fault is None
    assert 0 < verdict(spoiled, BETWEEN_MODES).gradient_difference < 1e-6


def test_ranks_may_differ_by_more_than_modes() -> None:
    spoiled = changed("gradients", "first.weight", 5e-5)
    assert verdict(spoiled, BETWEEN_MODES).fault is not None
    assert verdict(spoiled, BETWEEN_RANKS).fault is None


@pytest.mark.parametrize("section", ["gradients", "parameters"])
def test_nan_never_agrees_with_anything_nor_with_itself(section: str) -> None:
    spoiled = changed(section, "second.bias", np.nan)
    assert "second.bias" in (verdict(spoiled).fault or "")
    assert "second.bias" in (verdict(spoiled, EXACT, left=spoiled).fault or "")


def test_losses_and_norms_are_told_by_step() -> None:
    right = outcome()
    found = verdict(replace(right, losses=[2.0, 1.1]))
    assert found.fault == "loss of step 2: 1 and 1.1"
    assert found.loss_difference == pytest.approx(0.1)
    right = replace(right, grad_norms=[float("nan"), 2.5])
    assert (verdict(right).fault or "").startswith("gradient norm of st")


def test_a_parameter_that_one_of_them_lacks_or_has_in_another_shape() -> None:
    right = outcome()
    del right.gradients["third.weight"]
    assert verdict(right).fault == "gradient of third.weight: only one of the two has it"
    right = outcome()
    right.parameters["third.weight"] = right.parameters["third.weight"][:2]
    assert "parameter of third.weight: shapes (4, 3) and (2, 3)" in (verdict(right).fault or "")


def test_where_the_gradient_is_noise_a_parameter_may_go_as_far_as_it_can_and_no_farther() -> None:
    """AdamW makes a whole step of rounding noise, in any direction."""
    left, right = outcome(), outcome()
    for one, sign in ((left, 1), (right, -1)):
        one.gradients["second.bias"][:] = sign * 1e-9
        one.parameters["second.bias"][:] = weights()["second.bias"] - sign * RATE
    assert verdict(right, left=left).fault is None
    assert verdict(right, EXACT, left=left).fault is not None
    right.parameters["second.bias"] += 0.01
    assert "parameter second.bias" in (verdict(right, left=left).fault or "")


def test_ranks_that_drift_apart_are_told() -> None:
    first = [[2.0], [3.0], {"second.bias": "a"}]
    assert disagreement([first, first]) is None
    drifted = [[2.0], [3.0], {"second.bias": "b"}]
    assert disagreement([first, drifted]) == (
        "second.bias: the parameters of rank 0 and rank 1 differ"
    )
    assert "losses" in (disagreement([first, first, [[1.5], *first[1:]]]) or "")


# ---------------------------------------------------------------------------------- the plan


def configuration(**sections: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"preset": "tiny"},
        "contrastive": {"global_batch": 16},
        "train": {"max_steps": 4, "learning_rate": 1e-3},
        "launch": {"num_ranks": 2, "device": "cpu"},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return Config.model_validate(tree)


def compared(config: Config) -> list[tuple[str, str, str, Tolerance]]:
    return [
        (left.name, right.name, left.case, tolerance)
        for left, right, tolerance in pairs(plan(config))
    ]


def test_everything_that_must_agree_is_compared() -> None:
    found = compared(configuration())
    assert len(set(found)) == len(found) == 8 + 8 + 4 + 2
    for mode in ("dygraph", "static"):
        for ranks in ("1 process", "2 ranks"):
            for case in ("dropout", "no dropout"):
                pair = (f"{mode} plain, {ranks}", f"{mode} recompute, {ranks}", case, EXACT)
                assert pair in found
        for recompute in ("plain", "recompute"):
            name = f"{mode} {recompute}"
            assert (f"{name}, 1 process", f"{name}, 2 ranks", "no dropout", BETWEEN_RANKS) in found
    for recompute in ("plain", "recompute"):
        for ranks, tolerance in (("1 process", BETWEEN_MODES), ("2 ranks", BETWEEN_RANKS)):
            one, other = (f"{mode} {recompute}, {ranks}" for mode in ("dygraph", "static"))
            for case in ("dropout", "no dropout"):  # they draw the same masks
                assert (one, other, case, tolerance) in found
    for ranks in ("1 process", "2 ranks"):
        assert (f"dygraph recompute, {ranks}", f"dygraph fleet, {ranks}", "dropout", EXACT) in found


def test_the_order_of_three_ranks_depends_on_the_buffers() -> None:
    three = configuration(launch={"num_ranks": 3}, contrastive={"global_batch": 24})
    found = {pair[1]: pair[3] for pair in compared(three) if "fleet" in pair[1]}
    assert found == {"dygraph fleet, 1 process": EXACT, "dygraph fleet, 3 ranks": BETWEEN_RANKS}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"recompute": {"policy": "segments"}},
            "fleet does not support recompute.policy: segments.",
        ),
        (
            {"recompute": {"policy": "segments"}, "contrastive": {"chunk_size": 4}},
            "fleet does not support recompute.policy: segments, contrastive.chunk_size: 4.",
        ),
    ],
)
def test_the_reference_is_left_out_where_fleet_has_not_the_setting(
    sections: dict[str, Any], words: str
) -> None:
    found = plan(configuration(**sections))
    assert len(found.variants) == 16 and not any(one.reference for one in found.variants)
    assert found.notes[-1] == (
        f"Not compared with Paddle's own recompute and synchronization (fleet): {words}"
    )


def test_what_is_not_compared_is_said() -> None:
    merged = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    for sections in ({"contrastive": {"negatives": "local"}}, {"strategy": merged}):
        other_loss = configuration(**sections)
        assert not any({"1 process", "2 ranks"} <= {*_ranks(pair)} for pair in compared(other_loss))
        assert "another loss than one process" in plan(other_loss).notes[0]
    one = configuration(launch={"num_ranks": 1})
    assert not any("ranks" in name for pair in compared(one) for name in pair[:2])
    assert "nothing is compared on several ranks" in plan(one).notes[0]
    still = configuration(model={"hidden_dropout": 0.0, "attention_dropout": 0.0})
    assert {pair[2] for pair in compared(still)} == {"no dropout"}
    assert "no dropout" in plan(still).notes[0]


def _ranks(pair: tuple[str, str, str, Tolerance]) -> list[str]:
    return [name.partition(", ")[2] for name in pair[:2]]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"recompute": {"enable": False}}, "with and without recompute"),
        ({"launch": {"num_nodes": 2}}, "starts all ranks on this machine"),
    ],
)
def test_what_cannot_be_compared_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(configuration(**sections))


def test_a_run_is_configured_as_its_variant_says() -> None:
    config = configuration()
    variant = Variant("static", False, 1, dropout=False)
    found = config_for(config, variant)
    assert found.mode == "static"
    assert (found.model.hidden_dropout, found.model.attention_dropout) == (0, 0)
    assert (found.recompute.enable, found.launch.num_ranks) == (False, 1)
    assert config_for(config, replace(variant, dropout=True)).model.hidden_dropout == 0.1


def test_the_reference_is_paddles_own_recompute_and_synchronization() -> None:
    config = configuration()
    references = [one for one in plan(config).variants if one.reference]
    assert [(one.ranks, one.dropout) for one in references] == [
        (1, True), (2, True)
    ]  # fmt: skip
    found = config_for(config, references[1])
    assert (found.recompute.enable, found.recompute.engine) == (True, "fleet")
    assert found.sync.mode == "fleet"
    assert config_for(config, plan(config).variants[2]).sync.mode == "auto"
