"""A closed load on one vLLM engine, and what its clients see: latencies, accepted drafts, outputs."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

PROMPT = 256  # tokens of the shortest prompt


@dataclass
class Client:
    """One request as its client sees it: when each output came, and its tokens."""

    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass
class Load:
    """Prompts, and how they are served: ``concurrency`` of them at a time, each with a seed of its own."""

    prompts: list[list[int]]
    concurrency: int
    temperature: float
    tokens: int

    def serve(self, llm: Any) -> list[Client]:
        """Serve all prompts; a request that ends makes room for the next."""
        engine, clients = llm.llm_engine, [Client() for _ in self.prompts]
        waiting, running = deque(range(len(clients))), 0
        while waiting or running:
            while waiting and running < self.concurrency:
                self.add(engine, waiting.popleft())
                running += 1
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                note(clients[int(output.request_id)], output.outputs[0].token_ids, now)
                running -= bool(output.finished)
        return clients

    def add(self, engine: Any, index: int) -> None:
        """Hand one prompt to the engine."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        settings = SamplingParams(
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=index,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(str(index), {"type": "token", "prompt_token_ids": self.prompts[index]}, settings)


def note(client: Client, tokens: Any, now: float) -> None:
    """Add one output; an empty one is not seen by a client."""
    if len(tokens):
        client.times.append(now)
        client.counts.append(len(tokens))
        client.tokens.extend(tokens)


def seen(clients: list[Client], k: int) -> dict[str, float]:
    """What the clients saw after their first outputs.

    ``itl_ms``: a request's time over its tokens, median over requests. ``gap_ms``: median time between two outputs,
    a scheduler step. ``accepted_length``: mean tokens an output; ``acceptance``: of k drafted tokens, per cent. The
    last output of a request, which its limit cuts, counts in none of the last two.
    """
    gaps = [b - a for c in clients for a, b in zip(c.times, c.times[1:], strict=False)]
    whole = [count for c in clients for count in c.counts[1:-1]]
    each = [(c.times[-1] - c.times[0]) / sum(c.counts[1:]) for c in clients if len(c.counts) > 1]
    length = statistics.mean(whole) if whole else 1.0
    return {
        "itl_ms": statistics.median(each) * 1e3,
        "gap_ms": statistics.median(gaps) * 1e3,
        "accepted_length": length,
        "acceptance": (length - 1) / k * 100,
    }


def python_prompts(count: int, longest: int) -> list[list[int]]:
    """Windows of the packaged held-out Python source, bytes being tokens."""
    from draftfuse.models import held_out_text

    text = list(held_out_text().encode())
    lengths = [min(PROMPT + (37 * i) % 128, longest) for i in range(count)]
    starts = [(211 * i) % (len(text) - n) for i, n in enumerate(lengths)]
    return [text[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def random_prompts(count: int, longest: int) -> list[list[int]]:
    """Arbitrary tokens of the random model's vocabulary."""
    lengths = [min(PROMPT + (37 * i) % 128, longest) for i in range(count)]
    return [[(7 * i + 13 * j) % 31000 + 5 for j in range(n)] for i, n in enumerate(lengths)]
