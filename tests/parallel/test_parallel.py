"""Tensor and data parallel draft loops, each test in one start of its ranks (gloo, on the CPU).

What is asserted stands in tests/parallel/worker.py; the ranks end with an error where it does not hold.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.launch import run

pytestmark = pytest.mark.timeout(200)


def test_two_ranks_draft_what_one_does_in_one_order(tmp_path: Path) -> None:
    run(tmp_path, 2, "small_none", "order", "across_ranks")


def test_a_rank_that_differs_is_late_or_dies_is_named(tmp_path: Path) -> None:
    run(tmp_path, 2, "branch", "late", "dead", dies=(1,))


@pytest.mark.slow
def test_a_rank_that_fails_never_comes_or_is_late_outside_the_graph_is_named(tmp_path: Path) -> None:
    run(tmp_path, 2, "failing_build", "absent", "eager_prefill", "split")


@pytest.mark.slow
def test_two_ranks_compile_to_segments_around_their_collectives(tmp_path: Path) -> None:
    run(tmp_path, 2, "eagle_inductor")


@pytest.mark.slow
def test_four_ranks_draft_what_one_does_and_name_who_is_missing(tmp_path: Path) -> None:
    run(tmp_path, 4, "eagle_none", "late", "dead", dies=(3,))
