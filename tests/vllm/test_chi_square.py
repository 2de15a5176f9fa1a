"""The test itself: samples of one distribution pass, samples of two do not."""

from __future__ import annotations

import random

import pytest

from tests.vllm.chi_square import critical, differ, statistic

WEIGHTS = [8, 5, 3, 2, 1, 1, 1, 1]


def sample(weights: list[int], count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(len(weights)), weights, k=count)


def test_statistic_of_a_known_table() -> None:
    one, other = [0] * 12 + [1] * 8, [0] * 8 + [1] * 12
    assert statistic(one, other) == (1.6, 1)


def test_rare_values_share_a_cell() -> None:
    one, other = [0] * 9 + [1, 2, 3], [0] * 9 + [4, 5, 6]
    assert statistic(one, other) == (0.0, 1)


@pytest.mark.parametrize(("degrees", "value"), [(5, 20.515), (10, 29.588), (30, 59.703)])
def test_critical_values_of_the_tables(degrees: int, value: float) -> None:
    assert critical(degrees) == pytest.approx(value, rel=0.02)


def test_few_pairs_of_equal_samples_differ() -> None:
    found = [differ(sample(WEIGHTS, 200, 2 * i), sample(WEIGHTS, 200, 2 * i + 1)) for i in range(400)]
    assert sum(found) <= 3


def test_another_distribution_is_seen() -> None:
    assert all(differ(sample(WEIGHTS, 200, i), sample([2] * 8, 200, 1000 + i)) for i in range(50))
