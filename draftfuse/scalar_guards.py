"""One compiled comparison a build: whether Python still holds what the trace took from it."""

from __future__ import annotations

import ast
import inspect
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from draftfuse.attribute_reads import Read
from draftfuse.baked import SCALARS, has_parameters, same
from draftfuse.module_hooks import ModuleHooks
from draftfuse.paths import MISSING, MODULES, Asked, Computed, asked_of, plain, split_path, value_at
from draftfuse.torch_modes import Setting, modes_of_torch
from draftfuse.writers import LIBRARIES, is_library

REPLACED = "an object that the loop read its values from, one of its methods, or a hook of a module, was replaced"


@dataclass
class ScalarGuards:
    """One compiled comparison over all values that can change."""

    values: dict[str, Any] = field(default_factory=dict)
    holds: Callable[[], bool] = lambda: True
    current: dict[str, Callable[[], Any]] = field(default_factory=dict)
    classes: list[Methods] = field(default_factory=list)
    modes: list[tuple[Setting, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, baked: Mapping[str, Any], roots: Mapping[str, Any], reads: Iterable[Read] = ()) -> ScalarGuards:
        """Guards on those of ``baked`` that an assignment to an attribute or item could change, and on ``reads``."""
        comparison, values = _Comparison(roots), {}
        for path, value in baked.items():
            if comparison.add(path, value):
                values[path] = value
        for path in methods_of(roots):
            comparison.methods(path)
        if "spec" in roots:
            comparison.hooks(ModuleHooks(roots["spec"]))
        modes = [(setting, setting[1](*setting[2])) for setting in modes_of_torch()]
        for (_, ask, given), value in modes:
            comparison.equals(f"{comparison.constant(ask)}({', '.join(map(repr, given))})", value)
        current = {path: _reader(path, roots) for path in values}
        for read in reads:
            comparison.read(read)
            values[read.label], current[read.label] = read.value, read.now
        return cls(values, comparison.compiled(), current, list(comparison.classes.values()), modes)

    def broken(self) -> list[str]:
        """Each value that is not what it was, as text; empty where all hold."""
        if self.holds():
            return []
        changed = [(p, self.values[p], read()) for p, read in self.current.items()]
        named = [f"{plain(p)}: traced with {old!r}, now {new!r}" for p, old, new in changed if not same(new, old)]
        named += [f"{name} was replaced" for methods in self.classes for name in methods.replaced()]
        modes = [(name, old, ask(*given)) for (name, ask, given), old in self.modes]
        named += [f"{name}: traced with {old!r}, now {now!r}" for name, old, now in modes if now != old]
        return list(dict.fromkeys(named)) or [REPLACED]


def methods_of(roots: Mapping[str, Any]) -> list[str]:
    """Paths of the objects whose methods the loop runs: the speculator and its builders."""
    groups = range(len(roots["spec"].attn_groups)) if "spec" in roots else ()
    return [f"L['{name}']" for name in roots] + [f"L['spec'].attn_groups[{index}].builder" for index in groups]


def _reader(path: str, roots: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: value_at(path, roots, MODULES)


class Methods:
    """What a class gives its objects to call (functions, properties, ...), its own and inherited from the user's."""

    def __init__(self, klass: type) -> None:
        self.klass = klass
        found = {n for base in klass.__mro__ if not is_library(base) for n in vars(base) if n != "__getattribute__"}
        names = sorted(n for n in found if self._is_stable(n))
        functions = [n for n in names if inspect.isfunction(inspect.getattr_static(klass, n))]
        self.names = [*names, *(f"{n}.__code__" for n in functions)]  # reloading may change a function in place
        self.read: Callable[[type], Any] = attrgetter(*self.names) if self.names else type
        self.saved: Any = self.read(klass)

    def _is_stable(self, name: str) -> bool:
        """Whether ``name`` is called or computed, and reads the same twice (what makes a new object does not)."""
        static = inspect.getattr_static(self.klass, name, None)
        if not hasattr(type(static), "__get__"):
            return False
        first, second = (getattr(self.klass, name, MISSING) for _ in range(2))
        return first is second or (isinstance(first, types.MethodType) and first == second)

    def replaced(self) -> list[str]:
        """Names that stand for something else now."""
        old = self.saved if len(self.names) > 1 else (self.saved,)
        pairs = zip(self.names, old, strict=False)
        return [f"{self.klass.__qualname__}.{n}" for n, was in pairs if self._now(n) != was]

    def _now(self, name: str) -> Any:
        try:
            return attrgetter(name)(self.klass)
        except AttributeError:
            return MISSING


class _Comparison:
    """Builds ``o0.a is c1 and o0.b is o1 and o1.c is None ...`` over bound objects."""

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self.roots = roots
        self.names: dict[str, Any] = {"same": same, "MISSING": MISSING}
        self.owners: dict[str, str] = {}  # path of an owner -> its bound name
        self.classes: dict[type, Methods] = {}
        self.terms: list[str] = []
        self.absent: dict[str, set[Any]] = {}  # names that an object does not have, by the bound name of its attributes

    def add(self, path: str, value: Any) -> bool:
        if isinstance(value, type):
            self.klass(path, value)
            return True
        if (question := asked_of(path)) is not None:
            return self.lacks(question) if value is False else self.equals(self.question(question), value)
        if isinstance(value, types.FunctionType):  # what reloads a module may change a function in place
            function = self.constant(value)
            self.terms.append(f"{self.constant(_CODE)}({function}) == {self.constant(_CODE(value))}")
        return self.equals(self.attribute(path), value)

    def equals(self, read: str | None, value: Any) -> bool:
        """A term that ``read`` gives ``value``; an object that is the same needs no look at its contents."""
        if read is None:
            return False
        if value is None or isinstance(value, bool):
            self.terms.append(f"({read}) is {value!r}")
        elif type(value) is tuple and {type(item) for item in value} == {str}:
            self.terms.append(f"{read} == {self.constant(value)}")
        else:
            constant = self.constant(value)
            self.terms.append(f"({read} is {constant} or same({read}, {constant}))")
        return True

    def lacks(self, asked: Asked) -> bool:
        """A key that a container does not have; names that an object lacks are looked up together."""
        attributes = value_at(asked.container, self.roots, MODULES)
        if not asked.container.endswith(".__dict__") or not isinstance(attributes, dict):
            return self.equals(self.question(asked), False)
        name = self.reach(asked.container, attributes)
        self.absent.setdefault(name, set()).add(ast.literal_eval(asked.key))
        return True

    def klass(self, path: str, klass: type) -> None:
        """A class, or an object of it, that may be replaced by one with other methods, or get others itself."""
        self.methods_of_class(klass)
        owner_path = path.removesuffix(".__class__")
        owner = value_at(owner_path, self.roots, MODULES)
        if not has_parameters(owner):  # addresses are watched: with other parameters comes another module
            name = self.owner(owner_path, owner)
            if owner_path != path:
                self.terms.append(f"{name}.__class__ is {self.constant(klass)}")

    def methods_of_class(self, klass: type) -> None:
        if klass not in self.classes and not is_library(klass):
            self.classes[klass] = methods = Methods(klass)
            read, saved = self.constant(methods.read), self.constant(methods.saved)
            self.terms.append(f"{read}({self.constant(klass)}) == {saved}")

    def methods(self, path: str) -> None:
        """The class of an object, the functions that it has from classes of the user's, and those of its own."""
        owner = value_at(path, self.roots, MODULES)
        klass, name = type(owner), self.owner(path, owner)
        if is_library(klass):
            return
        self.terms.append(f"{name}.__class__ is {self.constant(klass)}")
        self.methods_of_class(klass)
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if inspect.isroutine(value) and attribute.isidentifier():
                self.terms.append(f"{name}.{attribute} is {self.constant(value)}")

    def hooks(self, found: ModuleHooks) -> None:
        """The forward hooks of the modules behind the loop."""
        self.terms.append(f"{self.constant(found.hold)}()")

    def read(self, read: Read) -> None:
        """What a copied step read: its value, or that there is none."""
        owner = self.constant(read.owner)
        if read.is_item:
            self.equals(f"{owner}[{read.name!r}]", read.value)
        elif read.value is MISSING:
            self.terms.append(f"getattr({owner}, {read.name!r}, MISSING) is MISSING")
        else:
            self.equals(f"getattr({owner}, {read.name!r})", read.value)
        if not read.is_item:
            self.methods_of_class(read.owner if isinstance(read.owner, type) else type(read.owner))

    def attribute(self, path: str) -> str | None:
        """How an attribute or item is read; None where nobody can assign it."""
        owner_path, key = split_path(path)
        owner = value_at(owner_path, self.roots, MODULES)
        return self.access(self.reach(owner_path, owner), path) if _can_change(owner, key) else None

    def question(self, asked: Asked) -> str | None:
        """How a length is taken, or a key looked up; None where neither can change."""
        container = value_at(asked.container, self.roots, MODULES)
        if asked.kind == "is":
            first, second = self.attribute(asked.container), self.attribute(asked.key)
            return f"{first} is {second}" if first is not None and second is not None else None
        if asked.kind == "tuple" and isinstance(container, (set, frozenset)):  # another in the same order will do
            access = self.attribute(asked.container)
            return f"tuple({access})" if access is not None else None
        if not isinstance(container, (*_CONTAINERS, set, tuple)) or asked.container.startswith("dict("):
            return None
        name = self.reach(asked.container, container)
        return f"{self.key(asked.key)} in {name}" if asked.kind == "in" else f"{asked.kind}({name})"

    def key(self, text: str) -> str:
        """A key in the comparison: a literal, or the bound name of what ``text`` stands for."""
        try:
            return repr(ast.literal_eval(text))
        except (ValueError, TypeError):
            return self.constant(value_at(text, self.roots, MODULES))

    def access(self, name: str, path: str) -> str:
        """The last step of ``path``, from an object of that name."""
        key = split_path(path)[1]
        if not path.endswith("]"):
            return f"{name}.{key}"
        return f"{name}[{self.key(key) if isinstance(key, Computed) else repr(key)}]"

    def reach(self, path: str, owner: Any) -> str:
        """How an owner is read: itself where it can change, through what holds it where only another can replace it."""
        above, parent = self.parent(path)
        if isinstance(owner, _FIXED) and parent is not MISSING:
            return self.access(self.reach(above, parent), path)
        return self.owner(path, owner)

    def parent(self, path: str) -> tuple[str, Any]:
        """The path of what holds ``path``, and what stands there; :data:`MISSING` for a root."""
        above, _ = split_path(path)
        return above, MISSING if above in ("", "L", "G") else value_at(above, self.roots, MODULES)

    def owner(self, path: str, owner: Any) -> str:
        """The bound name of an object, with the identity of everything on the way to it in the comparison."""
        if path not in self.owners:
            self.owners[path] = name = f"o{len(self.owners)}"
            self.names[name] = owner
            above, parent = self.parent(path)
            key = split_path(path)[1]
            if parent is not MISSING and key != "__dict__":
                access = self.access(self.owner(above, parent), path)  # what a tuple holds stays; the tuple may not
                if _can_change(parent, key):
                    self.terms.append(f"{access} is {name}")
        return self.owners[path]

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def compiled(self) -> Callable[[], bool]:
        for name, keys in self.absent.items():
            alone = [f"{key!r} not in {name}" for key in sorted(keys)]
            self.terms += alone if len(keys) < _FEW else [f"{name}.keys().isdisjoint({self.constant(keys)})"]
        parameters = ", ".join(f"{n}={n}" for n in self.names)
        body = " and ".join(self.terms) or "True"
        source = (
            f"def holds({parameters}):\n    try:\n        return {body}\n"
            "    except (AttributeError, LookupError, TypeError):\n        return False\n"
        )
        scope = dict(self.names)
        exec(compile(source, "<draftfuse guards>", "exec"), scope)
        function: Callable[[], bool] = scope["holds"]
        return function


_CODE = attrgetter("__code__", "__kwdefaults__")
_FEW = 5  # names that cost less one by one
_CONTAINERS = (dict, list, deque, types.MappingProxyType)
_FIXED = (tuple, slice, range)  # other values come with another object


def _can_change(owner: Any, key: Any) -> bool:
    """Whether ``owner`` is an object, class or module of the user's that lets ``key`` be assigned, or a container."""
    if isinstance(owner, (*_CONTAINERS, *_FIXED)):
        return True
    if isinstance(owner, types.CellType):
        return bool(key == "cell_contents")
    if not isinstance(key, str) or not key.isidentifier() or owner is MISSING:
        return False
    if isinstance(owner, types.ModuleType):
        return owner.__name__.split(".")[0] not in LIBRARIES
    if isinstance(owner, type):
        return not is_library(owner)
    if isinstance(owner, torch.Tensor):
        return key in vars(owner)
    return key in _own_names(owner) or _is_plain(inspect.getattr_static(type(owner), key, None))


def _is_plain(value: Any) -> bool:
    """Whether a class holds a value itself, so that an assignment to the object, or to the class, changes it."""
    return isinstance(value, SCALARS) and value is not None


def _own_names(owner: Any) -> Iterator[str]:
    yield from getattr(owner, "__dict__", ())
    for klass in type(owner).__mro__:
        yield from (n for n in vars(klass) if n in getattr(klass, "__slots__", ()))
