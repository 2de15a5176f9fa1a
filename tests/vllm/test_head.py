"""Output head and argmax are one kernel only where the logits are the product of the head with the hidden states."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftfuse.vllm import head, ops
from draftfuse.vllm.compiled import State, loop
from draftfuse.vllm.head import plain_head

H, V, K = 16, 40, 4


@pytest.fixture(autouse=True)
def always_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "pays", lambda weight: True)


def spec_with(weight: Any) -> Any:
    return SimpleNamespace(
        model=SimpleNamespace(lm_head=SimpleNamespace(weight=weight)), hidden_states=torch.zeros(3, H)
    )


def test_a_plain_product_is_recognised() -> None:
    weight = torch.randn(V, H)
    assert plain_head(spec_with(weight), lambda x: F.linear(x, weight)) is not None


def test_rows_of_padding_are_left_out() -> None:
    weight = torch.randn(V + 8, H)
    found = plain_head(spec_with(weight), lambda x: F.linear(x, weight)[:, :V])
    assert found is not None
    assert torch.equal(found, weight[:V])


BIAS = torch.zeros(V)
BIAS[7] = 0.5
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "cap": lambda x: torch.tanh(x / 500) * 500,
    "scale": lambda x: x * 0.5,
    "bias": lambda x: x + BIAS,
    "mapping": lambda x: x.roll(1, dims=-1),
    "gathered from ranks": lambda x: torch.cat([x, x], dim=-1),
    "one more dim": lambda x: x[None],
}


@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_stays_vllms(name: str) -> None:
    weight = torch.randn(V, H)
    assert plain_head(spec_with(weight), lambda x: OTHERS[name](F.linear(x, weight))) is None


@pytest.mark.parametrize(
    "weight", [None, torch.randn(V, H).half(), torch.randn(V, H + 1), torch.randn(H, V).T, torch.randn(V)]
)
def test_weights_of_another_kind_stay_vllms(weight: Any) -> None:
    assert plain_head(spec_with(weight), lambda x: F.linear(x, torch.zeros(V, H))) is None


def test_where_the_vendor_is_faster_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "pays", lambda weight: False)
    weight = torch.randn(V, H)
    assert plain_head(spec_with(weight), lambda x: F.linear(x, weight)) is None


class Draft:
    """A draft model whose hidden states are fed back as they are: both results are one tensor."""

    def __init__(self, state: State, weight: Tensor) -> None:
        self.state, self.weight, self.table = state, weight, torch.randn(V, H)

    def forward(self, rows: int, step: int) -> tuple[Tensor, Tensor]:
        state = self.state
        hidden = torch.tanh(
            self.table[state.input_ids[:rows]] + state.hidden_states[:rows] + state.positions[:rows, None]
        )
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def sample(self, hidden: Tensor, rows: int, step: int) -> Tensor:
        raise AssertionError("a greedy draw is part of the loop")


def state_of_one_request() -> State:
    state: State = State.__new__(State)
    state.input_ids, state.positions = torch.tensor([3]), torch.tensor([5])
    state.seq_lens, state.query_start_loc = torch.tensor([6]), torch.tensor([0, 1])
    state.hidden_states, state.draft_tokens = torch.ones(1, H), torch.full((1, K), 3)
    state.idx_mapping, state.current_step = torch.tensor([0]), torch.tensor(0)
    state.sample_positions, state.advances, state.max_model_len, state.draws = None, True, 64, False
    state.tables, state.page_sizes, state.slots = [torch.arange(16)[None]], [4], [torch.zeros(1, dtype=torch.int64)]
    state.width, state.hidden_like, state.logits_like = H, torch.empty(1), torch.empty(V)
    state.head = None
    return state


def test_drafts_are_the_same_with_the_kernel() -> None:
    weight = torch.randn(V, H)
    drafts = []
    for fused in (False, True):
        torch.manual_seed(0)
        state = state_of_one_request()
        state.head = weight if fused else None
        state.engine = ops.add(Draft(state, weight))
        loop(state, 1, K)
        drafts.append(state.draft_tokens.tolist())
    assert drafts[0] == drafts[1]
    assert len({*drafts[0][0]}) > 1, drafts


def test_results_of_the_operator_share_no_memory() -> None:
    state = state_of_one_request()
    engine = ops.add(Draft(state, torch.randn(V, H)))
    last, feedback = torch.ops.draftfuse_vllm.step_hidden(state.hidden_like, engine, 1, 1, H)
    assert last.data_ptr() != feedback.data_ptr()
    assert torch.equal(last, feedback)
