"""A trace on disk is used where nothing has changed, and never where anything has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfuse import build, runners, trace_cache
from draftfuse.passes.findings import Finding
from draftfuse.trace_cache import FROM_DISK, SWITCH
from draftfuse.trace_facts import Facts, Question, Scope, is_path
from draftfuse.unroll import TRACED_STEPS
from tests.draftfuse import stored as module
from tests.draftfuse import stored_helper
from tests.draftfuse.stored import Other, Stored, Window, shifting, stored, unbent
from tests.failures.small import Pair, batch_of, both, three_rows

ROWS = [4]


def uniform(spec: Any, rows: int = 3) -> Any:
    """As many tokens a row as one launch of prefill and decode takes."""
    query = spec.num_speculative_tokens + 1
    return replace(batch_of(spec, [12, 10, query, 11][:rows], [0, 1, 0, 0][:rows]), max_query_len=query)


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for traces, and the switch on."""
    monkeypatch.setenv(SWITCH, "1")
    monkeypatch.setattr(trace_cache, "folder", lambda: tmp_path / "traces")
    return tmp_path / "traces"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a first process leaves on disk."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "1")
        patch.setattr(trace_cache, "folder", lambda: folder)
        assert said(drafted(stored)) == ""
    return folder


@pytest.fixture
def warm(on_disk: Path, first: Path) -> Path:
    """The same, for each test anew."""
    shutil.copytree(first, on_disk)
    return on_disk


def drafted(make: Callable[[], Any], **options: Any) -> Pair:
    """Draft compiled and eagerly; both must agree to the bit."""
    return both(make, uniform, **{"request_capacities": ROWS, **options})


def said(pair: Pair) -> str:
    """What the report says on the IR of the first build."""
    assert not pair.fused.report.fallbacks
    text: str = pair.fused.report.builds[0].stored
    return text


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("the loop was traced, or run to compare its steps")


def test_a_second_run_traces_nothing(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "trace", refuse)
    pair = drafted(stored)
    assert said(pair) == FROM_DISK
    assert FROM_DISK in pair.fused.explain()
    assert any("spec.scale = 2.0" in line for line in pair.fused.explain().splitlines())


def test_values_are_guarded_as_after_a_trace(warm: Path) -> None:
    pair = drafted(stored)
    assert said(pair) == FROM_DISK
    for spec in (pair.fused.spec, pair.eager.spec):
        spec.scale = -3.0
    pair.draft(uniform)
    assert any("spec.scale: traced with 2.0, now -3.0" in f.reason for f in pair.fused.report.fallbacks)


def set_to(name: str, value: Any) -> Callable[[Any], None]:
    return lambda spec: setattr(spec, name, value)


def half_table(spec: Any) -> None:
    spec.place = spec.place.half()


def hook(spec: Any) -> None:
    spec.linear.register_forward_hook(lambda module, args, result: result * 2)


def forward_of_its_own(spec: Any) -> None:
    spec.linear.forward = lambda hidden: hidden * 3


def in_table(name: str, key: Any, value: Any) -> Callable[[Any], None]:
    return lambda spec: getattr(spec, name).__setitem__(key, value)


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "attribute": (set_to("scale", 2.5), "spec.scale was float 2.0, is float 2.5"),
    "int for float": (set_to("scale", 2), "spec.scale was float 2.0, is int 2"),
    "attribute over a class attribute": (set_to("bias", 0.5), "spec was object of class"),
    "entry": (in_table("options", "sign", -1), "spec.options"),
    "key": (in_table("options", "flip", 1), "spec.options"),
    "list": (in_table("scales", 1, 3.0), "spec.scales[1]"),
    "length": (lambda spec: spec.scales.append(1.0), "spec.scales"),
    "closure": (set_to("shift", shifting(0.75)), "spec.shift"),
    "function": (set_to("activation", torch.sin), "spec.activation"),
    "user's function": (set_to("activation", unbent), "spec.activation"),
    "builder's window": (lambda spec: setattr(spec.builder, "window", 4), "builder.window was int 5, is int 4"),
    "builder's class": (lambda spec: setattr(spec.builder, "__class__", Window), "builder"),
    "shape": (lambda spec: setattr(spec, "place", spec.place.repeat(2, 1)), "spec.place"),
    "strides": (lambda spec: setattr(spec, "left", spec.left.t()), "spec.left"),
    "dtype": (half_table, "spec.place"),
    "tied tensors": (lambda spec: setattr(spec, "left", spec.right), "spec.right"),
    "one memory": (lambda spec: setattr(spec, "left", spec.right.view(8, 8)), "other tensors lie in one memory"),
    "tensor of a later step": (in_table("shifts", 2, torch.ones(8)), "spec.shifts"),
    "class of tensor": (lambda spec: setattr(spec, "left", torch.nn.Parameter(spec.left, False)), "spec.left"),
    "training": (lambda spec: spec.linear.eval(), "spec.linear"),
    "hook": (hook, "hooks"),
    "method of one module": (forward_of_its_own, "spec.linear"),
}


