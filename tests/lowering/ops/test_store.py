"""store: an opaque copy into a persistent buffer."""

from __future__ import annotations

import pytest
import torch

from draftfuse.errors import OpArgumentError
from draftfuse.ops import store


@pytest.mark.parametrize("dtypes", [(torch.int64, torch.int64), (torch.int64, torch.int32), (torch.float32,) * 2])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_equals_reference(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    from draftfuse.lowering.ops.store import reference

    value = torch.arange(24)[: torch.Size(shape).numel()].view(shape).to(dtypes[0])
    out = torch.full(shape, 7, dtype=dtypes[1])
    expected = reference(value, out)
    store(value, out)
    assert torch.equal(out, expected)
    assert out.dtype == dtypes[1]


def test_writes_a_view_of_the_buffer() -> None:
    buffer = torch.zeros(4, 6, dtype=torch.int32)
    store(torch.arange(3), buffer[1, :3])
    assert buffer[1].tolist() == [0, 1, 2, 0, 0, 0]
    assert int(buffer.sum()) == 3


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.draftfuse.store.default, (torch.arange(3), torch.zeros(5, dtype=torch.int32)[:3]))


def test_stays_one_opaque_op_in_a_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda value, out: store(value + 1, out), backend=keep, fullgraph=True)
    out = torch.zeros(3, dtype=torch.int64)
    compiled(torch.arange(3), out)
    assert out.tolist() == [1, 2, 3]
    assert torch.ops.draftfuse.store in [node.target for node in graphs[0].graph.nodes]


@pytest.mark.parametrize(
    ("shape", "what", "came"),
    [((1, 3), "value and out differ in dims", (1, 3)), ((2,), "value and out differ in shape", (2,))],
)
def test_shape_errors(shape: tuple[int, ...], what: str, came: object) -> None:
    with pytest.raises(OpArgumentError) as caught:
        store(torch.zeros(shape), torch.zeros(3))
    assert caught.value.what == f"draftfuse.ops.store: {what}"
    assert (caught.value.came, caught.value.expected) == (came, (3,))


def test_device_error() -> None:
    from draftfuse.lowering.ops.store import _check

    with pytest.raises(OpArgumentError) as caught:
        _check(torch.zeros(3, device="meta"), torch.zeros(3))
    assert (caught.value.came, caught.value.expected) == (torch.device("meta"), torch.device("cpu"))
