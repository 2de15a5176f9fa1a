"""CUDA graphs: warm up, capture, replay. The captured callable is the bound one, never Dynamo's guarded wrapper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftfuse.environment import first_line
from draftfuse.errors import CaptureError


@dataclass
class Captured:
    """A captured graph and everything whose address it holds."""

    graph: Any
    tensors: list[Tensor]
    num_bytes: int

    def replay(self) -> None:
        """One launch on the current stream."""
        self.graph.replay()


def capture(
    run: Callable[[], None],
    prepare: Callable[[], None],
    tensors: list[Tensor],
    pool: Any,
    stream: Any,
    warmups: int = 2,
) -> Captured:
    """Capture ``run`` into one CUDA graph.

    Args:
        run: launches the work; no host sync, no allocation that outlives it.
        prepare: writes fresh dummy inputs; called before every warm-up and before the capture.
        tensors: what the graph's kernels point to; kept alive with it.
        pool: the memory pool that all graphs of one loop share.
        stream: the side stream of all captures (libraries keep a workspace for each stream that they see).

    Raises:
        CaptureError: ``run`` does something that a CUDA graph cannot hold; no graph is kept.
    """
    warm_up(run, prepare, stream, warmups)
    before = pool_bytes(pool)
    graph, first = torch.cuda.CUDAGraph(), []
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                run()
            except RuntimeError as error:  # ending a capture that failed raises once more
                first.append(error)
                raise
    except RuntimeError as error:
        cause = (first or [error])[0]
        todo = "Remove the host sync or allocation that the cause names, or use mode='split'."
        raise CaptureError("the loop cannot be captured", first_line(cause), "capturable work", todo) from cause
    return Captured(graph, tensors, max(0, pool_bytes(pool) - before))


def warm_up(run: Callable[[], None], prepare: Callable[[], None], stream: Any, times: int) -> None:
    """Run on fresh inputs, on the stream of the capture that follows; the inputs are fresh afterwards."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            prepare()
            run()
        prepare()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def pool_bytes(pool: Any) -> int:
    """Bytes of device memory that a graph pool holds."""
    snapshot = torch.cuda.memory_snapshot(pool, include_traces=False)
    return sum(segment["total_size"] for segment in snapshot)
