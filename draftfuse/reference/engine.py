"""A minimal engine for speculative decoding: a batch of requests over a paged KV cache, draft, verify, accept, repeat.

The target draws its own token at every position (greedy, or keyed by seed and position) and accepts drafts as long as
they are the same. So the text is what the target generates alone, whatever is drafted; drafts only decide how many
tokens a step yields. With ``k=0`` the same code is that generation of the target alone.

R requests, T tokens, K drafts, H hidden, V vocabulary, B blocks a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from draftfuse.errors import InvalidBatchError
from draftfuse.fused import FusedDraft
from draftfuse.ops import compute_slot_mapping, gumbel_sample
from draftfuse.reference.llama import PagedMetadata
from draftfuse.reference.target import Target
from draftfuse.speculator import DraftBatch


@dataclass
class Request:
    """One text in the making. The target has keys and values of the first ``cached`` tokens."""

    index: int
    tokens: list[int]
    end: int
    temperature: float
    seed: int
    stop: int | None
    cached: int = 0

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.end

    def extend(self, new: list[int]) -> None:
        """Take over verified tokens, up to the length asked for or the stop token."""
        if self.stop is not None and self.stop in new:
            new = new[: new.index(self.stop) + 1]
            self.end = min(self.end, len(self.tokens) + len(new))
        self.tokens = (self.tokens + new)[: self.end]


@dataclass
class Generation:
    """What one run came to."""

    tokens: list[list[int]] = field(default_factory=list)  # of each request, without its prompt
    drafts: list[Tensor] = field(default_factory=list)  # each proposal, int64[R, K] of the rows of that time
    accepted: list[int] = field(default_factory=list)  # drafts accepted, of each request at each step
    first_batch: DraftBatch | None = None  # what the first proposal started from

    @property
    def acceptance_length(self) -> float:
        """Mean number of drafts accepted a step; the token that the target adds is not counted."""
        return sum(self.accepted) / max(1, len(self.accepted))


class Engine:
    """Runs ``target`` and, if there is one, a compiled draft loop. Pages are dealt out shuffled, so tables matter."""

    def __init__(self, target: Target, fused: FusedDraft | None = None) -> None:
        self.target, self.fused, self.limits, self.device = target, fused, target.limits, target.device
        pages = self.limits.max_num_reqs * self.limits.blocks
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(0))
        self.pages = order.to(self.device, torch.int32).view(self.limits.max_num_reqs, self.limits.blocks)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        k: int | None = None,
        temperature: float = 0.0,
        seed: int = 0,
        stop: int | None = None,
    ) -> Generation:
        """Continue ``prompts``.

        Args:
            prompts: token ids, at least one a prompt.
            max_new_tokens: for each request.
            k: drafts a step; the compiled loop's K by default, 0 for the target alone.
            temperature: 0 is greedy.
            seed: request i draws with the seed ``seed + i``.
            stop: a token that ends a text.

        Raises:
            InvalidBatchError: more prompts, or longer texts, than memory was allocated for.
        """
        k = (self.fused.ladder.max_k if self.fused else 0) if k is None else k
        self._check(prompts, max_new_tokens, k)
        requests = [
            Request(i, list(prompt), len(prompt) + max_new_tokens, temperature, seed + i, stop)
            for i, prompt in enumerate(prompts)
        ]
        result = Generation()
        self._run(requests, k, result)
        result.tokens = [r.tokens[len(prompt) :] for r, prompt in zip(requests, prompts, strict=True)]
        return result

    def _run(self, active: list[Request], k: int, result: Generation) -> None:
        drafts = torch.empty(len(active), 0, dtype=torch.int64, device=self.device)
        while active:
            batch = self._verify(active, drafts, result)
            going = [row for row, request in enumerate(active) if not request.done]
            active = [active[row] for row in going]
            if active:
                drafts = self._propose(batch, k, result)[going]

    def _check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, k: int) -> None:
        todo = "Allocate larger Limits, or ask for less."
        limits, longest = self.limits, max(map(len, prompts), default=0) + max_new_tokens + k
        if not 1 <= len(prompts) <= limits.max_num_reqs or not all(prompts):
            expected = f"1..{limits.max_num_reqs}, none of them empty"
            raise InvalidBatchError("the prompts do not fit", list(map(len, prompts)), expected, todo)
        if max_new_tokens < 1 or longest > limits.max_model_len:
            expected = f"1 new token or more, and at most {limits.max_model_len} tokens"
            raise InvalidBatchError("prompt, text and drafts do not fit", longest, expected, todo)

    def _tensor(self, values: object, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    # ---- draft

    def _propose(self, batch: DraftBatch, k: int, result: Generation) -> Tensor:
        """Draft for every row; the rows share the target's page numbers."""
        if k == 0 or self.fused is None:
            return batch.last_sampled.new_empty(batch.num_reqs, 0)
        for group in self.fused.spec.attn_groups:
            group.block_table[: batch.num_reqs].copy_(self.pages[batch.idx_mapping])
        result.first_batch = result.first_batch or batch
        result.drafts.append(self.fused.propose(batch, k, copy=True))
        return result.drafts[-1]

    # ---- verify

    def _verify(self, active: list[Request], drafts: Tensor, result: Generation) -> DraftBatch:
        """Run the target over new tokens and drafts, accept, and return the batch that the next drafts start from."""
        batch, k = self._schedule(active, drafts), drafts.shape[1]
        batch.hidden_states = self.target.forward(batch.input_ids, batch.positions, self._metadata(batch))
        own = self._sample(batch, k)
        accepted = (own[:, :k] == drafts).long().cumprod(1).sum(1)
        batch.num_rejected, batch.last_sampled = k - accepted, own.gather(1, accepted[:, None]).squeeze(1)
        for request, count, tokens in zip(active, accepted.tolist(), own.tolist(), strict=True):
            request.cached = len(request.tokens) + count
            request.extend(tokens[: count + 1])
        result.accepted += accepted.tolist() if k else []
        return batch

    def _schedule(self, active: list[Request], drafts: Tensor) -> DraftBatch:
        """All tokens that the target has not seen: a prompt, or one token and its drafts. The rest comes in _verify."""
        queries = [r.tokens[r.cached :] + d for r, d in zip(active, drafts.tolist(), strict=True)]
        lengths = [r.cached + len(q) for r, q in zip(active, queries, strict=True)]
        positions = [p for r, length in zip(active, lengths, strict=True) for p in range(r.cached, length)]
        rows = self._tensor([r.index for r in active])
        return DraftBatch(
            num_reqs=len(active),
            num_tokens=len(positions),
            max_seq_len=max(lengths),
            hidden_states=torch.empty(0),
            input_ids=self._tensor([token for query in queries for token in query]),
            positions=self._tensor(positions),
            query_start_loc=self._tensor([0, *accumulate(map(len, queries))], torch.int32),
            seq_lens=self._tensor(lengths, torch.int32),
            num_rejected=torch.zeros_like(rows),
            last_sampled=torch.zeros_like(rows),
            temperature=self._tensor([r.temperature for r in active], torch.float32),
            seeds=self._tensor([r.seed for r in active]),
            idx_mapping=rows,
            max_query_len=max(map(len, queries)),
        )

    def _metadata(self, batch: DraftBatch) -> PagedMetadata:
        table, starts = self.pages[batch.idx_mapping], batch.query_start_loc
        slots = compute_slot_mapping(batch.positions, batch.seq_lens, table, self.limits.page_size, starts)
        return PagedMetadata(batch.seq_lens, table, slots, starts)

    def _sample(self, batch: DraftBatch, k: int) -> Tensor:
        """The target's own token after each row's last k + 1 tokens, int64[R, k + 1], keyed by (seed, its place)."""
        last = batch.query_start_loc[1:, None].long() - 1
        at = (last - k + torch.arange(k + 1, device=self.device)).flatten()
        logits, places = self.target.logits(batch.hidden_states[at]), batch.positions[at] + 1
        temperature, seeds = (t.repeat_interleave(k + 1) for t in (batch.temperature, batch.seeds))
        return gumbel_sample(logits, temperature, seeds, places, "verify").view(-1, k + 1)
