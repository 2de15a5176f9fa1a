"""``module:factory`` on a command line: import the module, call the factory, get a speculator."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch

from draftfuse.errors import DraftfuseError, InvalidOptionError, InvalidSpeculatorError, SourceLine
from draftfuse.failures import first_words
from draftfuse.speculator import DraftBatch
from draftfuse.step_log import is_watched
from draftfuse.validate import source_of

NAME_ONE = "Name a function without arguments that returns the speculator."


def load(target: str) -> Any:
    """The speculator that ``module:factory`` (or ``path/to/file.py:factory``) makes.

    Raises:
        InvalidOptionError: there is no such module or factory, or the module cannot be imported.
        InvalidSpeculatorError: the factory raises, or returns None.
    """
    place, _, name = target.partition(":")
    if not place or not name:
        raise InvalidOptionError("the target is no factory", target or "nothing", "module:factory", NAME_ONE)
    factory = getattr(module := _module(place, target), name, None)
    if not callable(factory):
        found = type(factory).__name__ if hasattr(module, name) else "nothing of that name"
        raise InvalidOptionError("the target is no factory", f"{target} ({found})", "module:factory", NAME_ONE)
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise InvalidOptionError("the factory takes arguments", f"{target} ({error})", "none", NAME_ONE) from error
    except ValueError:  # a callable without a signature: calling it shows
        pass
    return _made(factory, target)


def _made(factory: Any, target: str) -> Any:
    try:
        spec = factory()
    except DraftfuseError:
        raise
    except (Exception, SystemExit) as error:
        what, todo = f"the factory {target} fails", "Correct it; the original exception is the cause of this one."
        raise InvalidSpeculatorError(what, first_words(error), "a speculator", todo, _line_of(error)) from error
    if spec is None:
        what, todo = f"the factory {target} returns nothing", "Return the speculator."
        raise InvalidSpeculatorError(what, "None", "a speculator", todo, source_of(factory))
    return spec


def _module(place: str, target: str) -> Any:
    sys.path.insert(0, "")
    try:
        return _of_file(place) if place.endswith(".py") else importlib.import_module(place)
    except DraftfuseError:
        raise
    except (Exception, SystemExit) as error:  # whatever its statements raise
        line, came = _line_of(error), f"{target} ({first_words(error)})"
        missing = "Run in the folder of the module, or give the path of the file."
        todo = missing if line is None else "Correct it; the original exception is the cause of this one."
        raise InvalidOptionError("the module cannot be imported", came, "module:factory", todo, line) from error
    finally:
        sys.path.remove("")


def _of_file(place: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]  # half of it must not be found by the next import
        raise
    return module


def _line_of(error: BaseException) -> SourceLine | None:
    """The innermost line of the user's that raised ``error``, or is no Python; None where no code of theirs ran."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return SourceLine.of(error.filename, error.lineno)
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    users = [(file, line) for file, line in lines if is_watched(file) and not file.startswith("<")]
    return SourceLine.of(*users[-1]) if users else None


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
