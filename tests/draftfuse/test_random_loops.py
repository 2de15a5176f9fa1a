"""Random loops: fused equals eager on tokens and on everything that outlives a call, bit for bit."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.draftfuse.toy import Config, assert_same_runs, make_batch, run_mode

FIELDS = ("step", "invariant", "pieces", "several", "token")
EXAMPLES = int(os.environ.get("DRAFTFUSE_RANDOM_LOOPS", "4"))


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any small toy: widths, layers, K 1 to 8, 1 to 8 requests, page sizes, fields of either kind."""
    k, page = draw(st.sampled_from([2, 3, 1, 4, 2, 3, 5, 6, 7, 8])), draw(st.integers(1, 7))  # tracing is linear in k
    layers = draw(st.sampled_from([1, 1, 2]))
    return Config(
        layers=layers,
        hidden=draw(st.sampled_from([2, 5, 8])),
        vocab=draw(st.integers(2, 40)),
        page=page,
        k=k,
        rows=draw(st.integers(1, 8)),
        max_model_len=draw(st.integers(k + 2, 40)),
        fields=tuple(draw(st.lists(st.sampled_from(FIELDS), unique=True))),
        groups=draw(st.integers(1, layers)),
        window=draw(st.integers(1, 9)),
        gumbel=draw(st.booleans()),
        logits=draw(st.booleans()),
        advance_positions=draw(st.sampled_from([True, True, True, False])),
        seed=draw(st.integers(0, 99)),
    )


@st.composite
def loops(draw: st.DrawFn) -> tuple[Config, list[tuple[Any, int | None]], list[int]]:
    """A toy, the calls on it (ragged or uniform, any number of rows), and the one capacity that pads them all."""
    config = draw(configs())
    calls: list[tuple[Any, int | None]] = []
    for _ in range(draw(st.integers(1, 3))):
        rows, uniform = draw(st.integers(1, config.rows)), draw(st.sampled_from([False, False, False, True]))
        calls.append((partial(make_batch, num_reqs=rows, seed=draw(st.integers(0, 999)), uniform=uniform), None))
    return config, calls, [config.rows]


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
@given(loops())
def test_fused_equals_eager(loop: tuple[Config, list[tuple[Any, int | None]], list[int]]) -> None:
    config, calls, capacities = loop
    eager = run_mode(config, "eager", calls, request_capacities=capacities)
    fused = run_mode(config, "fused", calls, request_capacities=capacities)
    assert_same_runs(eager, fused)
