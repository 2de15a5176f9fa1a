"""What data-parallel ranks must agree on before a draft: capacity, kind of prefill, number of steps.

A rank that runs another number of forwards, or another padded size, than the rest leaves their collectives waiting.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from draftfuse.errors import InvalidBatchError, InvalidOptionError
from draftfuse.speculator import DraftBatch


@dataclass(frozen=True)
class AcrossRanks:
    """The batches of all data-parallel ranks in one scheduler step; equal on every rank.

    Args:
        num_reqs: requests of each rank; 0 where a rank has none and drafts on dead rows.
        num_tokens: query tokens of each rank (vLLM's ``num_tokens_across_dp``).
        max_query_len: most tokens of a request, of each rank.
    """

    num_reqs: tuple[int, ...]
    num_tokens: tuple[int, ...]
    max_query_len: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("num_reqs", "num_tokens", "max_query_len"):
            if not isinstance(given := getattr(self, name), (tuple, list)):
                raise InvalidOptionError(f"{name} of the ranks is no tuple", repr(given), "a tuple", "Pass one.")
        sizes = {len(self.num_reqs), len(self.num_tokens), len(self.max_query_len)}
        if len(sizes) != 1 or not self.num_reqs:
            todo = "Give each of the three a number for every rank."
            raise InvalidOptionError("the ranks are not described", sorted(sizes), "three of one length", todo)
        for name in ("num_reqs", "num_tokens", "max_query_len"):
            numbers = tuple(getattr(self, name))
            if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in numbers):
                raise InvalidOptionError(f"{name} of the ranks is no count", numbers, "ints >= 0", "Correct them.")
            object.__setattr__(self, name, numbers)

    @classmethod
    def gather(cls, batch: DraftBatch, k: int, group: Any) -> AcrossRanks:
        """Exchange the sizes of ``batch`` over ``group``, a process group for CPU tensors (gloo): one small all-gather.

        Raises:
            InvalidOptionError: ranks ask for different ``k``.
        """
        longest = batch.max_query_len or batch.num_tokens - batch.num_reqs + 1
        mine = torch.tensor([batch.num_reqs, batch.num_tokens, longest, k])
        found = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(found, mine, group=group)
        reqs, tokens, lengths, ks = zip(*(each.tolist() for each in found), strict=True)
        if len(set(ks)) != 1:
            raise InvalidOptionError("ranks ask for different k", list(ks), "one k", "Take k from what all ranks know.")
        return cls(reqs, tokens, lengths)

    @property
    def largest(self) -> int:
        """Requests of the fullest rank: every rank runs its capacity."""
        return max(self.num_reqs)

    def is_uniform(self, query_len: int) -> bool:
        """Whether each request of each rank has ``query_len`` tokens; a rank without requests goes along."""
        rows = zip(self.num_reqs, self.num_tokens, self.max_query_len, strict=True)
        return all(reqs == 0 or (longest == query_len and tokens == reqs * query_len) for reqs, tokens, longest in rows)

    def check(self, batch: DraftBatch) -> None:
        """Raise :class:`InvalidBatchError` unless one of the ranks has a batch of these sizes.

        A rank may give a larger ``max_query_len`` than its batch has, never a smaller one: a ragged batch could pass
        for a uniform one.
        """
        todo = "Gather the sizes anew in every scheduler step, on every rank."
        mine, ranks = (batch.num_reqs, batch.num_tokens), zip(self.num_reqs, self.num_tokens, strict=True)
        longest = [most for sizes, most in zip(ranks, self.max_query_len, strict=True) if sizes == mine]
        if not longest:
            raise InvalidBatchError("the batch is that of no rank", mine, "num_reqs, num_tokens of a rank", todo)
        if batch.max_query_len is not None and batch.num_reqs > 0 and max(longest) < batch.max_query_len:
            what, expected = "the batch has longer queries than its rank", f"at most {max(longest)} tokens a request"
            raise InvalidBatchError(what, f"max_query_len={batch.max_query_len}", expected, todo)


def check_across(across: object) -> AcrossRanks:
    """Raise :class:`InvalidOptionError` unless ``across`` describes ranks."""
    if not isinstance(across, AcrossRanks):
        todo = "Pass AcrossRanks.gather(batch, k, group), or None."
        raise InvalidOptionError("across does not describe ranks", repr(across), "draftfuse.AcrossRanks", todo)
    return across