QUICK = ("attribute", "entry", "closure", "shape", "one memory", "hook", "tensor of a later step")
ALL = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHANGES]


@pytest.mark.parametrize("name", ALL)
def test_what_the_speculator_holds(warm: Path, name: str) -> None:
    change, where = CHANGES[name]
    text = said(drafted(lambda: stored(change)))
    assert text.startswith("the IR on disk was not used: ")
    assert where in text


def other_method(self: Any, hidden: Tensor, step: int) -> Tensor:
    return super(Stored, self).sample(-hidden, step)


PATCHES: dict[str, tuple[Any, str, Any, str]] = {
    "class attribute": (Stored, "bias", -0.5, "spec"),
    "method": (Stored, "sample", other_method, "spec"),
    "inherited method": (
        Stored.__mro__[1],
        "forward",
        lambda self, inputs, metadata: 2 * (inputs.hidden_states,),
        "spec",
    ),
    "global number": (module, "FACTOR", 1.75, "FACTOR"),
    "global function": (module, "bent", unbent, "bent"),
    "function of another module": (module, "helped", unbent, "helped"),
    "function that calls": (stored_helper, "helped", unbent, ""),
    "defaults": (shifting, "__defaults__", None, ""),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_classes_and_modules_hold(warm: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, attribute, value, where = PATCHES[name]
    monkeypatch.setattr(owner, attribute, value)
    text = said(drafted(stored))
    if where:
        assert text.startswith("the IR on disk was not used: ")
        assert where in text
    else:  # nothing that this loop reads
        assert text == FROM_DISK


def test_another_class_has_an_entry_of_its_own(warm: Path) -> None:
    assert said(drafted(Other)) == ""


STATES: dict[str, tuple[Callable[[Any], object], Any, Any]] = {
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
    "precision": (torch.set_float32_matmul_precision, "high", "highest"),
}


@pytest.mark.parametrize("name", STATES)
def test_another_state_of_the_process_has_entries_of_its_own(warm: Path, name: str) -> None:
    switch, value, back = STATES[name]
    spec = stored()
    before = entry_of(spec).key
    switch(value)
    try:
        assert entry_of(spec).key != before
    finally:
        switch(back)
    assert entry_of(spec).key == before


def entry_of(spec: Any) -> trace_cache.Entry:
    function, args = runners.loop_of(runners.Descriptor("decode", 4, 4, 3))
    found = trace_cache.entry_for(function, (spec, *args, None), (spec, *args, None), None, DESCRIPTOR)
    assert found is not None
    return found


DESCRIPTOR = runners.Descriptor("decode", 4, 4, 3)


def test_versions_are_part_of_the_key(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = entry_of(spec := stored()).key
    monkeypatch.setattr(trace_cache, "versions", lambda: ("another torch",))
    assert entry_of(spec).key != before


@pytest.mark.parametrize("keep", [0, 10, 70, 1000, -1])
def test_a_damaged_file_is_replaced(warm: Path, keep: int) -> None:
    (file,) = warm.glob("*.json")
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    assert said(drafted(stored)).startswith("the IR on disk was not used: ")
    assert file.read_bytes()[64:65] == b"\n"
    assert said(drafted(stored)) == FROM_DISK


def test_a_file_with_other_contents_is_replaced(warm: Path) -> None:
    (file,) = warm.glob("*.json")
    for data in ({}, {"facts": {"answers": [], "shared": [], "files": {}}, "trace": {"nodes": []}, "places": {}}):
        trace_cache.write(file, data)
        assert said(drafted(stored)).startswith("the IR on disk was not used: ")
    assert said(drafted(stored)) == FROM_DISK


def test_no_code_is_run_from_a_file() -> None:
    allowed = ["L['spec'].a[0]", "dict(type(L['spec']).__dict__)['a']", "len(G['f'].__defaults__)", "L['s'].x[-1]"]
    refused = ["print(1)", "L['spec'].run()", "type('a', (), {})", "(lambda: 1)()", "[1 for _ in L]", "a b", "eval"]
    assert all(map(is_path, allowed))
    assert not any(map(is_path, refused))


def test_files_are_watched(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trace_cache.Facts.broken.__globals__["file_hash"]
    helper = stored_helper.__file__
    monkeypatch.setitem(
        trace_cache.Facts.broken.__globals__, "file_hash", lambda f: "edited" if f == helper else real(f)
    )
    assert said(drafted(stored)) == f"the IR on disk was not used: {helper} has changed"


def test_the_switch(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    pair = drafted(stored)
    assert said(pair) == ""


def test_old_entries_go(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "KEPT", 2)
    for name in "abc":
        trace_cache.write(on_disk / f"{name}.json", {"name": name})
    assert len(list(on_disk.iterdir())) == 2
    assert trace_cache.read(on_disk / "c.json") == {"name": "c"}


class Hooked(Stored):
    """Has a forward hook from the start."""

    def __init__(self) -> None:
        super().__init__()
        hook(self)


class Exec(Stored):
    """Calls a function that stands in no file."""

    def __init__(self) -> None:
        super().__init__()
        scope: dict[str, Any] = {}
        exec(compile("def made(hidden):\n    return hidden * 2", "<stdin>", "exec"), scope)
        self.activation = scope["made"]


WIDTH = {"columns": 4}


@torch.library.custom_op("stored::widened", mutates_args=())
def widened(hidden: Tensor) -> Tensor:
    """As many columns as a number says that nobody guards."""
    return hidden.new_ones(hidden.shape[0], WIDTH["columns"])


@widened.register_fake
def _(hidden: Tensor) -> Tensor:
    return hidden.new_empty(hidden.shape[0], WIDTH["columns"])


def halved(hidden: Tensor) -> Tensor:
    return hidden / WIDTH["columns"]


LIBRARY = torch.library.Library("stored", "FRAGMENT")
LIBRARY.define("halved(Tensor hidden) -> Tensor")
LIBRARY.impl("halved", halved, "CompositeImplicitAutograd")


class Widened(Stored):
    """Calls an operator of a user's."""

    def enter(self, inputs: Any) -> Tensor:
        hidden = super().enter(inputs)
        return hidden + torch.ops.stored.widened(hidden).sum(1, keepdim=True)


class Halved(Stored):
    """Calls an operator that is taken apart, by Python that Dynamo does not see."""

    def enter(self, inputs: Any) -> Tensor:
        return torch.ops.stored.halved(super().enter(inputs))


class Told(Stored):
    """Calls a function whose result is no more than what it was once."""

    def enter(self, inputs: Any) -> Tensor:
        return super().enter(inputs) * self.width()

    @torch._dynamo.assume_constant_result
    def width(self) -> int:
        return WIDTH["columns"]


def test_what_a_users_operator_returns_is_asked_again(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(drafted(Widened)) == ""
    assert said(drafted(Widened)) == FROM_DISK
    monkeypatch.setitem(WIDTH, "columns", 5)
    assert "stored.widened.default returns something else than it did" in said(drafted(Widened))


def test_nothing_is_kept_under_a_mode(on_disk: Path) -> None:
    with torch.utils._device.DeviceContext(torch.device("cpu")):
        assert said(drafted(stored)) == ""
    assert not on_disk.exists()


KEPT_NOWHERE = [
    (Hooked, "forward hooks"),
    (Exec, "<stdin>"),
    (Halved, "taken apart"),
    (Told, "take for a constant"),
]


@pytest.mark.parametrize(("klass", "why"), KEPT_NOWHERE)
def test_what_cannot_be_asked_again_is_not_kept(on_disk: Path, klass: type[Stored], why: str) -> None:
    text = said(drafted(klass))
    assert text.startswith("the IR is not kept on disk: ")
    assert why in text
    assert not on_disk.exists()


def test_a_loop_with_findings_is_traced_each_time(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Finding("warning", "side-effect", "a finding", "nothing")
    monkeypatch.setattr(runners.Inspector, "before", lambda self, descriptor: self.findings.append(found))
    drafted(stored)
    assert not on_disk.exists()


K = 8


@pytest.mark.parametrize(("batch", "kind"), [(three_rows, "decode"), (uniform, "propose")])
def test_a_long_loop_is_neither_traced_nor_run(
    on_disk: Path, monkeypatch: pytest.MonkeyPatch, batch: Callable[[Any], Any], kind: str
) -> None:
    options: dict[str, Any] = {"request_capacities": [3, 4]}

    def four_rows(spec: Any) -> Any:
        return uniform(spec, 4) if kind == "propose" else batch_of(spec, [5, 9, 3, 2])

    cold = both(lambda: stored(k=K), batch, **options)
    cold.draft(four_rows)
    monkeypatch.setattr(build, "trace", refuse)
    monkeypatch.setattr(build, "reads_of_copied_steps", refuse)
    monkeypatch.setattr(runners, "reads_of_copied_steps", refuse)
    again = both(lambda: stored(k=K), batch, **options)
    again.draft(four_rows)
    builds = [(b.kind, b.copied_steps, b.stored) for b in again.fused.report.builds]
    assert builds == [(kind, K - TRACED_STEPS, FROM_DISK)]


LATE: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (in_table("scales", 6, 3.0), "spec.scales[6]"),
    "tensor": (in_table("shifts", 6, torch.ones(8)), "tensors stand in other places"),
}


@pytest.mark.parametrize("name", LATE)
def test_what_only_a_copied_step_reads(on_disk: Path, name: str) -> None:
    change, where = LATE[name]
    options: dict[str, Any] = {"request_capacities": [3, 4], "one_launch": False}
    both(lambda: stored(k=K), three_rows, **options).fused.decode(4)
    pair = both(lambda: stored(change, k=K), three_rows, **options)
    assert where in pair.fused.report.builds[0].stored


class Named(Stored):
    """Late steps read an attribute whose name has no number; it holds what the early one holds."""

    early, late = 1.0, 1.0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.early = self.late = 1.0

    def sample(self, hidden: Tensor, step: int) -> Tensor:
        return super().sample(hidden * getattr(self, ("early", "late")[step >= 6]), step)


@pytest.mark.parametrize("change", [set_to("late", -2.0), in_table("scales", 6, 3.0)], ids=["attribute", "entry"])
def test_what_only_a_copied_step_reads_is_guarded_after_a_load(on_disk: Path, change: Callable[[Any], None]) -> None:
    options: dict[str, Any] = {"request_capacities": [3], "one_launch": False}
    both(lambda: Named(k=K), three_rows, **options)
    pair = both(lambda: Named(k=K), three_rows, **options)
    assert said(pair) == FROM_DISK
    for spec in (pair.fused.spec, pair.eager.spec):
        change(spec)
    pair.draft(three_rows)
    assert pair.fused.report.fallbacks


def test_rows_are_seen_again_where_a_tensor_was_replaced(on_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"request_capacities": [3, 4], "one_launch": False}
    both(lambda: stored(k=K), three_rows, **options).fused.decode(4)
    again = both(lambda: stored(k=K), three_rows, **options)
    again.fused.spec.shifts[6] = torch.ones(8)
    ran: list[int] = []
    monkeypatch.setattr(runners, "reads_of_copied_steps", lambda *args: ran.append(1) or [])
    again.fused.decode(4)
    assert ran


def test_objects_that_become_one_are_seen() -> None:
    spec = SimpleNamespace(left=[1], right=[1])
    scope, facts = Scope({"spec": spec}, {}), Facts()
    facts.add([Question("outline", f"L['spec'].{name}") for name in ("left", "right")], scope, set())
    facts.settle(scope)
    assert facts.broken(scope) == ""
    spec.right = spec.left
    assert facts.broken(scope) == "objects are shared otherwise: spec.left is spec.right"


def test_a_stored_trace_that_is_not_the_loops_is_traced_anew(warm: Path) -> None:
    """Whatever no fact stands for: the trial of the loaded trace finds it."""
    changed = 0
    for file in warm.glob("*.json"):
        data = trace_cache.read(file)
        if "trace" in data:
            text = json.dumps(data["trace"])
            changed += text.count(str(module.FACTOR))
            trace_cache.write(file, data | {"trace": json.loads(text.replace(str(module.FACTOR), "1.25"))})
    assert changed
    assert "computes something else now" in said(drafted(stored))
