"""The speculator of a fuzzed program, and the check that it drafts the same compiled and eagerly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import draftfuse
from draftfuse import AttentionGroup, DraftBatch, DraftInputs, ops, python_state
from tests.fuzz.builders import KINDS
from tests.fuzz.programs import Program

V, H = 23, 8
LIBRARY = torch.library.Library("fuzz", "FRAGMENT")
LIBRARY.define("mixed(Tensor x, Tensor(a!) memory) -> Tensor")


def mixed(x: Tensor, memory: Tensor) -> Tensor:
    """An opaque operator that writes one argument and returns a value."""
    memory.mul_(0.5).add_(x.mean(1))
    return x + memory.unsqueeze(1)


LIBRARY.impl("mixed", mixed, "CPU")
LIBRARY.impl("mixed", mixed, "CUDA")
LIBRARY.impl("mixed", lambda x, memory: torch.empty_like(x), "Meta")


class Fuzzed:
    """See :class:`Program` for what each field does."""

    def __init__(self, program: Program, device: str = "cpu") -> None:
        g = torch.Generator().manual_seed(program.weights)
        self.program, self.device = program, device

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).to(device)

        self.num_speculative_tokens, self.max_num_reqs = program.k, program.rows
        self.max_model_len, self.advance_positions = program.context, program.advance != "static"
        with_logits = V if program.sampler == "logits" else None
        tokens = program.rows * max(program.k + 1, program.context)
        self.inputs = DraftInputs.allocate(
            program.rows, program.k, H, vocab_size=with_logits, max_num_tokens=tokens, device=device
        )
        columns = -(-program.context // program.page)
        self.attn_groups = [self._group(i, columns) for i in range(len(program.builders))]
        self.pools = [drawn(1 + (program.rows + 1) * columns, program.page, 2, 4) for _ in range(4)]
        self.embed = drawn(V, H)
        self.place = drawn(program.context, H)
        self.mix = [drawn(H, H) / 3 for _ in range(3)]
        self.memory = torch.zeros(program.rows + 1, device=device)
        self.history = torch.zeros(program.rows + 1, dtype=torch.int64, device=device)

    def _group(self, index: int, columns: int) -> AttentionGroup:
        p = self.program
        table = torch.arange((p.rows + 1) * columns, dtype=torch.int32).view(p.rows + 1, columns) + 1
        slots = torch.full_like(self.inputs.positions, -1)
        builder = KINDS[p.builders[index]](p.windows[index], p.rows, self.device)
        return AttentionGroup(builder, table.to(self.device), slots, p.page, (f"layer{index}",))

    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        x = self.embed[inputs.input_ids] + inputs.hidden_states * 0.3 + self.place[inputs.positions]
        rows = inputs.seq_lens.shape[0]
        decode = x.shape[0] == rows and len(metadata) > 0
        for layer in range(self.program.layers):
            x = self.attend(x, metadata["layer0"], layer, None if decode else inputs.query_start_loc)
        for index in range(len(self.program.builders)):
            extra = metadata[f"layer{index}"].extra
            x = x + torch.sin(extra * 0.3).unsqueeze(1) * 0.5 if decode else x
        if decode:
            x = self.remember(x, inputs)
        hidden = torch.tanh(x @ self.mix[2])
        return hidden, self.fed_back(hidden)

    def attend(self, x: Tensor, meta: Any, layer: int, starts: Tensor | None) -> Tensor:
        heads = (x @ self.mix[layer]).view(-1, 2, 4)
        key, value = self.pools[2 * layer], self.pools[2 * layer + 1]
        ops.write_kv(heads, heads * 0.5, key, value, meta.slot_mapping)
        return x + ops.paged_attention(heads, key, value, meta.block_table, meta.seq_lens, starts, 0.5).flatten(1)

    def remember(self, x: Tensor, inputs: DraftInputs) -> Tensor:
        rows, kind = x.shape[0], self.program.memory
        mine = self.memory[:rows]
        if self.program.local_writes:
            local = torch.zeros_like(x)
            local[:, :4] = x[:, 4:]
            local[:, 4:].add_(x[:, :4] * 0.5)
            x = x + local
        if kind == "decayed":
            mine.mul_(0.5).add_(x.mean(1))
            x = x + mine.unsqueeze(1)
        elif kind == "indexed":
            x = x + self.embed[self.history[:rows]]
            self.history[:rows] = inputs.input_ids
        elif kind == "counted":
            self.history[:rows].add_(inputs.positions % 3 + 1)
            x = x * (1 + 0.1 * (self.history[:rows] % 5)).unsqueeze(1)
        elif kind == "opaque":
            x = torch.ops.fuzz.mixed(x, mine)
        return x

    def fed_back(self, hidden: Tensor) -> Tensor:
        if self.program.feedback == "hidden":
            return hidden
        return hidden @ self.mix[0] if self.program.feedback == "other" else torch.zeros_like(hidden)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        logits, rows, inputs = hidden @ self.embed.t(), hidden.shape[0], self.inputs
        if self.program.sampler == "gumbel":
            return ops.gumbel_sample(logits, inputs.temperature[:rows], inputs.seeds[:rows], inputs.positions[:rows])
        if inputs.draft_logits is not None:
            inputs.draft_logits[:rows, step].copy_(logits)
        return logits.argmax(-1)

    def advance(self, tokens: Tensor, hidden: Tensor, step: int) -> None:
        rows, inputs, how = tokens.shape[0], self.inputs, self.program.advance
        if how == "reordered":
            ops.advance_positions(inputs.positions[:rows], inputs.seq_lens[:rows], self.max_model_len)
        if how != "late_ids":
            inputs.input_ids[:rows].copy_(tokens)
        inputs.hidden_states[:rows].copy_(hidden)
        if how in ("default", "late_ids"):
            ops.advance_positions(inputs.positions[:rows], inputs.seq_lens[:rows], self.max_model_len)
        if how == "late_ids":
            inputs.input_ids[:rows] = (tokens + inputs.positions[:rows]) % V


def batch_of(program: Program, index: int, device: str = "cpu") -> DraftBatch:
    """Call ``index`` of a program."""
    lengths, g = program.batches[index], torch.Generator().manual_seed(program.weights + index)
    queries = [program.k + 1 if program.uniform else min(n, 1 + (n + index) % (program.k + 1)) for n in lengths]
    gone = [min(program.rejected[i % len(program.rejected)], q - 1) for i, q in enumerate(queries)]
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    total, rows = sum(queries), len(lengths)
    batch = DraftBatch(
        num_reqs=rows,
        num_tokens=total,
        max_seq_len=max(lengths),
        hidden_states=torch.randn(total, H, generator=g),
        input_ids=torch.randint(V, (total,), generator=g),
        positions=torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)]),
        query_start_loc=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_rejected=torch.tensor(gone),
        last_sampled=torch.randint(V, (rows,), generator=g),
        temperature=torch.rand(rows, generator=g) * 2,
        seeds=torch.randint(1 << 40, (rows,), generator=g),
        idx_mapping=torch.arange(rows),
        max_query_len=program.k + 1 if program.uniform else None,
    )
    tensors = {name: t.to(device) for name, t in vars(batch).items() if isinstance(t, Tensor)}
    return replace(batch, **tensors)


def mismatch(program: Program, compiler: str = "none", device: str = "cpu", **options: Any) -> str | None:
    """What differs between the compiled and the eager loop of ``program``; None where nothing does."""
    spec, twin = Fuzzed(program, device), Fuzzed(program, device)
    fused = draftfuse.compile(spec, compiler=compiler, **options)
    eager = draftfuse.compile(twin, mode="eager", request_capacities=fused.ladder.capacities)
    for index in range(len(program.batches)):
        k = program.ks[index % len(program.ks)]
        tokens = fused.propose(batch_of(program, index, device), k, copy=True)
        expected = eager.propose(batch_of(program, index, device), k, copy=True)
        if not torch.equal(tokens, expected):
            return f"call {index}: tokens {tokens.tolist()}, eager {expected.tolist()}"
        found = _state_mismatch(spec, twin, tokens.shape[0], exact=compiler == "none")
        if found is not None:
            return f"call {index}: {found}"
    return None


def _state_mismatch(spec: Fuzzed, twin: Fuzzed, rows: int, exact: bool) -> str | None:
    others = python_state.of_speculator(twin, wide=False).tensors
    for path, tensor in python_state.of_speculator(spec, wide=False).tensors.items():
        other, live = others[path], tensor[:rows] if path.startswith("spec.inputs") else tensor
        other = other[:rows] if path.startswith("spec.inputs") else other
        same = (
            torch.equal(live, other) if exact else torch.allclose(live.double(), other.double(), rtol=1e-3, atol=1e-3)
        )
        if not same:
            return f"{path} differs: {live.flatten()[:8].tolist()}, eager {other.flatten()[:8].tolist()}"
    return None
