"""What the casts of an applied model did to its numbers, counted in the passes that cast them.

    with lp.observe(model) as watch:
        step()
    for row in watch.rows(): print(row)

Each cast of each layer is a row: how many elements it saw, how many non-zero ones became zero, how many were cut off at
the largest value, how many were Inf or NaN, and the largest magnitude. The kernels count in the same pass that casts,
so watching costs little; it also turns the cache of weight casts off, since every cast is to be seen. A step of several
micro-batches adds up. Compiled graphs are not watched: their rows are missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lowprec.handlers import ModuleState

__all__ = ["CASTS", "Observer", "Statistics", "Watch", "observe"]

# the six casts, in the order in which `lowprec.linear` numbers them
CASTS = (
    "output.input",
    "output.weight",
    "grad_input.grad_output",
    "grad_input.weight",
    "grad_weight.grad_output",
    "grad_weight.input",
)


class Statistics(NamedTuple):
    """What one cast of one module saw.

    Args:
        module: qualified name.
        role: which product and operand, as in "grad_weight.input".
        elements: how many elements were cast.
        flushed: non-zero elements that became zero.
        saturated: finite elements beyond the largest value.
        nonfinite: elements that were Inf or NaN.
        amax: the largest magnitude (NaN if there was one).
        scale: the scale that was used (the largest of several), or None where it is part of the values.
    """

    module: str
    role: str
    elements: int
    flushed: int
    saturated: int
    nonfinite: int
    amax: float
    scale: float | None


class Observer:
    """Where one module's casts are counted; nothing is read from the device until `rows` is called."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counted: dict[int, list[tuple[Tensor, int, Tensor | None]]] = {}

    def add(self, role: int, counters: Tensor, elements: int, scale: Tensor | None) -> None:
        """Take in the counters of one cast."""
        self.counted.setdefault(role, []).append((counters, elements, scale))

    def rows(self) -> Iterator[Statistics]:
        """A row for each role seen."""
        for role, seen in sorted(self.counted.items()):
            counts = torch.stack([counters for counters, _, _ in seen])
            flushed, saturated, nonfinite = counts[:, :3].sum(0).tolist()
            amax = counts[:, 3].max().to(torch.int32).view(torch.float32).item()
            scale = seen[-1][2]
            largest = None if scale is None or scale.numel() == 0 else float(scale.max())
            elements = sum(n for _, n, _ in seen)
            yield Statistics(self.name, CASTS[role], elements, flushed, saturated, nonfinite, amax, largest)


class Watch:
    """A running observation of a model."""

    def __init__(self, observers: list[Observer]) -> None:
        self.observers = observers

    def rows(self) -> list[Statistics]:
        """What was seen so far, a row for each module and role, in the order of the model."""
        return [row for observer in self.observers for row in observer.rows()]

    def clear(self) -> None:
        """Forget what was seen, to begin the next step."""
        for observer in self.observers:
            observer.counted.clear()


@contextmanager
def observe(model: nn.Module) -> Iterator[Watch]:
    """Count what the casts of an applied model do, within a block.

    Args:
        model: a model that a recipe was applied to, or one that contains it.

    Returns:
        A context manager; its `Watch` gives the rows, within the block and after it.

    Raises:
        ValueError: if no module of the model casts anything.

    >>> import lowprec as lp
    >>> net = lp.apply(nn.Linear(4, 2), "fp8")
    >>> with lp.observe(net) as watch:
    ...     y = net(torch.ones(3, 4))
    >>> [(row.role, row.elements, row.amax) for row in watch.rows()][0]
    ('output.input', 12, 1.0)
    """
    states = {}
    for module in model.modules():
        state = getattr(module, "_lowprec", None)
        if isinstance(state, ModuleState):
            states[id(state)] = state
    if not states:
        raise ValueError("no module of this model has a recipe applied: call lowprec.apply or lowprec.prepare first.")
    watch = Watch([Observer(state.name) for state in states.values()])
    for state, observer in zip(states.values(), watch.observers):
        state.observer = observer
    try:
        yield watch
    finally:
        for state in states.values():
            state.observer = None
