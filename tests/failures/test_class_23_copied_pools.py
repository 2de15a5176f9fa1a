"""Class 23: functionalisation clones a KV pool that is written in place. Raw writes are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import DraftInputs
from draftfuse.errors import UnsafeLoopError
from draftfuse.passes import ir
from tests.failures.small import Small, three_rows


class Raw(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        self.key.view(-1, 2, 4).index_copy_(0, self.attn_groups[0].slot_mapping[: x.shape[0]], x.view(-1, 2, 4))
        return x


class Assigned(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        self.key.view(-1, 2, 4)[self.attn_groups[0].slot_mapping[: x.shape[0]]] = x.view(-1, 2, 4)
        return x


class Scaled(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        self.key[0].mul_(0.5)
        return super().enter(inputs)


class Copied(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        self.value[0, 0].copy_(inputs.hidden_states[0].view(2, 4))
        return super().enter(inputs)


@pytest.mark.parametrize("klass", [Scaled, Copied])
def test_a_write_that_names_no_slot_is_refused(klass: type[Small]) -> None:
    spec = klass(k=4)
    before = spec.key.clone(), spec.value.clone()
    with pytest.raises(UnsafeLoopError, match="no pool is copied"):
        draftfuse.compile(spec, compiler="none").decode(2)
    assert torch.equal(spec.key, before[0])
    assert torch.equal(spec.value, before[1])


@pytest.mark.parametrize("klass", [Raw, Assigned])
def test_a_raw_indexed_write_is_refused(klass: type[Small]) -> None:
    with pytest.raises(UnsafeLoopError, match="write_kv"):
        draftfuse.compile(klass(k=3), compiler="none").decode(2)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["none", "inductor"])
def test_no_operator_of_the_loop_makes_a_pool(compiler: str) -> None:
    spec = Small(k=3)
    fused = draftfuse.compile(spec, compiler=compiler)
    fused.propose(three_rows(spec))
    (emission,) = fused.runners._emissions.values()
    pool = spec.key.numel()
    made = [n for n in emission.graph.nodes if n.op == "call_function" and ir.is_tensor(n) and not ir.is_view(n)]
    sizes = [ir.value(n).numel() for n in made if isinstance(ir.value(n).numel(), int)]
    assert max(sizes, default=0) < pool
    writes = [n for n in emission.graph.nodes if n.target is torch.ops.draftfuse.write_kv.default]
    assert len(writes) == 2
    assert all(ir.root(n.args[2]).op == "placeholder" for n in writes)
