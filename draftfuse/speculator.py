"""What a user writes: the speculator protocol, its persistent inputs, metadata builders and batches.

Shapes: R requests (rows), T query tokens, H hidden size, K speculative tokens, V vocabulary, L max_model_len.

*A row is live while* ``positions < seq_lens``. Padded rows enter with ``seq_lens == 0``; a row that reaches
``max_model_len`` gets ``seq_lens = positions``, which makes it dead the same way: it writes no KV and moves no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass
class DraftInputs:
    """Persistent input buffers of a draft loop; a captured graph holds their addresses.

    Buffers of an engine are at least as long as the largest batch. :meth:`allocate` adds one row more, so that one
    symbolic trace covers every request capacity (a slice as long as its buffer would be a case of its own).
    """

    input_ids: Tensor  # i32[T]
    positions: Tensor  # i64[T]
    seq_lens: Tensor  # i32[R], includes the token being drafted; 0 = padded row
    query_start_loc: Tensor  # i32[R+1]
    idx_mapping: Tensor  # i64[R], row -> request state; -1 = padded row
    hidden_states: Tensor  # [T, H]
    last_token_indices: Tensor  # i64[R]
    temperature: Tensor  # f32[R]; 0 = greedy
    seeds: Tensor  # i64[R]
    draft_tokens: Tensor  # i64[R, K]
    draft_logits: Tensor | None = None  # [R, K, V]

    @classmethod
    def allocate(
        cls,
        max_num_reqs: int,
        num_speculative_tokens: int,
        hidden_size: int,
        *,
        max_num_tokens: int | None = None,
        vocab_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DraftInputs:
        """Allocate zeroed buffers. ``vocab_size`` asks for ``draft_logits``; tokens default to R * (K + 1)."""
        r = max_num_reqs + 1
        t = (max_num_tokens or max_num_reqs * (num_speculative_tokens + 1)) + 1
        i32, i64, k = torch.int32, torch.int64, num_speculative_tokens

        def new(*shape: int, dt: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dt, device=device)

        return cls(
            input_ids=new(t, dt=i32),
            positions=new(t, dt=i64),
            seq_lens=new(r, dt=i32),
            query_start_loc=new(r + 1, dt=i32),
            idx_mapping=torch.full((r,), -1, dtype=i64, device=device),
            hidden_states=new(t, hidden_size, dt=dtype),
            last_token_indices=new(r, dt=i64),
            temperature=new(r, dt=torch.float32),
            seeds=new(r, dt=i64),
            draft_tokens=new(r, k, dt=i64),
            draft_logits=None if vocab_size is None else new(r, k, vocab_size, dt=dtype),
        )

    def view(self, num_reqs: int, num_tokens: int) -> DraftInputs:
        """The same buffers cut to ``num_reqs`` rows and ``num_tokens`` tokens (views; nothing is copied)."""
        return DraftInputs(
            input_ids=self.input_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            seq_lens=self.seq_lens[:num_reqs],
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            idx_mapping=self.idx_mapping[:num_reqs],
            hidden_states=self.hidden_states[:num_tokens],
            last_token_indices=self.last_token_indices[:num_reqs],
            temperature=self.temperature[:num_reqs],
            seeds=self.seeds[:num_reqs],
            draft_tokens=self.draft_tokens[:num_reqs],
            draft_logits=None if self.draft_logits is None else self.draft_logits[:num_reqs],
        )

    def named_tensors(self) -> dict[str, Tensor]:
        """Buffers by field name, absent ones left out."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: t for name, t in pairs if isinstance(t, Tensor)}


