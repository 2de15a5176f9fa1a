"""What a trace rests on: every guard of Dynamo, the code that it read, and the files of that code.

Asked when a loop is traced, and again in another process before the trace is used there: all answers must be the same.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch._guards import TracingContext

from draftfuse.fingerprints import Fingerprints, NoFingerprint, is_shared
from draftfuse.paths import MISSING, imported, plain, split_path
from draftfuse.step_log import is_watched

_EXACT = ("CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH", "ID_MATCH", "WEAKREF_ALIVE")
_OUTLINE = (
    "TYPE_MATCH",
    "NOT_NONE_MATCH",
    "FUNCTION_MATCH",
    "CLASS_MATCH",
    "MODULE_MATCH",
    "CLOSURE_MATCH",
    "BUILTIN_MATCH",
    "SEQUENCE_LENGTH",
    "MAPPING_KEYS_CHECK",
    "DICT_KEYS_MATCH",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "TENSOR_MATCH",
    "DUPLICATE_INPUT",
)
_ATTRIBUTES = ("HASATTR", "NOT_PRESENT_IN_GENERIC_DICT")
_ENTRIES = ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS")
# State of the process, which is in the key of an entry, and sizes, whose guards are part of the trace.
_ELSEWHERE = (
    "SHAPE_ENV",
    "GRAD_MODE",
    "DETERMINISTIC_ALGORITHMS",
    "DEFAULT_DEVICE",
    "GLOBAL_STATE",
    "TORCH_FUNCTION_STATE",
    "AUTOGRAD_SAVED_TENSORS_HOOKS",
    "FUNCTORCH_STACK_MATCH",
)
_CALLED: dict[str, Any] = {"type": type, "dict": dict, "len": len, "list": list, "tuple": tuple}
GENERATED = "<string>"  # where the methods that dataclasses write stand


class NotCacheable(Exception):
    """A trace that may not be used in another process; the message says why."""


@dataclass(frozen=True)
class Question:
    """One thing to ask of the objects behind a loop."""

    kind: str  # exact, outline, attribute or entry
    path: str
    name: Any = None  # the attribute, or the key

    def __str__(self) -> str:
        return plain(self.path) + {"attribute": f".{self.name}", "entry": f"[{self.name!r}]"}.get(self.kind, "")


class Scope:
    """The names of Dynamo's paths: arguments of the loop, globals of its module, modules and builtins."""

    def __init__(self, arguments: Mapping[str, Any], module_globals: dict[str, Any]) -> None:
        self.names = {"L": arguments, "G": _Globals(module_globals)}

    def at(self, path: str) -> Any:
        """What stands at ``path`` now; ``MISSING`` where nothing does."""
        if not is_path(path):
            raise NotCacheable(f"{path} is no path")
        try:
            return eval(_compiled(path), {"__builtins__": _CALLED}, self.names)  # names and keys alone: see is_path
        except Exception:  # a property of the user's may raise anything; what is missing is named by whoever asks
            return MISSING


class _Globals:
    """Globals by the names that Dynamo gives them, without what Dynamo itself leaves among them."""

    def __init__(self, own: dict[str, Any]) -> None:
        self.own = own

    def __getitem__(self, key: str) -> Any:
        if key.startswith("__builtins_dict__"):
            return vars(builtins)
        if key.startswith("__import_"):
            return imported(key)
        if key.startswith("__"):
            raise KeyError(key)
        return self.own[key]


@cache
def _compiled(path: str) -> Any:
    return compile(path, "<path>", "eval")


@cache
def is_path(text: str) -> bool:
    """Whether ``text``, which may come from a file, reads attributes and items and calls nothing but type and len."""
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    return all(_is_allowed(node, id(node) in called) for node in ast.walk(tree.body))


def _is_allowed(node: ast.AST, is_called: bool) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _CALLED if is_called else node.id in ("L", "G")
    if is_called or (isinstance(node, ast.Call) and (node.keywords or len(node.args) != 1)):
        return False
    allowed = (ast.Attribute, ast.Subscript, ast.Constant, ast.Call, ast.UnaryOp, ast.USub, ast.Load)
    return isinstance(node, (*allowed, ast.Compare, ast.In, ast.Is))


