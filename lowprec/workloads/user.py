"""A user's own model and data, found from what was typed on the command line.

Everything a user can get wrong here is their own code, so every error is one sentence that names the factory and what
it raised or returned; the original exception stays its cause, for ``--debug``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowprec.errors import unknown_name
from lowprec.workloads import BUILT_IN, Workload, data

__all__ = ["call", "factory", "is_text", "load", "with_data"]

DEFAULT_BATCH = 32
DEFAULT_CONTEXT = 256


def is_text(source: str | None) -> bool:
    """Whether a data source is a file rather than a factory."""
    return source is not None and (":" not in source or Path(source).exists()) and not source.endswith(".py")


def factory(spec: str) -> Callable[[], Any]:
    """The callable that ``package.module:name`` or ``script.py`` (its ``build``) stands for."""
    if spec.endswith(".py") or ".py:" in spec:
        path, _, name = spec.partition(":")
        module, name = _script(Path(path)), name or "build"
    else:
        where, colon, name = spec.partition(":")
        if not colon:
            known = [*BUILT_IN, "package.module:factory", "script.py"]
            raise unknown_name("model", spec, known)
        module = _module(where)
    found = getattr(module, name, None)
    if not callable(found):
        have = [n for n in vars(module) if callable(getattr(module, n)) and not n.startswith("_")]
        raise unknown_name(f"factory in {spec.partition(':')[0]}", name, have or ["(none)"])
    return found  # type: ignore[no-any-return]


def _module(name: str) -> Any:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ValueError(f"module {name} could not be imported: {type(error).__name__}: {error}") from error


def _script(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    return module


def call(spec: str) -> Any:
    """Call a factory; what it raises becomes one sentence."""
    build = factory(spec)
    try:
        return build()
    except Exception as error:
        raise ValueError(f"{spec} raised {type(error).__name__}: {error}") from error


def _as_data(value: Any, spec: str, batch: int | None) -> data.Data:
    """Whatever a data factory returned, as a data source."""
    if hasattr(value, "train") and hasattr(value, "validation") and hasattr(value, "unit"):
        return value  # type: ignore[no-any-return]
    if isinstance(value, (tuple, list)) and len(value) == 2:
        train, held_out = value
        size, collate = batch or DEFAULT_BATCH, None
        if isinstance(train, torch.utils.data.DataLoader):
            size, collate, train = batch or train.batch_size or DEFAULT_BATCH, train.collate_fn, train.dataset
        held_out = held_out.dataset if isinstance(held_out, torch.utils.data.DataLoader) else held_out
        return data.Samples(train, held_out, size, collate)
    if isinstance(value, torch.utils.data.DataLoader):
        size = batch or value.batch_size or DEFAULT_BATCH
        return data.Samples(*_split(value.dataset), size, value.collate_fn)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return data.Samples(*_split(value), batch or DEFAULT_BATCH)
    raise TypeError(
        f"{spec} returned {type(value).__name__}; give (train, validation) datasets, one dataset or a DataLoader over "
        "a dataset that can be indexed."
    )


def _split(dataset: Any) -> tuple[Any, Any]:
    cut = len(dataset) * 9 // 10
    if cut == 0 or cut == len(dataset):
        raise ValueError(f"a dataset of {len(dataset)} items is too small to hold out a tenth for validation.")
    subset = torch.utils.data.Subset
    return subset(dataset, range(cut)), subset(dataset, range(cut, len(dataset)))


def _source(spec: str, batch: int | None, context: int) -> data.Data:
    if is_text(spec):
        return data.ByteText(*data.bytes_of_files(spec.split(",")), context, batch or DEFAULT_BATCH)
    return _as_data(call(spec), spec, batch)


def with_data(workload: Workload, source: str | None, batch: int | None) -> Workload:
    """A built-in model on other data."""
    if source is None:
        return workload
    return dataclasses.replace(workload, data=_source(source, batch, DEFAULT_CONTEXT), sample=False)


def load(model: str, source: str | None, batch: int | None) -> Workload:
    """A user's model and data."""
    first = call(model)
    if isinstance(first, Workload):
        return first if source is None else with_data(first, source, batch)
    rest: Any = None
    if isinstance(first, tuple) and first and isinstance(first[0], nn.Module):
        rest = first[1] if len(first) == 2 else first[1:]
        first = first[0]
    if not isinstance(first, nn.Module):
        raise TypeError(f"{model} returned {type(first).__name__}; it should return a torch.nn.Module.")
    build = factory(model)

    def fresh() -> nn.Module:
        made = build()
        return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

    context = int(getattr(first, "context", getattr(first, "block_size", DEFAULT_CONTEXT)))
    if source is not None:
        found = _source(source, batch, context)
    elif rest is not None:
        found = _as_data(rest, model, batch)
    else:
        raise ValueError(
            f"{model} brings no data of its own; give some with --data (a file or package.module:factory)."
        )
    return Workload(model, fresh, found, about=f"{type(first).__name__} from {model}")
