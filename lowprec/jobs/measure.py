"""Bytes: who holds them, and how many a step needs at its peak.

Two questions, two ways of counting.

*Who holds them* is answered by walking the objects: parameters and their scales are weights, what the gradients are
kept in is gradients, what the optimizer holds is states and masters. Storages are counted once however many tensors
view them.

*How many at the peak* is answered by the allocator. Resident size is a poor witness when several models live in one
process, since freed memory stays resident; on glibc `mallinfo2` says exactly how many bytes are in use, and a thread
asks it every half millisecond while one step runs. On a GPU, torch's own counter answers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Bytes", "bytes_by_role", "bytes_in_use", "peak_of", "saved_bytes"]


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _mallinfo() -> Callable[[], _Mallinfo2] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo2
    return function


_MALLINFO = _mallinfo() if sys.platform == "linux" else None


def bytes_in_use(device: torch.device | None = None) -> int | None:
    """Bytes allocated right now in this process (or on the GPU), or None where nobody can say."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    if _MALLINFO is None:
        return None
    info = _MALLINFO()
    return int(info.uordblks + info.hblkhd)


def peak_of(work: Callable[[], object], device: torch.device | None = None) -> int | None:
    """Run ``work`` and return the most bytes it held at once beyond those in use at its start."""
    start = bytes_in_use(device)
    if start is None:
        work()
        return None
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - start
    done, highest = threading.Event(), [start]

    def watch() -> None:
        while not done.wait(0.0005):
            highest[0] = max(highest[0], bytes_in_use() or 0)

    watcher, interval = threading.Thread(target=watch, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # the watcher must get its turn between two ops
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
        sys.setswitchinterval(interval)
    return max(highest[0], bytes_in_use() or 0) - start


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes a model and its optimizer keep between steps."""

    weights: int = 0
    masters: int = 0
    gradients: int = 0
    states: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.masters + self.gradients + self.states


def _tensors(value: Any, seen: set[int], depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor reachable from a value through containers and lowprec's own objects."""
    if depth > 12 or id(value) in seen or isinstance(value, (str, bytes, int, float, type, nn.Module)):
        return
    seen.add(id(value))
    children: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
        children = [v for k, v in vars(value).items() if k.startswith("_lowprec")]
    elif isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        children = value
    elif type(value).__module__.startswith("lowprec.") or isinstance(value, torch.optim.Optimizer):
        slots = [s for cls in type(value).__mro__ for s in getattr(cls, "__slots__", ())]
        own = getattr(value, "__dict__", {})
        # `_kept` points at the states once more and holds a few addresses a tensor: bookkeeping, not a state
        children = [*(v for k, v in own.items() if k != "_kept"), *(getattr(value, s, None) for s in slots)]
    for child in children:
        yield from _tensors(child, seen, depth + 1)


def _sum(tensors: Iterable[torch.Tensor], counted: set[tuple[str, int]]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            continue
        storage = tensor.untyped_storage()
        key = (str(tensor.device), storage.data_ptr())
        if storage.nbytes() and key not in counted:
            counted.add(key)
            total += storage.nbytes()
    return total


def _gradient_tensors(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad
        for name, value in vars(parameter).items():
            if name.startswith("_lowprec") and ("grad" in name or "sink" in name):
                yield from _tensors(value, {id(parameter)})


def bytes_by_role(model: nn.Module, optimizer: torch.optim.Optimizer) -> Bytes:
    """Bytes by role, each storage once; call it after a backward pass and before gradients are dropped.

    >>> model = nn.Linear(8, 8, bias=False)
    >>> model(torch.ones(1, 8)).sum().backward()
    >>> bytes_by_role(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Bytes(weights=256, masters=0, gradients=256, states=0)
    """
    parameters = list(model.parameters())
    counted: set[tuple[str, int]] = set()
    gradients = _sum(_gradient_tensors(parameters), counted)
    scales = [v for p in parameters for k, v in vars(p).items() if k.endswith("scale") and isinstance(v, torch.Tensor)]
    weights = _sum([*parameters, *model.buffers(), *scales], counted)
    held = [(str(k), v) for state in optimizer.state.values() for k, v in state.items()]
    masters = _sum(_tensors([v for k, v in held if k.startswith(("master", "residue"))], set()), counted)
    seen = {id(optimizer.param_groups)} | {id(p) for p in parameters}
    states = _sum(_tensors([v for _, v in held], set(seen)), counted)
    states += _sum(_tensors(optimizer, seen), counted)
    return Bytes(weights, masters, gradients, states)


def saved_bytes(forward: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """Bytes autograd keeps for the backward pass of ``forward``, without the model's own parameters."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    total = sum(kept.values())
    del out
    return total
