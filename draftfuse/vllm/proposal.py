"""vLLM's whole ``propose`` for a uniform batch: one kernel that loads the inputs, then one CUDA graph.

vLLM 0.25 and 0.26 replay one graph for the draft prefill and, through draftfuse, one for all decode steps. Around them
run copies, two kernels launched from Python, the projection of the target's hidden states, and two look-ups of a graph.
Here the projection, vLLM's ``_prefill``, the inputs of the decode steps and the steps are captured as one graph, by
vLLM's own graph manager and with the arguments that vLLM captured its prefill with. What else ``propose`` does is done
by :class:`draftfuse.vllm.load.Loader`. Every other batch goes to vLLM's method.

``R`` requests, ``T`` tokens with vLLM's padding, ``K`` speculative tokens, ``H`` hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from draftfuse.vllm.asked import ONE_GRAPH, one_graph
from draftfuse.vllm.contract import HostWatch
from draftfuse.vllm.load import Loader, Turn
from draftfuse.vllm.plan import Plan
from draftfuse.vllm.sources import digest, overridden
from draftfuse.vllm.steps import draft, is_full

SEEN = "_draftfuse_seen"  # the attribute of a speculator that says which hidden states it is given
Given = tuple[tuple[Any, ...], dict[str, Any]]  # what vLLM captured its prefill with, after the function


def remember(spec: Any, aux: list[Tensor] | None) -> None:
    """Keep width and dtype of the target's hidden states, of the first proposal that is asked for: vLLM's profiling."""
    if not hasattr(spec, SEEN):
        setattr(spec, SEEN, tuple((x.shape[1], x.dtype) for x in aux or ()))


@contextmanager
def recorded(manager: Any) -> Iterator[list[Given]]:
    """While this holds, keep what ``manager`` captures with."""
    given: list[Given] = []
    if manager is None:
        yield given
        return
    capture = manager.capture

    def kept(function: Any, *args: Any, **kwargs: Any) -> Any:
        given.append((args, kwargs))
        return capture(function, *args, **kwargs)

    manager.capture = kept
    try:
        yield given
    finally:
        del manager.capture


@torch.inference_mode()
def make_proposal(spec: Any, plan: Plan, given: list[Given]) -> Proposal | None:
    """Capture the graphs; None, with a note, where the proposals of ``spec`` have to stay vLLM's."""
    reason = refusal(spec, plan, given)
    if not reason:
        proposal = Proposal(spec, plan)
        reason = proposal.objection()
    if reason:
        plan.note(f"propose as vLLM ships it around the decode steps, because {reason}")
        return None
    proposal.capture(given[0])
    return proposal


def refusal(spec: Any, plan: Plan, given: list[Given]) -> str:
    """Why no graph of whole proposals is tried; empty if nothing stands against it."""
    if not one_graph():
        return f"{ONE_GRAPH}=0"
    if not given or getattr(spec, "decode_cudagraph_manager", None) is None:
        return "vLLM captured no draft prefill"
    if digest(plan.release) != plan.release.digest:
        return "the text of propose, or of what it calls, is not the one that was read"
    if name := overridden(type(spec), plan.release):
        return f"{type(spec).__name__} has a {name} of its own"
    if spec.dp_size > 1:
        return "data-parallel ranks agree on every batch"
    if not hasattr(spec, SEEN):
        return "no proposal was asked for before the capture"
    return ""


@dataclass(frozen=True)
class Entry:
    """What one shape of batch replays."""

    manager: Any
    descriptor: Any
    joined: Tensor | None  # [T, sum of H]: the target's hidden states side by side
    hidden: Tensor  # [T, H], a view of vLLM's buffer
    shapes: list[torch.Size]
    drafts: Tensor  # [R, K], a view of vLLM's buffer