@dataclass
class Facts:
    """Questions with their answers, names of one and the same object, and hashes of files."""

    answers: dict[Question, str] = field(default_factory=dict)
    shared: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    refused: str = ""  # why the trace may not be used in another process

    def digest(self) -> str:
        """A text that differs where any fact does."""
        return hashlib.sha256(repr(self.to_json()).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """For :meth:`from_json`."""
        rows = [[q.kind, q.path, q.name, answer] for q, answer in self.answers.items()]
        return {"answers": rows, "shared": self.shared, "files": self.files}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Facts:
        """The facts of a stored trace."""
        answers = {Question(kind, path, name): answer for kind, path, name, answer in data["answers"]}
        return cls(answers, data["shared"], data["files"])

    def broken(self, scope: Scope) -> str:
        """The first fact that does not hold any more, as text; empty where all do."""
        for file, digest in self.files.items():
            if file_hash(file) != digest:
                return f"{file} has changed"
        for question, answer in self.answers.items():
            try:
                now = answer_to(question, scope, Fingerprints())
            except NoFingerprint as reason:
                now = str(reason)
            if now != answer:
                return f"{question} was {answer}, is {now}"
        if (now_shared := shared_among(self.answers, scope)) != self.shared:
            return f"objects are shared otherwise: {_first_difference(self.shared, now_shared)}"
        return ""

    def add(self, questions: Iterable[Question], scope: Scope, codes: set[str]) -> None:
        """Ask more; ``codes`` takes the bytecode that stands behind the answers."""
        for question in questions:
            if question not in self.answers:
                known = Fingerprints()
                self.answers[question] = answer_to(question, scope, known)
                codes |= known.codes
                if self.answers[question] == "nothing":
                    raise NotCacheable(f"{question} cannot be found again")

    def settle(self, scope: Scope) -> None:
        """Look, after all questions, which of the objects are one."""
        self.shared = shared_among(self.answers, scope)

    def add_files(self, codes: Iterable[types.CodeType]) -> None:
        """Take in the files of ``codes``."""
        for file in dict.fromkeys(c.co_filename for c in codes if is_watched(c.co_filename)):
            if file != GENERATED:
                self.files[file] = file_hash(file)
                if not self.files[file]:
                    raise NotCacheable(f"code of {file}, which is no file")


def _first_difference(old: list[list[str]], new: list[list[str]]) -> str:
    changed = [group for group in [*old, *new] if (group in old) != (group in new)]
    return " is ".join(map(plain, changed[0]))


def of_trace(arguments: Mapping[str, Any], module_globals: dict[str, Any]) -> Facts:
    """The facts of the trace in progress; call it inside a Dynamo backend."""
    facts = Facts()
    context = TracingContext.try_get()
    assert context is not None
    scope, covered = Scope(arguments, module_globals), set[str]()
    numbers = {f"L['{name}']" for name, value in arguments.items() if isinstance(value, int)}  # part of the key
    try:
        for guard in context.guards_context.dynamo_guards:
            facts.add((q for q in questions_of(guard) if q.path not in numbers), scope, covered)
        facts.add_files(context.traced_code)
        _require_covered(context.traced_code, covered)
    except Exception as reason:  # whatever a user's object does when it is asked, the loop is traced
        facts.refused = reason_of(reason)
    facts.settle(scope)
    return facts


def reason_of(error: Exception) -> str:
    """The first line of an error, with its class where that is not one of the two of this module's own."""
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, (NotCacheable, NoFingerprint)) else f"{type(error).__name__}: {text}"


def questions_of(guard: Any) -> Iterator[Question]:
    """What to ask for one guard of Dynamo."""
    kind, path = guard.create_fn_name(), _name(guard)
    given = getattr(guard.create_fn, "keywords", {})
    if kind in _ELSEWHERE:
        return
    if kind in _EXACT:
        yield Question("exact", path)
    elif kind in _OUTLINE:
        yield Question("outline", path)
        if kind == "DUPLICATE_INPUT":
            yield Question("outline", _name(given["source_b"]))
    elif kind in _ATTRIBUTES:
        # In torch 2.11 a HASATTR stands at the attribute itself.
        owner, name = (path, given["attr"]) if given.get("attr") else split_path(path)
        yield Question("attribute", owner, name)
    elif kind in _ENTRIES and isinstance(given.get("key"), (str, int)):
        yield Question("entry", path, given["key"])
    else:
        raise NotCacheable(f"a guard of kind {kind} on {plain(path)}")


def _name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)


def answer_to(question: Question, scope: Scope, known: Fingerprints) -> str:
    """The answer now."""
    value = scope.at(question.path)
    if value is MISSING:
        return "nothing"
    if question.kind == "attribute":
        return f"{hasattr(value, question.name)}, own {question.name in getattr(value, '__dict__', {})}"
    if question.kind == "entry":
        return str(question.name in value)
    return known.exact(value) if question.kind == "exact" else known.outline(value)


def shared_among(questions: Iterable[Question], scope: Scope) -> list[list[str]]:
    """Paths that lead to one and the same object, of all that are asked about."""
    groups: dict[int, list[str]] = {}
    alive = []  # so that ids stay unique
    for path in dict.fromkeys(q.path for q in questions):
        if is_shared(value := scope.at(path)):
            alive.append(value)
            groups.setdefault(id(value), []).append(path)
    return sorted(sorted(group) for group in groups.values() if len(group) > 1)


def _require_covered(codes: Iterable[types.CodeType], covered: set[str]) -> None:
    """All code of the user's that was inlined must stand behind a guarded function or class: it is asked for again."""
    for code in dict.fromkeys(codes):
        if is_watched(code.co_filename) and Fingerprints().code(code) not in covered:
            raise NotCacheable(f"{code.co_qualname} in {code.co_filename} belongs to no guarded function or class")


def file_hash(file: str) -> str:
    """The hash of a file's contents; empty where there is none."""
    if not os.path.isfile(file):
        return ""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
