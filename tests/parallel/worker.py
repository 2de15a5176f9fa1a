"""One rank of a parallel test: ``python tests/parallel/worker.py RANK WORLD_SIZE FILE CHECK...``.

Each check is a function here that all ranks run at the same time; it asserts on its own rank.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import draftfuse
from draftfuse import AcrossRanks, DraftBatch
from draftfuse.collectives import collective_at
from draftfuse.errors import ClosedError, LostRankError, RankMismatchError, UnsafeLoopError
from draftfuse.passes import ir
from draftfuse.passes.collectives import collectives_of
from tests.failures.small import Small, batch_of
from tests.parallel import speculators as makes

K = 4


def new_group(seconds: float = 60.0) -> Any:
    """A process group of all ranks, of its own for each check: one that failed stays broken."""
    return dist.new_group(timeout=datetime.timedelta(seconds=seconds))


def rank() -> int:
    return dist.get_rank()


def load_rows(spec: Any, rows: int = 3) -> None:
    """Live rows as draft step 1 reads them."""
    inputs = spec.inputs
    hidden = inputs.hidden_states.shape[1]
    inputs.positions[:rows] = torch.tensor([5, 9, 3][:rows])
    inputs.seq_lens[:rows] = torch.tensor([6, 10, 4][:rows])
    inputs.hidden_states[:rows] = torch.linspace(-1, 1, rows * hidden).view(rows, hidden)
    inputs.input_ids[:rows] = torch.tensor([1, 2, 3][:rows])
    inputs.draft_tokens.zero_()
    inputs.query_start_loc[: rows + 1] = torch.arange(rows + 1)


def decoded(fused: draftfuse.FusedDraft, rows: int, k: int) -> torch.Tensor:
    load_rows(fused.spec, rows)
    fused.decode(rows, k)
    return fused.spec.inputs.draft_tokens[:rows, :k].clone()


def same_as_single_rank(spec: Any, single: Any, compiler: str, ks: tuple[int, ...], **options: Any) -> Any:
    fused = draftfuse.compile(spec, compiler=compiler, mode="fused", **options)
    alone = draftfuse.compile(single, mode="eager")
    for k in ks:
        for rows in (3, 2):  # 3 rows are padded to 4
            got = decoded(fused, rows, k)
            assert torch.equal(got, decoded(alone, rows, k)), (k, rows, got)
            same_on_all_ranks(got)
    return fused


def same_on_all_ranks(tensor: torch.Tensor) -> None:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    assert all(torch.equal(tensor, other) for other in others)


# ---- equal to the loop of one rank


def eagle_none() -> None:
    same_as_single_rank(makes.parallel_eagle(new_group()), makes.single_eagle(), "none", (K,))


def eagle_inductor() -> None:
    fused = same_as_single_rank(
        makes.parallel_eagle(new_group(300)), makes.single_eagle(), "inductor", (K,), emission="whole"
    )
    (build,) = fused.report.builds
    assert (build.emission, build.segments > 0) == ("segments", True)


def small_none() -> None:
    fused = same_as_single_rank(makes.ParallelSmall(new_group()), Small(), "none", (K, 2))
    assert fused.report.fallbacks == []
    alone = draftfuse.compile(Small(), mode="eager")
    for lengths, k in (([5, 9, 7], K), ([5, 9, 3], K), ([5, 9, 3], 2)):  # uniform, then ragged
        got = fused.propose(verified(fused.spec, lengths, [0, 1, 0]), k, copy=True)
        assert torch.equal(got, alone.propose(verified(alone.spec, lengths, [0, 1, 0]), k, copy=True))
        same_on_all_ranks(got)
    counters = fused.report.counters
    assert (counters["propose capacity 4"], counters["eager prefills"]) == (1, 2)


def order() -> None:
    """Equal all-reduces stay two, unused ones stay, and a program calls them as the user wrote them."""
    spec = makes.Twice(new_group())
    fused = same_as_single_rank(spec, Small(), "none", (K,), emission="whole")
    assert "let Inductor order the loop's collectives" in fused.report.builds[0].refused
    (emission,) = fused.runners._emissions.values()
    names = [str(n.args[1]) for n in collectives_of(emission.graph)]
    assert names == ["sum", "sum", "max", "max"] * (K - 1)  # the last is the argmax
    (build,) = fused.report.builds
    assert {p.name: p.rewrites for p in build.passes}["explicit_metadata"] == 0  # collectives are no barriers
    first, *_, last = [collective_at(n, str(ir.value(emission.symbol))) for n in collectives_of(emission.graph)]
    assert str(first).startswith("all_reduce(reduce_op=sum) of float32[n, 8] in draft step 1, forward at ")
    assert str(last).startswith("all_reduce(reduce_op=max) of int64[n] in draft step 3, sample at ")
    assert str(first).endswith('first = collectives.wait_tensor(collectives.all_reduce(part, "sum", self.group))')
    assert (first.group, last.group) == (spec.group.group_name,) * 2
    called = [n for n in emission.program.items if n in collectives_of(emission.graph)]
    assert called == collectives_of(emission.graph)


def split() -> None:
    fused = draftfuse.compile(makes.ParallelSmall(new_group()), compiler="none", mode="split")
    assert torch.equal(decoded(fused, 3, K), decoded(draftfuse.compile(Small(), mode="eager"), 3, K))


# ---- data parallel


def across_ranks() -> None:
    group = new_group()
    spec, twin = makes.Coupled(), makes.Coupled()
    spec.group = twin.group = group
    fused = draftfuse.compile(spec, compiler="none")
    eager = draftfuse.compile(twin, mode="eager", request_capacities=fused.ladder.capacities)
    uniform, ragged = [5, 9, 7], [5, 9, 3]
    cases: list[tuple[list[int], list[int], int]]
    cases = [(uniform[:2], ragged, K), ([], uniform, 2), (ragged, [], K), (uniform[:1], uniform, 2), ([], ragged, 0)]
    for *lengths, k in cases:
        mine = lengths[rank()]
        batch = verified(spec, mine, seed=rank())
        across = AcrossRanks.gather(batch, k, group)
        got = fused.propose(batch, k, copy=True, across=across)
        assert got.shape == (len(mine), k)
        assert torch.equal(got, eager.propose(batch, k, copy=True, across=across))
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, [(p.descriptor, p.calls) for p in fused.report.plans])
    assert {p for p, _ in plans[0]} == {p for p, _ in plans[1]}
    assert sum(calls for _, calls in plans[0]) == sum(calls for _, calls in plans[1]) == 4


def verified(spec: Any, lengths: list[int], rejected: list[int] | None = None, seed: int = 0) -> DraftBatch:
    """A batch of requests of these lengths; uniform where all have five tokens or more, empty where there is none."""
    batch = batch_of(spec, lengths or [5], rejected, seed)
    if not lengths:
        batch.num_reqs = batch.num_tokens = 0
    if all(length > K for length in lengths):
        batch.max_query_len = K + 1
    return batch


# ---- what ranks must not differ in


def raised(kind: type[Exception], call: Callable[[], object]) -> Any:
    """The error that ``call`` raises, and the seconds until it did."""
    start = time.monotonic()
    try:
        call()
    except kind as error:
        print(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}", flush=True)
        error.seconds = time.monotonic() - start  # type: ignore[attr-defined]
        return error
    raise AssertionError(f"no {kind.__name__}")


def branch() -> None:
    fused = draftfuse.compile(makes.Branching(new_group()), compiler="none")
    error = raised(RankMismatchError, lambda: decoded(fused, 3, K))
    assert (error.rank, error.step) == (1, 1)
    assert "speculators.py" in str(error.source)
    assert "draft step 1, sample" in str(error)
    assert not fused.runners.made
    bad = draftfuse.compile(makes.BadBranch(new_group()), compiler="none")
    lint = raised(UnsafeLoopError, lambda: decoded(bad, 3, K))
    assert "[rank-branch]" in str(lint)
    assert lint.source.text == "if dist.get_rank(self.group) == 0:"


def failing_build() -> None:
    fused = draftfuse.compile(makes.Faulty(new_group()), compiler="none")
    if rank() == 1:
        error = raised(UnsafeLoopError, lambda: decoded(fused, 3, K))
        assert "host-sync" in str(error)
    else:
        error = raised(LostRankError, lambda: decoded(fused, 3, K))
        assert error.ranks == (1,)
        assert "could not build" in str(error)
        assert "host-sync" in str(error)


def absent() -> None:
    """The last rank never builds."""
    last = dist.get_world_size() - 1
    group = new_group(3)
    if rank() != last:
        fused = draftfuse.compile(makes.ParallelSmall(group), compiler="none")
        error = raised(LostRankError, lambda: decoded(fused, 3, K))
        assert error.ranks == (last,)
        assert error.step == 1
    dist.barrier()


def stumbling(which: int, step: int, how: str, timeout: float) -> draftfuse.FusedDraft:
    """A loop that has run, and in whose next call rank ``which`` sleeps or dies at ``step``."""
    makes.ARMED.clear()  # of the check before: the lint runs every step
    group = new_group()
    fused = draftfuse.compile(makes.Stumbling(group), compiler="none")
    assert torch.equal(decoded(fused, 3, K), decoded(draftfuse.compile(Small(), mode="eager"), 3, K))
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout), group)
    dist.barrier()
    makes.ARMED.update(rank=which, step=step, how=how, seconds=6.0)
    return fused


def late() -> None:
    """The last rank sleeps in front of the all-reduce of draft step 2; it comes back when the others have left."""
    last = dist.get_world_size() - 1
    fused = stumbling(last, 2, "sleep", timeout=2.0)
    error = raised(LostRankError, lambda: decoded(fused, 3, K))
    assert (error.step, error.phase) == (2, "sample")
    assert "all_reduce" in error.source.text or "argmax" in error.source.text
    if rank() != last:
        assert error.ranks == (last,)
        assert f"late or dead: rank {last}" in str(error)
        assert error.seconds < 2 + 2
    else:
        assert last not in error.ranks
        assert "gave up before this rank came" in str(error)
    again = raised(ClosedError, lambda: fused.decode(3))
    assert "lost a rank" in str(again)
    fused.recapture()
    fused.close()
    assert "close()" in str(raised(ClosedError, lambda: fused.decode(3)))
    dist.barrier()


def dead() -> None:
    """The last rank ends inside the loop: the last check of a run."""
    last = dist.get_world_size() - 1
    fused = stumbling(last, 1, "die", timeout=3.0)
    error = raised(LostRankError, lambda: decoded(fused, 3, K))
    assert error.ranks == (last,)
    assert (error.step, error.phase) == (1, "sample")
    assert error.seconds < 3 + 2


def eager_prefill() -> None:
    """A rank is late in a ragged prefill, which runs in Python: the place comes off the traceback."""
    fused = stumbling(1, 0, "sleep", timeout=2.0)
    error = raised(LostRankError, lambda: fused.propose(batch_of(fused.spec, [5, 9, 3])))
    assert (error.step, error.phase) == (0, "sample")
    if rank() == 0:
        assert error.ranks == (1,)
    dist.barrier()


def main() -> None:
    number, world_size, path, *checks = sys.argv[1:]
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=int(number), world_size=int(world_size), timeout=timeout
    )
    for check in checks:
        start = time.monotonic()
        globals()[check]()
        print(f"{check}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
