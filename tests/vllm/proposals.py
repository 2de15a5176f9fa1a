"""Proposals of a released speculator, as shipped and in one graph: run by test_proposal.py in a process of its own.

Usage: ``proposals.py FOLDER_OF_A_WHEEL KIND...``; prints one JSON line. *eagle3* takes hidden states of several
layers, the others those of the last; *drawn* samples; *static* leaves positions where they are.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import released

from draftfuse.vllm import load, patch
from draftfuse.vllm.plan import make_plan, plan_of
from draftfuse.vllm.versions import release_of

LENGTH, ROWS, K, HIDDEN, WORDS, PAGE, POOL = 64, 8, 3, 8, 61, 8, 400
TOKENS = 48
ROOT = Path(sys.argv[1])
MODULE = released.load(ROOT)
RELEASE = release_of(ROOT.name)
assert RELEASE is not None
patch.patch_speculator(MODULE, RELEASE)


class FlashAttentionMetadataBuilder:
    """Metadata with a schedule in a buffer of the builder's own, as FlashAttention 3 has it."""

    device, aot_schedule = "cuda", True

    def __init__(self) -> None:
        self.schedule = torch.zeros(ROWS, dtype=torch.int32)

    def build(self, common_prefix_len: int, common: Any) -> Any:
        self.schedule[: common.num_reqs] = common.seq_lens * 3
        return SimpleNamespace(**vars(common), schedule=self.schedule)