class Proposal:
    """The graphs of whole proposals of one speculator, and the way to them."""

    def __init__(self, spec: Any, plan: Plan) -> None:
        self.spec, self.plan = spec, plan
        self.query_len = spec.num_speculative_steps + 1
        self.prefill, self.decode = spec.prefill_cudagraph_manager, spec.decode_cudagraph_manager
        self.pairs = pairs(self.prefill, self.decode, self.query_len)
        self.seen: tuple[tuple[int, torch.dtype], ...] = getattr(spec, SEEN)
        self.joined: Tensor | None = None
        if self.seen and self.pairs:
            rows = max(desc.num_tokens for found in self.pairs.values() for desc in found)
            width = sum(width for width, _ in self.seen)
            self.joined = torch.zeros(rows, width, dtype=self.seen[0][1], device=spec.device)
        self.load = Loader(spec)
        self.turn = Turn(spec, self.load)
        self.given: Given | None = None
        self.managers: dict[Any, Any] = {}  # by descriptor of the decode steps
        self.entries: dict[tuple[int, int], Entry | None] = {}
        self.reasons: set[str] = set()

    def objection(self) -> str:
        """Why nothing can be captured; empty if it can."""
        if not self.pairs:
            return "vLLM has no full graphs of a uniform batch"
        if len({dtype for _, dtype in self.seen}) > 1:
            return "hidden states have several dtypes"
        return "" if self.joined is None else host_contact(self.spec.model, self.joined[:1])

    def capture(self, given: Given) -> None:
        """One manager of vLLM's for each number of decode rows, on vLLM's memory pool."""
        spec, (args, kwargs), self.given = self.spec, given, given
        spec.input_buffers.seq_lens.fill_(1)
        for decode, found in self.pairs.items():
            manager = type(self.prefill)(spec.vllm_config, spec.device, self.prefill.cudagraph_mode, self.query_len)
            manager._capture_descs = {found[0].cg_mode: found}
            self.load.live.fill_(decode.num_reqs)
            whole = partial(self._whole, decode.num_reqs, decode.num_tokens)
            manager.capture(whole, *args, **{**kwargs, "progress_bar_desc": "Capturing CUDA graphs of proposals"})
            self.managers[decode] = manager
            self.plan.captured += [f"{desc.num_reqs} requests, whole proposal" for desc in reversed(found)]
        self.load.warm_up()

    def _whole(
        self, rows: int, row_tokens: int, reqs: int, tokens: int, metadata: Any, slots: Any, across: Any, mode: Any
    ) -> None:
        """What is captured: prefill on ``reqs`` requests, decode steps on ``rows`` rows."""
        spec = self.spec
        if self.joined is not None:
            spec.hidden_states[:tokens].copy_(spec.model.combine_hidden_states(self.joined[:tokens]))
        spec._prefill(reqs, tokens, metadata, slots, num_tokens_across_dp=across, cudagraph_runtime_mode=mode)
        self.turn()
        draft(spec, self.plan, rows, row_tokens, {}, self._slots(row_tokens), (across, mode), self.query_len - 1)

    def _slots(self, tokens: int) -> Any:
        from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer

        return build_slot_mappings_by_layer(self.spec.block_tables.slot_mappings[:, :tokens], self.spec.kv_cache_config)

    def run(self, batch: Any, hidden: Tensor, aux: list[Tensor] | None, read: tuple[Tensor, ...]) -> Tensor | None:
        """The drafts; None, with the reason noted, for a batch that vLLM's own method has to take.

        Args:
            hidden: the target's last hidden states.
            aux: those of other layers, which EAGLE-3 takes instead.
            read: num_sampled, num_rejected, last_sampled, next_prefill_tokens, temperature, seeds.
        """
        found = self._find(batch)
        reason = found if isinstance(found, str) else self._fill(found, batch, hidden, aux, read)
        if isinstance(found, str) or reason:
            self._decline(reason)
            return None
        self.plan.counters["proposals in one graph"] += 1
        found.manager.run_fullgraph(found.descriptor)
        return found.drafts

    def _find(self, batch: Any) -> Entry | str:
        """The graph of a batch, or why there is none."""
        spec, rows, query_len = self.spec, batch.num_reqs, self.query_len
        if batch.num_tokens != rows * query_len or batch.num_scheduled_tokens.max() != query_len:
            return f"requests of other than {query_len} tokens"
        if spec.prefill_cudagraph_manager is not self.prefill or spec.decode_cudagraph_manager is not self.decode:
            return "vLLM's graph managers were replaced"
        if not torch.is_inference_mode_enabled():
            return "called outside inference mode"
        key = (rows, batch.num_tokens_after_padding)
        entry = self.entries[key] if key in self.entries else self._entry(*key)
        return entry or "vLLM has no full graphs for such a batch"

    def _fill(
        self, entry: Entry, batch: Any, hidden: Tensor, aux: list[Tensor] | None, read: tuple[Tensor, ...]
    ) -> str:
        """Write what the graph reads; why it cannot be, or nothing."""
        if not self._take(entry, hidden, aux):
            return "hidden states of another shape or dtype than those seen before the capture"
        sampled, rejected, last, following, temperature, seeds = read
        tensors = (batch.input_ids, batch.positions, batch.idx_mapping, last, following, sampled, rejected)
        if not self.load((*tensors, batch.query_start_loc, batch.seq_lens, temperature, seeds), batch.num_reqs):
            return "tensors of a batch that the loading kernel does not take"
        return ""

    def _entry(self, rows: int, tokens: int) -> Entry | None:
        """The graph of a shape, looked up once as ``propose`` does it each time."""
        prefill = self.prefill.dispatch(rows, tokens, self.query_len, 0)
        manager = self.managers.get(self.decode.dispatch(rows, rows, 1, 0))
        entry = None
        if manager is not None and prefill in manager.graphs and prefill.num_tokens == tokens:
            spec, joined = self.spec, None if self.joined is None else self.joined[:tokens]
            shapes = [torch.Size((tokens, width)) for width, _ in self.seen]
            entry = Entry(manager, prefill, joined, spec.hidden_states[:tokens], shapes, spec.draft_tokens[:rows])
        self.entries[rows, tokens] = entry
        return entry

    def _take(self, entry: Entry, hidden: Tensor, aux: list[Tensor] | None) -> bool:
        """Put the target's hidden states where the graph reads them."""
        if entry.joined is not None:
            if not aux or [x.shape for x in aux] != entry.shapes or aux[0].dtype is not entry.joined.dtype:
                return False
            torch.cat(aux, dim=-1, out=entry.joined)
            return True
        if aux or hidden.shape != entry.hidden.shape:
            return False
        entry.hidden.copy_(hidden)
        return True

    def _decline(self, reason: str) -> None:
        self.plan.counters["proposals outside one graph"] += 1
        if reason not in self.reasons:
            self.reasons.add(reason)
            self.plan.note(f"a proposal outside one graph: {reason}")


