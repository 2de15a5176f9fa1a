"""``module:factory`` on a command line: import the module, call the factory, get a speculator."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import torch

from draftfuse.errors import InvalidOptionError
from draftfuse.speculator import DraftBatch


def load(target: str) -> Any:
    """The speculator that ``module:factory`` (or ``path/to/file.py:factory``) makes.

    Raises:
        InvalidOptionError: there is no such module or factory.
    """
    place, _, name = target.partition(":")
    factory = getattr(_module(place, target), name, None) if name else None
    if not callable(factory):
        todo = "Name a function without arguments that returns the speculator."
        raise InvalidOptionError("the target is no factory", target, "module:factory", todo)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        todo = "Name a function without arguments that returns the speculator."
        raise InvalidOptionError("the factory takes arguments", f"{target} ({error})", "none", todo) from error
    return factory()


def _module(place: str, target: str) -> Any:
    sys.path.insert(0, "")
    try:
        if not place.endswith(".py"):
            return importlib.import_module(place)
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    except (ImportError, FileNotFoundError) as error:
        todo = "Run in the folder of the module, or give the path of the file."
        raise InvalidOptionError(
            "the module cannot be imported", f"{target} ({error})", "module:factory", todo
        ) from error
    finally:
        sys.path.remove("")


def dummy_batch(spec: Any, num_reqs: int | None = None, seed: int = 0) -> DraftBatch:
    """A batch of random contexts of several lengths, one of them near the length limit."""
    generator = torch.Generator().manual_seed(seed)
    rows = min(num_reqs or 3, spec.max_num_reqs)
    query = min(2, spec.max_model_len)
    most = spec.max_model_len
    lengths = [max(query, min(most, n)) for n in ([5, 9, most - 1, 3] * rows)[:rows]]
    total, inputs = rows * query, spec.inputs
    device = inputs.positions.device

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randint(2, shape, generator=generator).to(device)

    hidden = torch.randn(total, inputs.hidden_states.shape[1], generator=generator)
    return DraftBatch(
        num_reqs=rows,
        num_tokens=total,
        max_seq_len=max(lengths),
        hidden_states=hidden.to(device, inputs.hidden_states.dtype),
        input_ids=drawn(total),
        positions=torch.cat([torch.arange(n - query, n) for n in lengths]).to(device),
        query_start_loc=(torch.arange(rows + 1, dtype=torch.int32) * query).to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
        num_rejected=torch.zeros(rows, dtype=torch.int64).to(device),
        last_sampled=drawn(rows),
        temperature=torch.zeros(rows).to(device),
        seeds=torch.arange(rows).to(device),
        idx_mapping=torch.arange(rows).to(device),
    )
