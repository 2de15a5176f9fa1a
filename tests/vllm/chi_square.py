"""Whether two samples of equal size can come from one distribution: Pearson's test for two histograms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

NORMAL_999 = 3.0902  # of the standard normal distribution, one value in a thousand is larger


def statistic(one: Sequence[int], other: Sequence[int], least: int = 6) -> tuple[float, int]:
    """Chi-square and its degrees of freedom. Values seen fewer than ``least`` times in both together share one cell."""
    assert len(one) == len(other), "cells are compared as they are"
    mine, theirs = Counter(one), Counter(other)
    often = [value for value in mine | theirs if mine[value] + theirs[value] >= least]
    cells = [(mine[value], theirs[value]) for value in often]
    rest = len(one) - sum(a for a, _ in cells), len(other) - sum(b for _, b in cells)
    cells += [rest] if sum(rest) else []
    return sum((a - b) ** 2 / (a + b) for a, b in cells), len(cells) - 1


def critical(degrees: int) -> float:
    """What one chi-square in a thousand exceeds (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + NORMAL_999 * spread**0.5) ** 3)


def differ(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether the samples are too different for chance."""
    value, degrees = statistic(one, other)
    assert degrees > 3, "too few values repeat for a comparison"
    return value > critical(degrees)
