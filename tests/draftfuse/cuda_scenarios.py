"""What can go wrong on a real device, one a process: ``python -m tests.draftfuse.cuda_scenarios NAME``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import runners
from draftfuse.errors import CaptureError, DeviceLostError, OutOfGraphMemoryError
from draftfuse.reference import EagleSpeculator, Limits, small_config


def compiled(**options: Any) -> draftfuse.FusedDraft:
    """A loop of three requests on the device, not built yet."""
    limits = Limits(3, 4, 48, page_size=4)
    spec = EagleSpeculator.random(small_config(max_model_len=48), limits, seed=1, device="cuda")
    fused = draftfuse.compile(spec, **{"compiler": "none", "request_capacities": [4], **options})
    prepare(fused)
    return fused


def prepare(fused: draftfuse.FusedDraft) -> None:
    """Inputs of draft step 1 for three requests of six tokens."""
    inputs = fused.spec.inputs
    inputs.positions[:3], inputs.seq_lens[:3], inputs.input_ids[:3] = 5, 6, torch.arange(3, device="cuda").int()
    inputs.query_start_loc[:4] = torch.arange(4, device="cuda")


def drafts(fused: draftfuse.FusedDraft) -> Tensor:
    """What three requests draft."""
    prepare(fused)
    fused.decode(3)
    torch.cuda.synchronize()
    return fused.spec.inputs.draft_tokens[:3, 1:].clone()


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """What ``call`` raises, which must be of class ``kind`` itself."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value)


def lost_device() -> None:
    """A token outside the vocabulary trips the device's assertion inside the replayed graph."""
    fused = compiled()
    drafts(fused)
    fused.spec.inputs.input_ids[:3] = 10**6
    fused.decode(3)
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print("the caller's own wait:", str(error).splitlines()[0])
    print(raised(DeviceLostError, lambda: fused.decode(3)))
    refused = raised(DeviceLostError, lambda: fused.decode(3))
    assert refused.startswith("the compiled loop is on a device that is lost: got ")
    assert "device-side assert triggered" in refused
    print(refused)
    fused.close()


def no_memory() -> None:
    """No room for the graph's pool; then there is room."""
    expected, fused = drafts(compiled(mode="eager")), compiled()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    before = fused.spec.inputs.positions.cpu()
    print(raised(OutOfGraphMemoryError, lambda: fused.decode(3)))
    assert fused.runners.made == {}
    assert torch.equal(fused.spec.inputs.positions.cpu(), before)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(drafts(fused), expected)
    assert fused.report.counters["graph replays"] == 1


@contextmanager
def while_capturing(act: Callable[[], None]) -> Iterator[None]:
    """Inside, a loop does something more as it is captured."""
    plain = runners.capture

    def capture(run: Callable[[], None], *args: Any) -> Any:
        def more() -> None:
            run()
            if torch.cuda.is_current_stream_capturing():
                act()

        return plain(more, *args)

    runners.capture = capture
    try:
        yield
    finally:
        runners.capture = plain


def interrupt() -> None:
    """Ctrl-C in the middle of a capture."""

    def act() -> None:
        raise KeyboardInterrupt

    expected, fused = drafts(compiled(mode="eager")), compiled()
    with while_capturing(act):
        try:
            fused.decode(3)
        except KeyboardInterrupt:
            print("interrupted")
    assert fused.runners.made == {}
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.equal(drafts(fused), expected)


def host_sync() -> None:
    """A wait for the device in the middle of a capture: the first cause is named, and the device lives on."""
    expected, fused, stream = drafts(compiled(mode="eager")), compiled(), torch.cuda.current_stream()
    with while_capturing(torch.cuda.synchronize):
        message = raised(CaptureError, lambda: fused.decode(3))
    print(message)
    assert torch.cuda.current_stream() == stream
    torch.rand(1, device="cuda")
    assert "operation not permitted when stream is capturing" in message
    assert torch.equal(drafts(fused), expected)


SCENARIOS = (lost_device, no_memory, interrupt, host_sync)

if __name__ == "__main__":
    next(scenario for scenario in SCENARIOS if scenario.__name__ == sys.argv[1])()
    print("ok")
