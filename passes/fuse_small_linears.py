"""Give matrix products of a few rows to a kernel that takes norm, SwiGLU and residual along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from draftfuse.passes import ir

aten = torch.ops.aten
HALF_UNIT = 128  # a half of a paired input is a multiple of this, so that no tile lies across both
Applies = Callable[[fx.Node], bool]


def never(product: fx.Node) -> bool:
    """The default of ``applies``: nothing is rewritten."""
    return False


def fuse_small_linears(graph: fx.Graph, *, applies: Applies) -> int:
    """Rewrite ``x @ weight.T`` to ``draftfuse::small_linear`` where ``applies(product)`` says that it pays.

    With one to four rows a product only streams its weights, and every small kernel around it costs about as much as
    the gap in front of it. An RMS norm in front, a SwiGLU or a residual sum behind are taken along where the product is
    their only user, and so is an argmax behind an output head. An embedding and a hidden state that are normed and put
    side by side, as EAGLE-3 heads and MTP blocks do, are read where they lie. Last of all passes: it looks for the
    shapes that models write, and nothing after it reads them.

    Before::

        %t = aten.permute.default(%weight, [1, 0])
        %mm = aten.mm.default(%x, %t)
        %sum = aten.add.Tensor(%residual, %mm)

    After::

        %small = draftfuse.small_linear.default(%x, %weight, None, 0.0, False, %residual)
    """
    found = 0
    mutated = ir.mutated_storages(graph)  # the kernel reads weights before it waits for what runs in front of it
    for node in list(graph.find_nodes(op="call_function", target=aten.mm.default)):
        weight = transposed_weight(node.args[1])
        if weight is None or not ir.storages(weight).isdisjoint(mutated) or not applies(node):
            continue
        _rewrite(graph, node, weight)
        found += 1
    ir.eliminate_dead_code(graph)
    return found


@dataclass
class _Norm:
    x: fx.Node
    gain: fx.Node
    epsilon: float


def _rewrite(graph: fx.Graph, product: fx.Node, weight: fx.Node) -> None:
    gated = _swiglu_behind(product)
    if gated is None and (pair := _pair_in_front(product.args[0])) is not None:
        op = torch.ops.draftfuse.small_linear_pair.default
        _replace(graph, product, op, (*pair.front, pair.second.x, weight, *pair.gains, pair.second.epsilon), product)
        return
    norm = _norm_in_front(product.args[0])
    inputs = (norm.x, weight, norm.gain, norm.epsilon) if norm else (product.args[0], weight, None, 0.0)
    picked = _argmax_behind(product)
    if picked is not None:
        _replace(graph, picked, torch.ops.draftfuse.small_linear_argmax.default, inputs, product)
        return
    last = gated or product
    total, residual = _residual_behind(last)
    args = (*inputs, gated is not None, residual)
    _replace(graph, total or last, torch.ops.draftfuse.small_linear.default, args, product)


def _replace(graph: fx.Graph, old: fx.Node, op: Any, args: tuple[Any, ...], like: fx.Node) -> None:
    with graph.inserting_before(old):
        old.replace_all_uses_with(ir.call(graph, op, args, {}, like))


@dataclass
class _Pair:
    front: tuple[fx.Node, fx.Node | None]  # rows, or a table and the index of its rows
    second: _Norm
    gains: tuple[fx.Node, fx.Node]


def _pair_in_front(node: Any) -> _Pair | None:
    """Two normed halves side by side, of one width and epsilon."""
    if not isinstance(node, fx.Node) or node.target is not aten.cat.default or len(node.users) != 1:
        return None
    halves, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
    if dim not in (1, -1) or not isinstance(halves, (list, tuple)) or len(halves) != 2:
        return None
    first, second = map(_norm_in_front, halves)
    if first is None or second is None or first.epsilon != second.epsilon:
        return None
    a, b = ir.value(first.x), ir.value(second.x)
    if a.shape[1] != b.shape[1] or a.shape[1] % HALF_UNIT or a.dtype != b.dtype:
        return None
    return _Pair(_rows_of_table(first.x), second, (first.gain, second.gain))


def _rows_of_table(rows: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The table and the index behind an embedding lookup; the rows themselves where they come from elsewhere."""
    if rows.target is not aten.embedding.default:
        return rows, None
    table, index = rows.args[:2]
    assert isinstance(table, fx.Node)
    assert isinstance(index, fx.Node)
    is_plain = ir.root(table).op == "placeholder" and ir.value(table).is_contiguous() and ir.value(index).dim() == 1
    return (table, _before_narrowing(index)) if is_plain else (rows, None)