class Model:
    """One layer with a paged cache of its own; each token looks at what its request has up to itself."""

    def __init__(self, kind: str) -> None:
        make, self.writes = torch.Generator().manual_seed(0), kind != "static"
        self.embed, self.head = torch.randn(WORDS, HIDDEN, generator=make), torch.randn(HIDDEN, WORDS, generator=make)
        self.project = torch.randn(3 * HIDDEN, HIDDEN, generator=make) * 0.3
        self.cache = torch.randn(POOL, HIDDEN, generator=make)

    def __call__(self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any) -> Any:
        metadata = released.CONTEXT["metadata"]
        mixed = (self.embed[input_ids.long()] + hidden_states + positions[:, None] * 0.01).tanh()
        if metadata is None:
            return mixed
        given, out = metadata["layer"], torch.zeros_like(mixed)
        kept = given.slot_mapping[: len(mixed)] >= 0
        if self.writes:
            self.cache[given.slot_mapping[: len(mixed)][kept]] = mixed[kept]
        starts = given.query_start_loc.tolist()
        for row, length in enumerate(given.seq_lens.tolist()):
            for token in range(starts[row], min(starts[row + 1], len(mixed))):
                seen = torch.arange(length - (starts[row + 1] - token) + 1)
                slots = given.block_table_tensor[row, seen // PAGE].long() * PAGE + seen % PAGE
                out[token] = self.cache[slots].mean(0) + given.schedule[row] * 0.01
        return (mixed + out).tanh()

    def combine_hidden_states(self, joined: Any) -> Any:
        return joined @ self.project

    def compute_logits(self, hidden: Any) -> Any:
        return hidden @ self.head


class Tables:
    """vLLM's block tables: a state table by request, gathered rows for the batch."""

    cp_size = 1

    def __init__(self) -> None:
        self.state = torch.zeros(ROWS, LENGTH // PAGE, dtype=torch.int32)
        self.input_block_tables = [torch.zeros_like(self.state)]
        self.slot_mappings = torch.full((1, TOKENS), -1)

    def compute_slot_mappings(self, index: Any, starts: Any, positions: Any, tokens: int) -> Any:
        self.slot_mappings.fill_(-1)
        for row, state in enumerate(index.tolist()):
            for token in range(int(starts[row]), int(starts[row + 1])):
                at = int(positions[token])
                self.slot_mappings[0, token] = int(self.state[state, at // PAGE]) * PAGE + at % PAGE
        return self.slot_mappings[:, :tokens]

    def get_dummy_block_tables(self, rows: int) -> Any:
        return (self.input_block_tables[0][:rows],)

    def get_dummy_slot_mappings(self, tokens: int) -> Any:
        return self.slot_mappings.fill_(-1)[:, :tokens]


def configuration(kind: str) -> Any:
    sizes = [4, 8, 16, 32]
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, tensor_parallel_size=1),
        compilation_config=SimpleNamespace(
            inductor_compile_config={}, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1]
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=ROWS, max_num_batched_tokens=TOKENS),
        model_config=SimpleNamespace(max_model_len=LENGTH, dtype=torch.float32, use_fp64_gumbel=False),
        speculative_config=SimpleNamespace(
            method="eagle3" if kind == "eagle3" else "mtp",
            num_speculative_tokens=K,
            use_local_argmax_reduction=False,
            draft_sample_method="probabilistic" if kind == "drawn" else "greedy",
            uses_dynamic_speculative_decoding=lambda: False,
            draft_model_config=SimpleNamespace(
                get_hidden_size=lambda: HIDDEN, get_vocab_size=lambda: WORDS, hf_config=SimpleNamespace()
            ),
        ),
    )


def make_group() -> Any:
    builder = FlashAttentionMetadataBuilder()
    return SimpleNamespace(get_metadata_builder=lambda index: builder, layer_names=["layer"])


class Engine:
    """A speculator with what vLLM's runner hands it, captured."""

    def __init__(self, kind: str, asked: str, one_graph: str) -> None:
        self.kind = kind
        os.environ.update(DRAFTFUSE_VLLM=asked, DRAFTFUSE_VLLM_ONE_GRAPH=one_graph)
        advances = property(lambda self: kind != "static")
        cls = type("Tried", (MODULE.AutoRegressiveSpeculator,), {"advance_draft_positions": advances})
        cls.__abstractmethods__ = frozenset()
        self.target = sys.modules[f"{released.GPU}.input_batch"].InputBuffers(ROWS, TOKENS, torch.device("cpu"))
        self.spec = spec = cls(configuration(kind), torch.device("cpu"))
        self.group, self.tables, self.model = make_group(), Tables(), Model(kind)
        spec.model, spec.block_tables, spec.attn_groups = self.model, self.tables, [[make_group()]]
        spec.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
        spec.model_state = SimpleNamespace(prepare_attn=self.prepare_attn)
        spec.target_input_buffers, spec.target_attn_groups = self.target, [[self.group]]
        spec.init_cudagraph_manager(released.CUDAGraphMode.FULL_AND_PIECEWISE)
        self.propose(batch_of([5], 0), is_profile=True, dummy_run=True, skip_attn_for_dummy_run=True)
        if asked == "1":
            make_plan(spec, RELEASE)  # type: ignore[arg-type]
        self.capture()
        for tensor in self.buffers().values():
            tensor.zero_()  # what warm-ups left differs
        self.model.cache.copy_(Model(kind).cache)
        make = torch.Generator().manual_seed(5)
        self.tables.state.copy_(torch.randint(1, POOL // PAGE, self.tables.state.shape, generator=make).int())

    def prepare_attn(self, batch: Any, mode: Any, tables: Any, slots: Any, groups: Any, *rest: Any, **more: Any) -> Any:
        common = {
            "num_reqs": len(batch.seq_lens),
            "query_start_loc_gpu": batch.query_start_loc,
            "seq_lens": batch.seq_lens,
        }
        return released.build_attn_metadata(attn_groups=groups, block_tables=tables, slot_mappings=slots, **common)

    def capture(self) -> None:
        with torch.inference_mode():
            if ROOT.name.startswith("0.26"):
                self.spec.capture()
                return
            utilities = sys.modules[f"{released.GPU}.cudagraph_utils"]
            states = {}
            for descs in self.spec.prefill_cudagraph_manager._capture_descs.values():
                for desc in descs:
                    rows = desc.num_reqs or min(desc.num_tokens, ROWS)
                    full = desc.cg_mode is released.CUDAGraphMode.FULL
                    state = utilities.prepare_inputs_to_capture(
                        rows, desc.num_tokens, self.spec.model_state, self.target, self.tables, [[self.group]],
                        self.spec.kv_cache_config, skip_attn=not full,
                    )  # fmt: skip
                    states[desc] = utilities.AttentionStatePair(state, state)
            self.spec.capture(states)

    @torch.inference_mode()
    def propose(self, given: Any, **switches: Any) -> torch.Tensor:
        """What vLLM's runner does between target and draft: the target's buffers, metadata and slots."""
        target, tables = self.target, self.tables
        for name in ("input_ids", "positions", "query_start_loc", "seq_lens"):
            getattr(target, name)[: len(getattr(given, name))] = getattr(given, name)
        rows = given.num_reqs
        padded = given.rows_padded
        target.query_start_loc[rows + 1 :], target.seq_lens[rows:] = given.num_tokens, 0
        tables.input_block_tables[0][:rows] = tables.state[given.idx_mapping.long()]
        tables.input_block_tables[0][rows:] = 0
        slots = tables.compute_slot_mappings(given.idx_mapping, target.query_start_loc, target.positions, TOKENS)
        batch = SimpleNamespace(
            **{**vars(given), "input_ids": target.input_ids[: given.num_tokens_after_padding],
               "positions": target.positions[: given.num_tokens_after_padding],
               "query_start_loc": target.query_start_loc[: padded + 1], "seq_lens": target.seq_lens[:padded]}
        )  # fmt: skip
        by_layer = released.slots_by_layer(slots, self.spec.kv_cache_config)
        metadata = self.prepare_attn(batch, None, tables.input_block_tables, slots, [[self.group]])
        aux = list(given.aux) if self.kind == "eagle3" else None
        result: torch.Tensor = self.spec.propose(
            batch, metadata, by_layer, given.aux[0], aux, given.num_sampled, given.num_rejected,
            given.last_sampled, given.next_prefill, given.temperature, given.seeds, mm_inputs=None, **switches,
        )  # fmt: skip
        return result

    def buffers(self) -> dict[str, torch.Tensor]:
        """All that a proposal writes."""
        spec = self.spec
        found = {
            name: getattr(spec.input_buffers, name)
            for name in ("input_ids", "positions", "query_start_loc", "seq_lens")
        }
        for name in ("last_token_indices", "idx_mapping", "temperature", "seeds", "hidden_states", "draft_logits"):
            found[name] = getattr(spec, name)
        found |= {"cache": self.model.cache, "slots": self.tables.slot_mappings}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def batch_of(lengths: list[int], seed: int, padded: tuple[int, int] | None = None, prompt: bool = False) -> Any:
    """A batch of requests with so many tokens each; ``padded`` are the tokens and rows of vLLM's graph."""
    make = torch.Generator().manual_seed(seed)
    rows, tokens = len(lengths), sum(lengths)
    tokens_padded, rows_padded = padded or (tokens, rows)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    before = torch.randint(0, LENGTH - 12, (rows,), generator=make)
    before[0] = LENGTH - lengths[0] if seed % 3 == 2 else before[0]  # at the end of the model's length
    positions = torch.cat([torch.arange(n) + b for n, b in zip(lengths, before.tolist(), strict=True)])
    rejected = torch.tensor([0 if prompt else int(torch.randint(0, n, (1,), generator=make)) for n in lengths])
    words = torch.randint(0, WORDS, (tokens,), generator=make).int()
    return SimpleNamespace(
        num_reqs=rows, num_tokens=tokens, num_tokens_after_padding=tokens_padded, rows_padded=rows_padded,
        num_scheduled_tokens=torch.tensor(lengths).numpy(),
        seq_lens_cpu_upper_bound=(before + torch.tensor(lengths)).int(),
        input_ids=words, positions=positions, query_start_loc=starts, seq_lens=(before + torch.tensor(lengths)).int(),
        idx_mapping=torch.randperm(ROWS, generator=make)[:rows].int(), num_rejected=rejected.int(),
        num_sampled=torch.full((rows,), 0 if prompt else 1).int(),
        last_sampled=torch.randint(0, WORDS, (ROWS, 1), generator=make),
        next_prefill=torch.randint(0, WORDS, (ROWS,), generator=make).int(),
        temperature=torch.rand(ROWS, generator=make), seeds=torch.randint(0, 99, (ROWS,), generator=make),
        aux=torch.randn(3, tokens_padded, HIDDEN, generator=make),
    )  # fmt: skip


def batches() -> list[Any]:
    full = {1: (4, 1), 2: (8, 2), 3: (16, 4), 4: (16, 4), 5: (32, 8), 8: (32, 8)}
    uniform = [batch_of([K + 1] * rows, rows, full[rows], rows == 5) for rows in (1, 3, 8, 2, 5, 4, 1)]
    others = [batch_of([9, 20], 20, prompt=True), batch_of([1, 7], 21), batch_of([4, 4], 22, (9, 2))]
    return [*uniform[:3], others[0], *uniform[3:5], others[1], others[2], *uniform[5:]]


def run(kind: str, asked: str, one_graph: str) -> tuple[list[Any], list[Any], str]:
    engine = Engine(kind, asked, one_graph)
    drafts, states = [], []
    for given in batches():
        drafts.append(engine.propose(given).tolist())
        states.append({name: tensor.clone() for name, tensor in engine.buffers().items()})
    plan = plan_of(engine.spec)
    return drafts, states, plan.explain() if plan else ""


def differing(left: list[Any], right: list[Any]) -> list[str]:
    """Names of the buffers that differ after some proposal."""
    return sorted({name for a, b in zip(left, right, strict=True) for name in a if not torch.equal(a[name], b[name])})


@contextmanager
def with_kernels() -> Iterator[None]:
    """The kernels of draftfuse.vllm, interpreted, where the CPU would run their references."""
    before = load.Loader.__init__

    def with_kernels(self: Any, spec: Any) -> None:
        before(self, spec)
        self.on_cuda = True

    load.Loader.__init__ = with_kernels  # type: ignore[method-assign]
    yield
    load.Loader.__init__ = before  # type: ignore[method-assign]


@contextmanager
def nothing_rejected() -> Iterator[None]:
    """The control: the decode steps see the length before rejections."""
    before = load.Turn.__call__

    def forgetful(self: Any) -> None:
        self.tensors[1].zero_()
        before(self)

    load.Turn.__call__ = forgetful  # type: ignore[method-assign]
    yield
    load.Turn.__call__ = before  # type: ignore[method-assign]


def compare(kind: str) -> dict[str, Any]:
    shipped, at_shipped, _ = run(kind, "0", "1")
    report: dict[str, Any] = {"distinct": len({t for batch in shipped for row in batch for t in row})}
    arms = {"decode": nullcontext, "one graph": nullcontext, "kernels": with_kernels, "control": nothing_rejected}
    for name, changed in arms.items():
        with changed():
            drafts, states, told = run(kind, "1", "0" if name == "decode" else "1")
        report[name] = {"equal": drafts == shipped, "differing": differing(states, at_shipped), "told": told}
    return report


if __name__ == "__main__":
    print("RESULT " + json.dumps({kind: compare(kind) for kind in sys.argv[2:]}), flush=True)
