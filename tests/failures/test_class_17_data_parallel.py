"""Class 17: one rank drafts fewer steps and the others hang. All ranks take one capacity and one step count."""

from __future__ import annotations

import pytest

import draftfuse
from draftfuse import AcrossRanks
from draftfuse.errors import InvalidBatchError, InvalidOptionError
from tests.failures.small import Small, batch_of


@pytest.mark.parametrize("uniform", [False, True])
def test_every_rank_runs_the_capacity_and_the_kind_of_the_fullest(uniform: bool) -> None:
    sizes, k = (0, 3, 1), 2
    batches = []
    for number in sizes:
        batch = batch_of(Small(k=k), [5, 9, 3][: max(1, number)], [0] * max(1, number))
        batch.max_query_len = k + 1
        assert batch.num_tokens == 3 * batch.num_reqs
        if number == 0:
            batch.num_reqs = batch.num_tokens = 0
        batches.append(batch)
    if not uniform:  # one request of the second rank has another number of tokens
        batches[1] = batch_of(Small(k=k), [5, 9, 3], [1, 0, 0])
    lengths = tuple(b.max_query_len or b.num_tokens - b.num_reqs + 1 for b in batches)
    across = AcrossRanks(sizes, tuple(b.num_tokens for b in batches), lengths)
    counters = []
    for batch in batches:
        fused = draftfuse.compile(Small(k=k), compiler="none")
        assert fused.propose(batch, across=across).shape == (batch.num_reqs, k)
        counters.append({n: c for n, c in fused.report.counters.items() if "capacity" in n or "eager" in n if c})
    wanted = {"propose capacity 4": 1} if uniform else {"decode capacity 4": 1, "eager prefills": 1}
    assert counters == [wanted] * 3


def test_sizes_that_cannot_be_right_are_refused() -> None:
    fused = draftfuse.compile(Small(k=2), compiler="none")
    with pytest.raises(InvalidBatchError, match="the batch is that of no rank"):
        fused.propose(batch_of(fused.spec, [5, 9]), across=AcrossRanks((1, 1), (3, 3), (3, 3)))
    with pytest.raises(InvalidOptionError, match="the ranks are not described"):
        AcrossRanks((1, 2), (3,), (3, 3))
    with pytest.raises(InvalidOptionError, match="num_reqs of the ranks is no count"):
        AcrossRanks((1, -2), (3, 3), (3, 3))
    assert hash(AcrossRanks([1, 2], [3, 3], [3, 3])) == hash(AcrossRanks((1, 2), (3, 3), (3, 3)))  # type: ignore[arg-type]
