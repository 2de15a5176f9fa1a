"""Which graph a call uses, and why: one table serves capture and dispatch, so nothing uncaptured can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from draftfuse import loop
from draftfuse.errors import InvalidBatchError
from draftfuse.ranks import AcrossRanks

DECODE, PREFILL, PROPOSE = "decode", "prefill", "propose"


@dataclass(frozen=True)
class Descriptor:
    """One captured batch: what it runs, at how many rows and tokens, for how many draft tokens.

    ``decode`` runs draft steps 1..k-1, ``prefill`` draft step 0 of a uniform batch, ``propose`` both.
    """

    kind: str
    num_reqs: int
    num_tokens: int
    num_steps: int
    mode: str = "fused"

    @property
    def query_len(self) -> int:
        """Query tokens of each request in the prefill."""
        return self.num_tokens // self.num_reqs


@dataclass(frozen=True)
class Decision:
    """What a call will run: the descriptors in order (none: eager), and the reason."""

    prefill: Descriptor | None
    decode: Descriptor | None
    reason: str

    @property
    def launches(self) -> int:
        """Graph launches (or compiled calls) of the call where everything runs fused."""
        return len({d for d in (self.prefill, self.decode) if d is not None})


@dataclass
class Ladder:
    """The request capacities of one compiled loop, and how many draft tokens it may draft."""

    capacities: list[int]  # ascending
    max_k: int
    one_launch: bool = True
    k_by_num_reqs: Mapping[int, int] = field(default_factory=dict)  # largest batch size -> k

    @property
    def query_len(self) -> int:
        """Query tokens of a request in a uniform decode batch: K drafts and the token before them."""
        return self.max_k + 1

    def k_for(self, num_reqs: int) -> int:
        """The number of draft tokens where a call names none."""
        fitting = [size for size in sorted(self.k_by_num_reqs) if num_reqs <= size]
        return self.k_by_num_reqs[fitting[0]] if fitting else self.max_k

    def capacity_for(self, num_reqs: int) -> int:
        """The smallest capacity that holds ``num_reqs`` rows.

        Raises:
            InvalidBatchError: none does.
        """
        for capacity in self.capacities:
            if num_reqs <= capacity:
                return capacity
        todo = "Split the batch, or compile with a larger request capacity."
        largest = f"at most {self.capacities[-1]} requests"
        raise InvalidBatchError("no request capacity holds the batch", num_reqs, largest, todo)

    def decide(
        self, num_reqs: int, num_tokens: int, k: int, max_query_len: int | None, across: AcrossRanks | None = None
    ) -> Decision:
        """The descriptors for one batch; those of all ranks where the batch is one of several."""
        mine = AcrossRanks((num_reqs,), (num_tokens,), (max_query_len or 0,))
        ranks = across or mine
        if k == 0 or ranks.largest == 0:
            return Decision(None, None, "nothing to draft")
        capacity = self.capacity_for(ranks.largest)
        uniform, tokens = ranks.is_uniform(self.query_len), capacity * self.query_len
        if uniform and self.one_launch:
            both = Descriptor(PROPOSE, capacity, tokens, k)
            return Decision(both, both, f"uniform batch of {self.query_len} tokens a request: one launch")
        prefill = Descriptor(PREFILL, capacity, tokens, 1) if uniform else None
        decode = Descriptor(DECODE, capacity, capacity, k) if k > 1 else None
        why = "uniform batch, separate graphs" if uniform else "ragged batch: prefill runs eager"
        if not uniform and mine.is_uniform(self.query_len):
            why = "another rank has a ragged batch: prefill runs eager"
        return Decision(prefill, decode, why)

    def descriptors(self, ks: list[int]) -> Iterator[Descriptor]:
        """Everything that :meth:`decide` can return for ``ks``, largest first."""
        for capacity in reversed(self.capacities):
            tokens = capacity * self.query_len
            for k in ks:
                if self.one_launch and k > 0:
                    yield Descriptor(PROPOSE, capacity, tokens, k)
                if k > 1:
                    yield Descriptor(DECODE, capacity, capacity, k)
            if not self.one_launch and any(ks):
                yield Descriptor(PREFILL, capacity, tokens, 1)


def loop_of(descriptor: Descriptor) -> tuple[Callable[..., None], tuple[int, ...]]:
    """The Python loop that a descriptor stands for, and its arguments behind the speculator."""
    rows, steps, query_len = descriptor.num_reqs, descriptor.num_steps, descriptor.query_len
    if descriptor.kind == DECODE:
        return loop.decode_loop, (rows, steps)
    if descriptor.kind == PROPOSE:
        return loop.propose_loop, (rows, query_len, steps)
    return loop.prefill_loop, (rows, query_len)