def pairs(prefill: Any, decode: Any, query_len: int) -> dict[Any, list[Any]]:
    """For each descriptor of the decode steps those of the prefill that a batch can meet with it, largest first.

    vLLM replays the smallest graph that holds a batch; how many rows it has depends on the number of requests alone.
    """
    uniform = [desc for desc in prefill.graphs if desc.uniform_token_count == query_len and is_full(desc)]
    found: dict[Any, list[Any]] = {}
    fewer = 0
    for desc in sorted(uniform, key=lambda desc: int(desc.num_reqs)):
        for rows in range(fewer + 1, desc.num_reqs + 1):
            steps = decode.dispatch(rows, rows, 1, 0)
            if is_full(steps) and desc not in found.setdefault(steps, []):
                found[steps].insert(0, desc)
        fewer = desc.num_reqs
    return {steps: descs for steps, descs in found.items() if descs}


def host_contact(model: Any, joined: Tensor) -> str:
    """Why the projection of hidden states cannot be captured; empty if it can."""
    watch = HostWatch()
    try:
        with watch:
            model.combine_hidden_states(joined)
    except Exception as error:  # whatever a foreign model raises: it cannot be judged
        return f"combine_hidden_states cannot be judged: {error}"
    return f"combine_hidden_states touches the host: {', '.join(sorted(watch.found))}" if watch.found else ""
