"""Checkpoints on disk: one safetensors file, with the structure as JSON in its header.

Tensors lie in the file under readable names ("model.0.blocks.1.weight"), so anything that reads safetensors can take
them out without lowprec; everything else is JSON in the header's metadata under "lowprec".

A checkpoint is written beside its place, flushed to disk, and moved there in one operation of the file system: whatever
kills the process, the path holds the old checkpoint or the new one, whole. One file, because a directory cannot be
replaced in one operation.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from lowprec.training.prepare import optimizers_of
from lowprec.training.state import load_state_dict, state_dict

__all__ = ["export", "load", "save"]

_META = "lowprec"


def save(path: str | os.PathLike[str], model: Any, optimizer: Any = None, *, rng: bool = True, **extra: Any) -> None:
    """Write a checkpoint, replacing the one at `path` in one operation.

    Args:
        path: the file.
        model, optimizer: as for `lowprec.state_dict`.
        rng: whether random generators are part of it.
        **extra: values of your own that `load` returns: numbers, strings, lists, dicts, tensors, and anything with a
            `state_dict` (a scheduler), of which that is saved.

    Raises:
        OSError: if it cannot be written; the old checkpoint is still there then.
    """
    state = state_dict(model, optimizer, rng=rng)
    state["extra"] = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in extra.items()}
    tensors: dict[str, torch.Tensor] = {}
    structure = _flatten(state, "", tensors)
    _write(Path(path), tensors, {_META: json.dumps(structure)})


def load(path: str | os.PathLike[str], model: Any = None, optimizer: Any = None, *, rng: bool = True) -> dict[str, Any]:
    """Read a checkpoint.

    Args:
        path: the file.
        model, optimizer: what goes on from it, prepared as when it was saved. Without an optimizer the model's weights
            alone are loaded; without a model nothing is, and the whole state is returned.
        rng: whether to set the random generators.

    Returns:
        The values given to `save` as `extra`; without a model, the state with these under "extra".

    Raises:
        ValueError: if the file is truncated, not lowprec's, or does not fit; the sentence names file and key.
        OSError: if it cannot be read.
    """
    state = _read(Path(path))
    if model is None:
        return state
    try:
        load_state_dict(model, optimizer, state, rng=rng)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    extra: dict[str, Any] = state.get("extra", {})
    return extra


def export(
    model: nn.Module, path: str | os.PathLike[str], dtype: torch.dtype = torch.float32, *, optimizer: Any = None
) -> None:
    """Write the weights for anyone: plain names, one dtype, readable without lowprec.

    Where exact masters exist, they are what is written.

    Args:
        model: the model.
        path: a ``.safetensors`` file, or ``.pt`` / ``.pth`` for `torch.load`.
        dtype: dtype of everything that is a float.
        optimizer: whose masters to take (default: those of `lowprec.prepare` that train this model).

    Raises:
        ValueError: for a name that ends in none of these.
    """
    target = Path(path)
    if target.suffix not in (".safetensors", ".pt", ".pth"):
        raise ValueError(f"export writes .safetensors, .pt or .pth, got {target.name!r}.")
    exact: dict[torch.Tensor, torch.Tensor] = {}
    for each in [optimizer] if optimizer is not None else optimizers_of(model):
        inner = getattr(each, "inner", each)
        if hasattr(inner, "masters"):
            exact |= inner.masters()
    params = dict(model.named_parameters(remove_duplicate=False))
    tensors = {}
    scales = {f"{name}_scale" for name, param in params.items() if hasattr(param, "_lowprec_scale")}
    for name, value in model.state_dict().items():
        if name in scales:
            continue
        param = params.get(name)
        if param is not None and (param in exact or hasattr(param, "_lowprec_scale")):
            value = exact[param] if param in exact else _decoded(param)
        tensors[name] = value.detach().to("cpu", dtype) if value.is_floating_point() else value.detach().cpu()
    if target.suffix == ".safetensors":
        _write(target, {k: v.clone().contiguous() for k, v in tensors.items()}, {"format": "pt"})
        return
    with _in_place(target) as partial:
        torch.save(tensors, partial)


def _decoded(param: torch.Tensor) -> torch.Tensor:
    from lowprec.optim.base import read_weight

    return read_weight(param)


# -- structure -----------------------------------------------------------------------------------------------------


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON can hold it; tensors go into `tensors` and leave their name."""
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce()
            parts = {"indices": value.indices(), "values": value.values()}
            return {"$sparse": [list(value.shape), _flatten(parts, path, tensors)]}
        tensors[path] = value.detach()
        return {"$tensor": path}
    if isinstance(value, Mapping):
        plain = {k: _flatten(v, f"{path}.{k}" if path else str(k), tensors) for k, v in value.items()}
        if all(isinstance(k, str) and not k.startswith("$") for k in plain):
            return plain
        return {"$dict": [[k, v] for k, v in plain.items()]}
    if isinstance(value, (list, tuple)):
        items = [_flatten(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return value.item()
    raise ValueError(
        f"a checkpoint holds numbers, strings, lists, dicts and tensors; {path} is {type(value).__name__}."
    )


def _restore(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_restore(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        if value["$tensor"] not in tensors:
            raise ValueError(f"key {value['$tensor']} is named in the header and not in the file")
        return tensors[value["$tensor"]]
    if "$sparse" in value:
        parts = _restore(value["$sparse"][1], tensors)
        return torch.sparse_coo_tensor(
            parts["indices"], parts["values"], value["$sparse"][0], is_coalesced=True, check_invariants=False
        )
    if "$dict" in value:
        return {k: _restore(v, tensors) for k, v in value["$dict"]}
    if "$tuple" in value:
        return tuple(_restore(v, tensors) for v in value["$tuple"])
    if "$dtype" in value:
        return getattr(torch, value["$dtype"])
    return {k: _restore(v, tensors) for k, v in value.items()}


# -- the file ------------------------------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            if _META not in meta:
                raise ValueError(
                    f"{path} is a safetensors file without key {_META!r} in its header: not lowprec.save's."
                )
            names = list(file.keys())
            state = _restore(json.loads(meta[_META]), {name: file.get_tensor(name) for name in names})
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is truncated or no checkpoint of lowprec.save: {error}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: key {_META!r} of its header is damaged: {error}.") from error
    assert isinstance(state, dict)
    return state


def _write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file in one operation of the file system."""
    with _in_place(path) as partial:
        save_file(_separate(tensors), partial, metadata)


def _separate(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors that share no memory, as safetensors needs them."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        key = tensor.untyped_storage().data_ptr()
        if tensor.numel() and (key in seen or tensor.untyped_storage().nbytes() != tensor.nbytes):
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        out[name] = tensor
    return out


@contextmanager
def _in_place(path: Path) -> Iterator[Path]:
    """Where to write; on leaving, it is flushed and moved to `path`, or removed if writing failed.

    It lies in a folder of its own beside the path (the writer makes temporary files of its own), named for the
    process, so that what a killed process left is known and removed.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to save {path.name} in.")
    for left in path.parent.glob(f".{path.name}.partial-*"):
        if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            shutil.rmtree(left, ignore_errors=True)
    folder = path.with_name(f".{path.name}.partial-{os.getpid()}")
    folder.mkdir(exist_ok=True)
    try:
        yield folder / path.name
        _flush(folder / path.name)
        (folder / path.name).replace(path)
        _flush(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