@dataclass
class CommonMetadata:
    """What a metadata builder may read: views of the persistent inputs, this group's tables, and host upper bounds.

    Attention of row r reads ``block_table[r]``; the batch row and the table row are the same.

    Padded rows have ``seq_lens`` 0, positions 0, ``idx_mapping`` and slots -1, and one token each; their rows of
    ``block_table`` hold *anything* (an engine leaves -1 or old blocks there). A builder may compute with those rows,
    never index with what comes of them, and nothing of them may reach a live row: mask by ``seq_lens > 0``. The audit
    checks it, in the same way on every device.
    """

    positions: Tensor  # i64[T]
    seq_lens: Tensor  # i32[R]
    query_start_loc: Tensor  # i32[R+1]
    idx_mapping: Tensor  # i64[R]
    block_table: Tensor  # i32[R, blocks]
    slot_mapping: Tensor  # i64[T]; -1 = write nothing
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    page_size: int
    draft_step: int = 0

    def replace(self, **changes: Any) -> CommonMetadata:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Guard:
    """A host decision frozen at capture. ``value`` is compared with ``current(batch)`` before every replay.

    ``kind`` is ``"equal"`` (the host value must be the captured one) or ``"at_most"`` (it must not exceed it).
    ``source`` names a host attribute of the batch (``num_reqs``, ``num_tokens``, ``max_seq_len``) or is a callable
    without arguments that returns the value now.
    """

    name: str
    value: int | float | bool | str
    source: Any
    kind: str = "equal"


@runtime_checkable
class MetadataBuilder(Protocol):
    """Builds what an attention backend derives from :class:`CommonMetadata`.

    Only ``build`` is required. ``refresh(metadata, common)`` (registered ops only), ``guards(metadata)`` and
    ``invalidate(metadata)`` are looked up by name; a class attribute ``refresh_kind`` may say ``"host-planned"`` or
    ``"static"``; without it, the kind is derived from the trace.
    """

    def build(self, common: CommonMetadata) -> Any:
        """Return a dataclass or dict of tensors and scalars for ``common``."""


@dataclass
class AttentionGroup:
    """Layers that share one metadata object, one block table and one slot mapping."""

    builder: MetadataBuilder
    block_table: Tensor  # i32[max_num_reqs, blocks]
    slot_mapping: Tensor  # i64[max_num_tokens], persistent
    page_size: int
    layer_names: Sequence[str] = ("draft",)
    kv_caches: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)  # by layer; what write_kv may write


@dataclass
class DraftBatch:
    """One scheduler step's verified tokens, from which the next draft starts.

    ``num_reqs``, ``num_tokens`` and ``max_seq_len`` are host integers, so that guards need no device sync.
    """

    num_reqs: int
    num_tokens: int
    max_seq_len: int
    hidden_states: Tensor  # [T, H] of the target
    input_ids: Tensor  # i32/i64[T], the tokens that the target saw
    positions: Tensor  # i64[T]
    query_start_loc: Tensor  # i32[R+1]
    seq_lens: Tensor  # i32[R], rejected tokens included
    num_rejected: Tensor  # i64[R]
    last_sampled: Tensor  # i64[R], the newest verified token of each request
    temperature: Tensor  # f32[R]
    seeds: Tensor  # i64[R]
    idx_mapping: Tensor  # i64[R]
    max_query_len: int | None = None  # host; num_reqs * max_query_len == num_tokens says that the batch is uniform


class Speculator:
    """Documents the protocol and gives defaults. Nothing has to inherit from it: any object with these names does."""

    num_speculative_tokens: int
    max_num_reqs: int
    max_model_len: int
    advance_positions: bool = True
    inputs: DraftInputs
    attn_groups: Sequence[AttentionGroup]

    def prefill(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Draft step 0 over ragged queries; :meth:`forward` unless overridden. Returns two [T, H]."""
        return self.forward(inputs, metadata)

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """One forward. ``metadata`` maps a layer name to its group's object. Returns (for logits, to feed back)."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        """Draw one token a row from [R, H]; returns int64[R]. ``step`` is the draft step, a Python int."""
        raise NotImplementedError(f"{type(self).__name__} has no sample")

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        """Write the next step's inputs in place: ids, hidden states, positions, lengths."""
        from draftfuse.ops import advance_positions

        rows = tokens.shape[0]
        self.inputs.input_ids[:rows].copy_(tokens)
        self.inputs.hidden_states[:rows].copy_(hidden)
        if self.advance_positions:
            advance_positions(self.inputs.positions[:rows], self.inputs.seq_lens[:rows], self.max_model_len)
