"""The search for the largest number that fits."""

from __future__ import annotations

import pytest

from paddle_recompute.planner import largest_that_fits


@pytest.mark.parametrize("largest", range(21))
@pytest.mark.parametrize("most", [1, 7, 8, 20])
def test_it_finds_the_largest(largest: int, most: int) -> None:
    found = largest_that_fits(lambda n: n <= largest, most)
    assert found == (min(largest, most) or None)


def test_it_tries_no_number_above_twice_the_largest() -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= 100

    assert largest_that_fits(fits, 2**20, least=3) == 100
    assert max(tried) <= 200 and len(tried) < 20


def test_it_may_be_too_small_by_a_share() -> None:
    found = largest_that_fits(lambda n: n <= 1000, 2**20, least=5, close=64)
    assert found is not None and 1000 * 63 / 64 - 1 <= found <= 1000
    assert largest_that_fits(lambda n: n <= 4, 100, least=5) is None
