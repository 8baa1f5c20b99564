"""What a step leaves for the next, so that thousands of small tensors cost the time of their elements.

Looking at a parameter (its gradient, state, program, addresses) takes microseconds of Python, and updating 4,096
elements takes about three. Between two steps little of that changes: the addresses of gradients and the coefficients.
`Kept` holds the batches of a step with their address tables, and decides whether they still hold. It compares, in
passes over lists that run in C, the parameters by identity, address, dtype, strides and number of elements; the states
by identity and address; the attributes by which this package marks parameters; and the settings a program follows
from. Gradients are referred to weakly, so that nothing of them outlives the step. Whatever differs, the next step
looks at everything again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import is_
from typing import Any

import torch

from lowprec.kernels import backend
from lowprec.kernels.stores import Batch

__all__ = ["Kept", "keep"]

_MARKS = ("_lowprec_scale", "_lowprec_sink", "_lowprec_grad", "_lowprec_stream", "_lowprec_offset")
_SETTINGS = ("states", "master", "update", "residue", "min_quantized", "state_rounding", "nesterov")
_address = torch.Tensor.data_ptr


def _same(a: list[Any], b: list[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


def _settings(optimizer: Any) -> list[Any]:
    """What programs follow from."""
    found = []
    for group in optimizer.param_groups:
        values = [group.get(name) for name in _SETTINGS]
        values[0] = values[0] if isinstance(values[0], str) else tuple(values[0])
        found.append((values, optimizer._states(group)))
    return found


class Kept:
    """The batches of a step, and what they rest on.

    Args:
        optimizer: whose step it was.
        batches: for each batch its group, the batch, the step it made and its parameters.
    """

    def __init__(self, optimizer: Any, batches: list[tuple[Mapping[str, Any], Batch, int, list[torch.Tensor]]]) -> None:
        self.batches = batches
        self.params = [p for _, _, _, params in batches for p in params]
        self.all = [p for group in optimizer.param_groups for p in group["params"]]
        active = set(map(id, self.params))
        self.idle = [p for p in self.all if id(p) not in active]
        self.dicts = [p.__dict__ for p in self.all]
        self.marks = self._marks()
        self.groups, self.settings = list(optimizer.param_groups), _settings(optimizer)
        self.states = list(optimizer.state.values())
        self.own = [optimizer.state[p] for p in self.params]
        self.entries = list(chain.from_iterable(map(dict.values, self.own)))
        names = chain.from_iterable(map(dict.keys, self.own))
        self.steps = [i for i, name in enumerate(names) if name == "step"]
        scales = [getattr(p, "_lowprec_scale", None) for p in self.params]
        held = [*chain.from_iterable(s.values() for s in self.own), *scales]
        self.held = self.params + [t for t in held if isinstance(t, torch.Tensor)]
        self.addresses = list(map(_address, self.held))
        self.layout = self._layout()
        grads: list[Any] = [p.grad for p in self.params]
        self.grad_dtypes, self.shapes = [g.dtype for g in grads], [p.shape for p in self.params]
        self.refs, self.grad_addresses = list(map(weakref.ref, grads)), list(map(_address, grads))

    def _marks(self) -> list[Any]:
        return [d.get(name) for d in self.dicts if d for name in _MARKS]

    def _layout(self) -> list[Any]:
        ps, tensor = self.params, torch.Tensor
        return [[p.dtype for p in ps], list(map(tensor.stride, ps)), list(map(tensor.numel, ps))]

    def count(self, first: int, last: int, step: int) -> None:
        """Note in the states of parameters [first, last) that they have made a step."""
        for state, at in zip(self.own[first:last], self.steps[first:last], strict=True):
            state["step"] = self.entries[at] = step

    def stands(self, optimizer: Any) -> bool:
        """Whether parameters, states and settings are those the batches were made from."""
        groups = optimizer.param_groups
        return (
            _same(groups, self.groups)
            and _same(list(chain.from_iterable([g["params"] for g in groups])), self.all)
            and _same(list(optimizer.state.values()), self.states)
            and _same(list(chain.from_iterable(map(dict.values, self.own))), self.entries)
            and _same(self._marks(), self.marks)
            and list(map(_address, self.held)) == self.addresses
            and self._layout() == self.layout
            and _settings(optimizer) == self.settings
            and backend(self.params[0]) == "native"
        )

    def gradients(self) -> list[torch.Tensor] | None:
        """The gradients, if the same parameters have one and each is stored as it was; to be held during the step."""
        grads: list[Any] = [p.grad for p in self.params]
        if any(g is None for g in grads) or any(p.grad is not None for p in self.idle):
            return None
        known = _same(grads, [ref() for ref in self.refs])
        if not known and not self._fit(grads):
            return None
        addresses = list(map(_address, grads))
        if addresses != self.grad_addresses and known and not self._fit(grads):
            return None
        if not known:
            self.refs = list(map(weakref.ref, grads))
        self.grad_addresses = addresses
        return grads

    def _fit(self, grads: list[torch.Tensor]) -> bool:
        return (
            all(g.layout is torch.strided for g in grads)
            and [g.dtype for g in grads] == self.grad_dtypes
            and all(map(torch.Tensor.is_contiguous, grads))
            and [g.shape for g in grads] == self.shapes
            and all(g.is_cpu for g in grads)
        )

    def factors(self, grad_factor: float | Mapping[torch.Tensor, float]) -> list[float] | None:
        """The finite gradient factor of each batch, if each has one."""
        found = []
        for _, _, _, params in self.batches:
            each: Iterable[float] = [grad_factor] if not isinstance(grad_factor, Mapping) else [
                grad_factor.get(p, 1.0) for p in params
            ]  # fmt: skip
            values = {float(v) for v in each}
            if len(values) != 1 or not math.isfinite(min(values)):
                return None
            found.append(values.pop())
        if isinstance(grad_factor, Mapping) and not all(math.isfinite(float(v)) for v in grad_factor.values()):
            return None
        return found


def keep(optimizer: Any, work: list[Any]) -> Kept | None:
    """What to keep of a step; None where a batch holds copies or gradients that are not plain ``.grad``."""
    for batch, _, _, params in work:
        if backend(params[0]) != "native":
            return None
        if not all(s.weight is p and s.grad is not None and s.grad is p.grad
                   for p, s in zip(params, batch.slots, strict=True)):  # fmt: skip
            return None
    if not work:
        return None
    for batch, *_ in work:
        for slot in batch.slots:
            slot.grad = None
    return Kept(optimizer, [(optimizer._group(params[0]), batch, step, params) for batch, _, step, params in work])