def _before_narrowing(index: fx.Node) -> fx.Node:
    """The int64 index that an int32 one is made from: every row of a table has the same number in both."""
    if index.target is not aten._to_copy.default:
        return index
    source = index.args[0]
    assert isinstance(source, fx.Node)
    same_device = ir.value(source).device == ir.value(index).device
    return source if same_device and ir.value(source).dtype is torch.int64 else index


def _argmax_behind(product: fx.Node) -> fx.Node | None:
    """The index of the largest value of each row, where nothing else reads the product."""
    user = _only_user(product)
    found = user is not None and user.target is aten.argmax.default and tuple(user.args[1:]) in ((-1,), (1,))
    return user if found and user is not None and not user.kwargs else None


def transposed_weight(node: Any) -> fx.Node | None:
    """``weight`` of ``weight.T``, where its rows are dense."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    swaps = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}
    if node.target not in swaps or tuple(node.args[1:]) != swaps[node.target]:
        return None
    weight = node.args[0]
    assert isinstance(weight, fx.Node)
    return weight if ir.root(weight).op == "placeholder" and ir.value(weight).is_contiguous() else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _residual_behind(node: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The sum of ``node`` and an equal shape made before it, and the other term."""
    user = _only_user(node)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return None, None
    other = user.args[1] if user.args[0] is node else user.args[0]
    if not isinstance(other, fx.Node) or not ir.is_tensor(other) or other is node:
        return None, None
    mine, its = ir.value(node), ir.value(other)
    same = mine.dtype == its.dtype and tuple(mine.shape) == tuple(its.shape)
    return (user, other) if same else (None, None)


def _swiglu_behind(product: fx.Node) -> fx.Node | None:
    """``silu(first half) * second half`` of the product."""
    split = _only_user(product)
    width = ir.value(product).shape[1]
    if split is None or split.target is not aten.split.Tensor or split.args[1:] != (width // 2, -1) or width % 2:
        return None
    halves = {item.args[1]: item for item in split.users}
    gate, up = halves.get(0), halves.get(1)
    silu = _only_user(gate) if gate is not None else None
    gated = _only_user(silu) if silu is not None else None
    if gated is None or up is None or silu is None or silu.target is not aten.silu.default:
        return None
    return gated if gated.target is aten.mul.Tensor and set(gated.args) == {silu, up} else None


def _norm_in_front(node: Any) -> _Norm | None:
    """RMS norm in float32, rounded to the dtype of x, times a gain; None where another user needs it too."""
    if not isinstance(node, fx.Node) or node.target is not aten.mul.Tensor or len(node.users) != 1:
        return None
    gains = [a for a in node.all_input_nodes if a.op == "placeholder" and ir.value(a).dim() == 1]
    if len(gains) != 1 or len(node.all_input_nodes) != 2:
        return None
    scaled = next(a for a in node.all_input_nodes if a is not gains[0])
    return _match_scaled(_through_cast(scaled), gains[0])


def _match_scaled(scaled: fx.Node, gain: fx.Node) -> _Norm | None:
    """``wide * rsqrt(mean(wide ** 2) + epsilon)``."""
    if scaled.target is not aten.mul.Tensor or len(scaled.all_input_nodes) != 2:
        return None
    roots = [a for a in scaled.all_input_nodes if a.target is aten.rsqrt.default]
    if len(roots) != 1:
        return None
    wide = next(a for a in scaled.all_input_nodes if a is not roots[0])
    inner = roots[0].args[0]
    if not isinstance(inner, fx.Node) or inner.target is not aten.add.Tensor or not isinstance(inner.args[1], float):
        return None
    mean = inner.args[0]
    if not isinstance(mean, fx.Node) or mean.target is not aten.mean.dim or tuple(mean.args[1:]) != ([-1], True):
        return None
    square = mean.args[0]
    if not isinstance(square, fx.Node) or not _is_square(square, wide):
        return None
    return _Norm(_through_cast(wide), gain, inner.args[1])


def _is_square(node: fx.Node, of: fx.Node) -> bool:
    """``of ** 2``, or ``of * of``."""
    power = node.target is aten.pow.Tensor_Scalar and node.args == (of, 2)
    return power or (node.target is aten.mul.Tensor and node.args == (of, of))


def _through_cast(node: fx.Node) -> fx.Node:
    """What a change of dtype was applied to."""
    if node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source
    return node
