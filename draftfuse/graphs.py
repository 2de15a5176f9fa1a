"""CUDA graphs: warm up, capture, replay. The captured callable is the bound one, never Dynamo's guarded wrapper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from warnings import catch_warnings

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
    graph, first, outside = torch.cuda.CUDAGraph(), [], torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            try:
                run()
            except RuntimeError as error:  # ending a capture that failed raises once more
                first.append(error)
                raise
    except BaseException as error:
        abandon(pool, stream, outside)
        if not isinstance(error, RuntimeError):
            raise
        cause = (first or [error])[0]
        todo = "Remove the host sync or allocation that the cause names; cudagraph=False runs the loop without a graph."
        raise CaptureError("the loop cannot be captured", first_line(cause), "capturable work", todo) from cause
    return Captured(graph, tensors, max(0, pool_bytes(pool) - before))


def abandon(pool: Any, stream: Any, outside: Any) -> None:
    """After a capture that could not be ended torch stays on its stream, its allocators go on recording into the pool
    (that of pinned memory for ever, so the pool is lost), and its generator refuses to draw until a capture ends well.
    """
    torch.cuda.set_stream(outside)
    device = torch.cuda.current_device()
    with suppress(RuntimeError), catch_warnings(action="ignore"):  # the first call says so where the capture has ended
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
            pass


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
