"""capture_safety on graphs that a CPU cannot run: transfers between devices, in both directions."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from draftfuse.passes.capture_safety import Surroundings, capture_safety
from draftfuse.passes.findings import Finding

aten = torch.ops.aten


def transfer(source: str, target: str) -> list[Finding]:
    graph, mode = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True)
    x = graph.placeholder("x")
    y = graph.call_function(aten._to_copy.default, (x,), {"device": torch.device(target)})
    graph.output(())
    with mode:
        x.meta["val"] = torch.empty(4, device=source)
        y.meta["val"] = torch.empty(4, device=target)
    y.meta["stack_trace"] = 'File "model.py", line 31, in forward\n    y = x.to(device)\n'
    return capture_safety(graph, Surroundings(owned=["x"]))


def test_a_copy_to_the_host_is_a_sync_and_one_from_it_a_host_tensor() -> None:
    (down,), (up,) = transfer("meta", "cpu"), transfer("cpu", "meta")
    assert (down.severity, down.name) == ("error", "host-sync")
    assert (up.severity, up.name) == ("error", "cpu-tensor")
    assert str(down.source) == "model.py:31: y = x.to(device)"
    assert transfer("meta", "meta") == transfer("cpu", "cpu") == []
