"""The lint: every sample mistake at its line, nothing on loops that are right, comments that allow, and the hook-up."""

from __future__ import annotations

import contextvars
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import draftfuse
from draftfuse import CommonMetadata, DraftInputs, loop
from draftfuse.errors import UnsafeLoopError, UntraceableLoopError
from draftfuse.lint import lint, unstable
from draftfuse.passes.findings import CLASSES, Finding
from draftfuse.probe import LOSES_FUSION, STAYS_FUSED
from draftfuse.trace import trace
from tests.failures.small import Small, WindowBuilder, WindowMetadata, batch_of, both, three_rows

SCALE = torch.ones(8)
LOG: list[int] = []
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=2.0)


class Item(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        longest = inputs.seq_lens.max().item()  # here
        return super().enter(inputs) * longest


class Cpu(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * inputs.seq_lens.max().cpu()  # here


class Bool(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        wide = bool(inputs.seq_lens.sum() > 7)  # here
        return super().enter(inputs) * (2 if wide else 1)


class ToCpu(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * inputs.seq_lens.max().to("cpu")  # here


class ToList(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        first = inputs.seq_lens.tolist()[0]  # here
        return super().enter(inputs) * first


class NumPy(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        host = inputs.seq_lens.numpy() * 2  # here
        return super().enter(inputs) * torch.from_numpy(host).unsqueeze(1)


class HostTensor(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        scale = torch.tensor([1.0, 2.0])  # here
        return super().enter(inputs) * scale.sum()


class NonZero(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        live = inputs.seq_lens.nonzero()  # here
        return super().enter(inputs) * live.sum()


class Mask(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        live = inputs.positions[inputs.seq_lens > 0]  # here
        return super().enter(inputs) * live.sum()


class MaskedWrite(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        x[inputs.seq_lens == 0] = 0.0  # here
        return x


class Branch(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        if inputs.seq_lens.sum() > 7:  # here
            return super().enter(inputs)
        return super().enter(inputs) * 2


class Cached(Small):
    """A cache filled in forward: a dict of what was computed for a number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def enter(self, inputs: DraftInputs) -> Tensor:
        if inputs.positions.shape[0] not in self.cache:
            self.cache[inputs.positions.shape[0]] = super().enter(inputs)  # here
        return self.cache[inputs.positions.shape[0]]


class ListLog(Small):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.seen.append(inputs.positions.shape[0])  # here
        return super().enter(inputs)


class OwnGenerator(Small):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        noise = torch.rand(hidden.shape[0], 17, generator=self.generator)  # here
        return (hidden @ self.embed.t() + noise).argmax(-1)


class Masked(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * torch.masked_select(inputs.positions, inputs.seq_lens > 0).sum()  # here


class Random(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        noise = torch.rand(hidden.shape[0], 17)  # here
        return (hidden @ self.embed.t() + noise).argmax(-1)


class Dropout(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return torch.nn.functional.dropout(super().enter(inputs), 0.1)  # here


class Rebound(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        self.entered = super().enter(inputs)  # here
        return self.entered


class Appended(Small):
    def __init__(self) -> None:
        super().__init__()
        self.trail: list[Tensor] = []

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        self.trail.append(x)  # here
        return x


class Counter(Small):
    calls = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1  # here
        return super().enter(inputs)


class GlobalLog(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        LOG.append(inputs.positions.shape[0])  # here
        return super().enter(inputs)


class GlobalRead(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * SCALE  # here


class GlobalWrite(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        SCALE.copy_(x[0])  # here
        return x


class Variable(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        factor = float(os.environ.get("DRAFTFUSE_TEST_FACTOR", "1"))  # here
        return super().sample(hidden * factor, step)


class Context(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * CONTEXT.get()  # here


class RawWrite(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        slots = self.attn_groups[0].slot_mapping[: x.shape[0]]
        self.key.view(-1, 2, 4)[slots] = x.view(-1, 2, 4)  # here
        return x


class ShortTable(Small):
    def __init__(self) -> None:
        super().__init__()
        self.place = self.place[:20].clone()

    def enter(self, inputs: DraftInputs) -> Tensor:
        return self.embed[inputs.input_ids] + self.place[inputs.positions]  # here


class Memo(WindowBuilder):
    def __init__(self) -> None:
        super().__init__()
        self.memo: dict[int, Tensor] = {}

    def build(self, common: CommonMetadata) -> WindowMetadata:
        if common.num_reqs not in self.memo:
            self.memo[common.num_reqs] = (common.seq_lens - self.window).clamp(min=0)  # here
        start = self.memo[common.num_reqs]
        return WindowMetadata(common.seq_lens, common.block_table, common.slot_mapping, start, common.seq_lens - start)


WARNINGS = ("cpu-tensor", "side-effect")  # on a CPU a host tensor costs nothing; a count is lost, no draft is wrong


def mistakes() -> list[tuple[Callable[[], Small], type, str]]:
    """Speculator, the class whose source has the line, the finding's class."""
    plain: list[tuple[type[Small], str]] = [
        (Item, "host-sync"),
        (Cpu, "host-sync"),
        (Bool, "host-sync"),
        (ToCpu, "host-sync"),
        (ToList, "host-sync"),
        (NumPy, "host-sync"),
        (HostTensor, "cpu-tensor"),
        (NonZero, "data-dependent-shape"),
        (Mask, "data-dependent-shape"),
        (MaskedWrite, "data-dependent-shape"),
        (Masked, "data-dependent-shape"),
        (Branch, "python-branch"),
        (Random, "baked-rng"),
        (Dropout, "baked-rng"),
        (OwnGenerator, "baked-rng"),
        (Rebound, "fresh-allocation"),
        (Appended, "fresh-allocation"),
        (Cached, "fresh-allocation"),
        (Counter, "side-effect"),
        (GlobalLog, "side-effect"),
        (ListLog, "side-effect"),
        (GlobalRead, "undeclared-input"),
        (GlobalWrite, "foreign-write"),
        (Context, "context-read"),
        (Variable, "context-read"),
        (RawWrite, "raw-kv-write"),
        (ShortTable, "short-table"),
    ]
    return [*((klass, klass, name) for klass, name in plain), (lambda: Small(builder=Memo()), Memo, "fresh-allocation")]


def line_of(klass: type) -> int:
    lines, start = inspect.getsourcelines(klass)
    return start + next(i for i, line in enumerate(lines) if "# here" in line)


def text_of(klass: type) -> str:
    return next(line.strip() for line in inspect.getsourcelines(klass)[0] if "# here" in line)


def located(found: list[Finding], name: str) -> list[int]:
    return [f.source.line for f in found if f.name == name and f.source is not None]


@pytest.mark.parametrize(("make", "klass", "name"), mistakes(), ids=lambda v: getattr(v, "__name__", v))
def test_a_sample_mistake_is_reported_at_its_line(make: Callable[[], Small], klass: type, name: str) -> None:
    LOG.clear()
    found = lint(make(), k=2)
    assert line_of(klass) in located(found, name), found
    first = next(f for f in found if f.name == name and f.source is not None and f.source.line == line_of(klass))
    assert first.severity == ("warning" if name in WARNINGS or klass is Variable else "error")
    assert first.source is not None
    assert (first.source.file, first.source.text) == (__file__, text_of(klass))
    assert first.name in CLASSES
    assert first.todo
    assert str(first) == f"{first.severity} [{name}] {first.text}. {first.todo}\n  {first.source}"
    assert LOG == []


def test_a_right_loop_is_clean_and_left_as_it_was() -> None:
    spec = Small()
    spec.inputs.positions.fill_(3)
    before = {n: t.clone() for n, t in spec.inputs.named_tensors().items()} | {"key": spec.key.clone()}
    assert lint(spec) == []
    after = spec.inputs.named_tensors() | {"key": spec.key}
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_tracing_leaves_python_state_alone() -> None:
    spec = Appended()
    lint(spec, k=3)
    assert spec.trail == []
    counted = Counter()
    lint(counted, k=3)
    assert "calls" not in vars(counted)


class Allowed(Small):
    calls = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        scale = torch.tensor([1.0, 2.0])  # draftfuse: allow[cpu-tensor] made once in the warm-up
        self.calls += 1  # draftfuse: allow[host-sync] another class
        return super().enter(inputs) * scale.sum()


def test_a_comment_silences_one_class_on_its_line() -> None:
    found = lint(Allowed(), k=3)
    assert [(f.name, f.allowed) for f in found] == [("side-effect", None), ("cpu-tensor", "made once in the warm-up")]


class AllowedError(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * SCALE  # draftfuse: allow[undeclared-input] a constant of the module


def test_an_allowed_error_compiles_and_stays_in_the_report() -> None:
    fused = draftfuse.compile(AllowedError(k=3), compiler="none")
    fused.decode(2)
    assert [f.allowed for f in fused.report.findings] == ["a constant of the module"]
    assert "a constant of the module" in fused.explain()


@pytest.mark.parametrize("klass", [GlobalRead, RawWrite, Rebound, ShortTable, Random])
def test_the_first_build_refuses_errors(klass: type[Small]) -> None:
    with pytest.raises(UnsafeLoopError) as caught:
        draftfuse.compile(klass(), compiler="none").decode(2)
    assert f"{__file__.rsplit('/', 1)[-1]}:{line_of(klass)}: " in str(caught.value)
    assert "# here" in str(caught.value)


def test_the_first_build_reports_warnings() -> None:
    fused = draftfuse.compile(Counter(k=2), compiler="none")
    fused.decode(2)
    assert [f.name for f in fused.report.findings] == ["side-effect"]


def test_a_mistake_in_a_builder_runs_split() -> None:
    spec, twin = Small(k=3, builder=Memo()), Small(k=3, builder=Memo())
    fused, eager = draftfuse.compile(spec, compiler="none"), draftfuse.compile(twin, mode="eager")
    fused.decode(2)
    eager.decode(2)
    assert [f.mode for f in fused.report.fallbacks] == ["split"]
    assert torch.equal(spec.inputs.draft_tokens, twin.inputs.draft_tokens)
    with pytest.raises(draftfuse.errors.NotFusableError):
        draftfuse.compile(Small(k=3, builder=Memo()), compiler="none", mode="fused").decode(2)


class Tree(Small):
    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return (hidden @ self.embed.t()).topk(2).indices


class Heads(Small):
    def forward(self, inputs: DraftInputs, metadata: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        hidden, feedback = super().forward(inputs, metadata)
        return torch.cat([hidden, hidden]), feedback


@pytest.mark.parametrize(("klass", "words"), [(Tree, "tree of drafts"), (Heads, "parallel heads")])
def test_loops_of_another_kind_are_refused_by_name(klass: type[Small], words: str) -> None:
    with pytest.raises(UnsafeLoopError, match=words) as caught:
        draftfuse.compile(klass(k=3), compiler="none").decode(2)
    assert "Draft a chain" in str(caught.value)
    assert [f.name for f in lint(klass(k=3)) if f.is_error] == ["loop-kind"]


class InPrefill(Small):
    """Does something wrong in draft prefill only."""

    def __init__(self, wrong: str) -> None:
        super().__init__()
        self.wrong = wrong

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        if x.shape[0] != inputs.seq_lens.shape[0]:
            if self.wrong == "sync":
                return x * inputs.seq_lens.max().item()  # sync
            if self.wrong == "raises":
                raise ValueError("no")  # raises
            draftfuse.ops.write_kv(x, x, self.key, self.value, inputs.positions)  # operator
        return x


@pytest.mark.parametrize(
    ("wrong", "severity", "name", "words"),
    [
        ("sync", "warning", "host-sync", "draft prefill runs eagerly because of it"),
        ("raises", "error", "failure", "the loop fails at draft step 0, prefill: got ValueError: no"),
        ("operator", "error", "failure", "key has 2 dims at draft step 0, prefill: got (8, 8)"),
    ],
)
def test_draft_prefill_is_looked_at(wrong: str, severity: str, name: str, words: str) -> None:
    (found,) = lint(InPrefill(wrong), k=1)
    assert (found.severity, found.name) == (severity, name)
    assert words in found.text
    assert found.source is not None
    assert found.source.text.endswith(f"# {wrong}")


class AllowedInVain(Small):
    """Mistakes that compiling cannot do without, each with a comment."""

    def __init__(self, wrong: str) -> None:
        super().__init__(k=2)
        self.wrong = wrong

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        if self.wrong == "fresh-allocation":
            self.entered = x  # draftfuse: allow[fresh-allocation] it is small
        if self.wrong == "data-dependent-shape":
            return x * inputs.seq_lens.nonzero().sum()  # draftfuse: allow[data-dependent-shape] it is small
        if self.wrong == "python-branch" and inputs.seq_lens.sum() > 7:  # draftfuse: allow[python-branch] rare
            return x * 2
        return x

    def sample(self, hidden: Tensor, step: int) -> Tensor:  # draftfuse: allow[loop-kind] it is a tree
        tokens = super().sample(hidden, step)
        return torch.stack([tokens, tokens], 1) if self.wrong == "loop-kind" else tokens


@pytest.mark.parametrize("name", ["fresh-allocation", "data-dependent-shape", "python-branch", "loop-kind"])
def test_what_compile_refuses_all_the_same_cannot_be_allowed(name: str) -> None:
    found = [f for f in lint(AllowedInVain(name)) if f.name == name]
    assert any(f.is_error and "It cannot be allowed: " in f.todo for f in found)
    assert not any(f.allowed for f in found)
    with pytest.raises((UnsafeLoopError, UntraceableLoopError)):
        draftfuse.compile(AllowedInVain(name), compiler="none").decode(2)


@pytest.mark.parametrize("klass", [ListLog, GlobalLog])
def test_a_size_that_python_keeps_is_a_side_effect_for_lint_and_compile(klass: type[Small]) -> None:
    spec = klass(k=2) if klass is GlobalLog else klass()
    fused = draftfuse.compile(spec, compiler="none", num_speculative_tokens=2)
    fused.decode(2)
    (found,) = fused.report.findings
    assert (found.name, found.severity, located([found], "side-effect")) == ("side-effect", "warning", [line_of(klass)])
    assert fused.report.fallbacks == []


class Misspelt(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * 2  # draftfuse: allow[host_sync] not the name


def test_a_comment_without_a_class_is_found_where_nothing_else_is() -> None:
    (found,) = lint(Misspelt(), k=1)
    assert (found.name, found.severity) == ("comment", "warning")
    assert "host-sync" in found.todo


class BranchingBuilder(WindowBuilder):
    def build(self, common: CommonMetadata) -> WindowMetadata:
        made = super().build(common)
        return made if common.seq_lens.sum() > 7 else super().build(common)


def test_advice_is_to_run_what_can_run() -> None:
    with pytest.raises(UntraceableLoopError) as caught:
        draftfuse.compile(Branch(k=2), compiler="none", mode="split").decode(2)
    lines = str(caught.value).splitlines()
    assert "Keep the value in a tensor" in lines[0]
    assert "mode='eager' runs it as it is; split steps are traced too" in lines[0]
    assert len(lines) == 2  # the second one is the user's
    draftfuse.compile(Branch(k=2), compiler="none", mode="eager").decode(2)
    with pytest.raises(UntraceableLoopError, match="it may stay with mode='auto' or 'split'"):
        trace(loop.decode_loop, (Small(k=2, builder=BranchingBuilder()), 2, 2, loop.graph_tap))
    fused = draftfuse.compile(Small(k=2, builder=BranchingBuilder()), compiler="none")
    fused.decode(2)
    assert [f.mode for f in fused.report.fallbacks] == ["split"]


def test_a_trace_that_is_not_stable_has_a_line() -> None:
    spec = Scaled()
    first = trace(loop.decode_loop, (spec, 2, 2, loop.graph_tap))
    (found,) = unstable(spec, 2, 2, first)
    assert "aten.mul.Tensor(_, 1) became aten.mul.Tensor(_, 2)" in found.text
    assert found.source is not None
    assert found.source.line == line_of(Scaled)


class Scaled(Small):
    calls = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        return super().enter(inputs) * self.calls  # here


class Flagged(Small):
    """Sets a flag that it never reads."""

    seen = False

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.seen = True  # here
        return super().enter(inputs)


class Asked(Flagged):
    """Sets a flag once."""

    def enter(self, inputs: DraftInputs) -> Tensor:
        if not self.seen:
            self.seen = True
        return Small.enter(self, inputs)


@pytest.mark.parametrize(
    ("klass", "change"),
    [(Counter, "spec.calls: 0 -> 1"), (Flagged, "spec.seen: False -> True"), (Asked, "spec.seen: False -> True")],
)
def test_a_change_of_python_state_says_what_it_means_for_fusion(klass: type[Small], change: str) -> None:
    spec = klass(k=2)
    fused = draftfuse.compile(spec, compiler="none", request_capacities=[4])
    fused.propose(three_rows(spec))
    (found,) = fused.report.findings
    assert f"at {change}: " in found.text
    assert found.text.endswith(LOSES_FUSION if klass is Asked else STAYS_FUSED)
    fused.propose(three_rows(spec))
    assert bool(fused.report.fallbacks) == (klass is Asked)


class CountsPrefills(Small):
    """Computes with a count of draft prefills."""

    prefills = 0

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        if x.shape[0] != inputs.seq_lens.shape[0]:
            self.prefills += 1  # here
            return x * self.prefills
        return x


def test_python_state_that_only_draft_prefill_computes_with_is_not_frozen() -> None:
    def batch(spec: Small, seed: int = 0) -> draftfuse.DraftBatch:
        return replace(batch_of(spec, [5, 9, 7], seed=seed), max_query_len=3)

    pair = both(lambda: CountsPrefills(k=2), batch)
    pair.draft(lambda spec: batch(spec, 1))
    (fallback,) = {f.reason: f for f in pair.fused.report.fallbacks}.values()
    assert (fallback.what, fallback.mode) == ("prefill", "eager")
    assert "the loop computes with what it changed" in fallback.reason


class Divides(Small):
    """Fails where all rows are dead: not in the first run of the lint, but in a later one."""

    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * (1 / int(inputs.seq_lens.max()))  # here


class Pops(Small):
    """Fails in the second run: the first one took what there was."""

    def __init__(self) -> None:
        super().__init__(k=2)
        self.left = [1]

    def enter(self, inputs: DraftInputs) -> Tensor:
        return super().enter(inputs) * self.left.pop()  # here


@pytest.mark.parametrize(("make", "name"), [(lambda: Divides(k=2), "host-sync"), (Pops, "failure")])
def test_a_loop_that_fails_in_a_later_run_is_a_finding(make: Any, name: str) -> None:
    found = next(f for f in lint(make()) if f.is_error)
    assert found.name == name
    assert found.source is not None
    assert found.source.text.endswith("# here")


class Attends(Small):
    """PyTorch's attention asks no generator without dropout, though its operators are tagged as if."""

    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs).view(1, -1, 2, 4).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(-1, 8)


def test_attention_without_dropout_is_no_draw() -> None:
    assert lint(Attends(k=2)) == []


class CountsInPlace(Small):
    """``+=`` on a tensor binds the attribute to the tensor that it was."""

    def __init__(self) -> None:
        super().__init__(k=2)
        self.calls = torch.zeros((), dtype=torch.int64)

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls += 1
        return super().enter(inputs)


class Swaps(CountsInPlace):
    """Two tensors change places, which no replay does."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.ones((), dtype=torch.int64)

    def enter(self, inputs: DraftInputs) -> Tensor:
        self.calls, self.other = self.other, self.calls
        return Small.enter(self, inputs) * self.calls


def test_counting_in_a_tensor_is_what_the_advice_means() -> None:
    assert lint(CountsInPlace()) == []
    pair = both(CountsInPlace, three_rows)
    pair.draft(three_rows)
    assert torch.equal(pair.fused.spec.calls, pair.eager.spec.calls)
    assert any(f.is_error for f in lint(Swaps()))
    with pytest.raises(UnsafeLoopError):
        draftfuse.compile(Swaps(), compiler="none").decode(3)


class ReadsOne(Small):
    def enter(self, inputs: DraftInputs) -> Tensor:
        x = super().enter(inputs)
        return x / (1 + x.abs().max().item())  # draftfuse: allow[host-sync] once


def test_a_number_of_the_device_cannot_be_allowed() -> None:
    (found,) = [f for f in lint(ReadsOne(k=2)) if f.is_error]
    assert found.name == "host-sync"
    assert "It cannot be allowed" in found.todo
    with pytest.raises(UnsafeLoopError, match="host-sync"):
        draftfuse.compile(ReadsOne(k=2), compiler="none").decode(3)
