"""Where the gradients are: by parameter, with a name, and as what the kernels can read.

A gradient may be dense, sparse (an embedding's rows), the local shard of a distributed tensor, an fp32 accumulator
beside a 16-bit parameter, or 8-bit codes that were stored as they were made (`lowprec.gradients`). The step asks one
question of all of them: how many Inf and NaN, and what sum of squares.

16-bit gradients of several micro-batches are added in fp32. autograd adds into ``param.grad`` in the parameter's own
dtype, which drops what is 2^-8 (bf16) of the sum; so before the second backward of a step the gradient that is there
moves to an fp32 accumulator, and later ones are added to it. One micro-batch costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from lowprec.gradients import Sink, sink
from lowprec.kernels.cast import tensor_stats

__all__ = ["Gradients", "Source", "measure"]

_LOW = (torch.float16, torch.bfloat16)


class Source(NamedTuple):
    """One gradient.

    Args:
        param: its parameter.
        name: the parameter's name.
        grad: what the optimizer will read.
        values: the dense local tensor that statistics read.
        sharded: whether `values` is one rank's part of the gradient.
        embedding: whether the parameter belongs to an embedding.
        store: the gradient's store, which then holds it instead of `grad` and `values`.
    """

    param: torch.Tensor
    name: str
    grad: torch.Tensor
    values: torch.Tensor
    sharded: bool
    embedding: bool
    store: Sink | None = None


class Gradients:
    """The gradients of an optimizer's parameters between `backward` and `step`.

    Args:
        optimizer: whose param_groups say which parameters.
        models: where the names come from.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, models: list[nn.Module]) -> None:
        self.optimizer = optimizer
        self.models = models
        self.sums: dict[torch.Tensor, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        self._embeddings: set[int] = set()
        self._seen: dict[int, tuple[int, int]] = {}

    # -- parameters ------------------------------------------------------------------------------------------------

    def params(self) -> Iterator[torch.Tensor]:
        """Every parameter of the optimizer, in its order."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def name(self, param: torch.Tensor) -> str:
        """The parameter's name in its model, or its place in the optimizer."""
        if id(param) not in self._names:
            self._refresh()
        return self._names.get(id(param), "a parameter that left the optimizer")

    def _refresh(self) -> None:
        """Read names again: parameters may have been added since."""
        self._names = {
            id(param): f"group {g}, parameter {p} {tuple(param.shape)}"
            for g, group in enumerate(self.optimizer.param_groups)
            for p, param in enumerate(group["params"])
        }
        for index, model in enumerate(self.models):
            prefix = f"model {index}: " if len(self.models) > 1 else ""
            for name, param in model.named_parameters():
                self._names[id(param)] = prefix + name.removeprefix("module.")
            for module in model.modules():
                if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                    self._embeddings.add(id(module.weight))

    # -- accumulation ----------------------------------------------------------------------------------------------

    def make_room(self) -> None:
        """Move 16-bit gradients to fp32 accumulators, so that the next backward writes fresh ones."""
        for param in self.params():
            grad = param.grad
            if grad is not None and grad.dtype in _LOW and not grad.is_sparse:
                if param in self.sums:
                    self.sums[param].add_(grad)
                else:
                    self.sums[param] = grad.float()
                param.grad = None

    def take_all(self) -> dict[torch.Tensor, torch.Tensor]:
        """Take every gradient out of the parameters."""
        taken = {}
        for param in self.params():
            if param.grad is not None:
                taken[param] = param.grad
                param.grad = None
        return taken

    def add_scaled(self, taken: dict[torch.Tensor, torch.Tensor], factor: float) -> None:
        """Multiply the gradients that are there by a factor and add those taken out before."""
        for param in self.params():
            fresh, before = param.grad, taken.get(param)
            if fresh is not None and fresh.dtype in _LOW and not fresh.is_sparse:
                total = fresh.float().mul_(factor)
                for earlier in (before, self.sums.get(param)):
                    if earlier is not None:
                        total.add_(earlier)
                self.sums[param], param.grad = total, None
            elif fresh is not None:
                fresh.mul_(factor)
                if before is not None:
                    param.grad = before.add_(fresh)
            elif before is not None:
                param.grad = before

    def clear(self) -> None:
        """Forget accumulators and what was seen."""
        self.sums.clear()
        self._seen.clear()

    # -- who changed what ------------------------------------------------------------------------------------------

    def remember(self) -> None:
        """Note each gradient as it is now, for `changed`."""
        self._seen = {id(p): (id(p.grad), p.grad._version) for p in self.params() if p.grad is not None}

    def changed(self) -> list[torch.Tensor]:
        """Parameters whose gradient was replaced or written since `remember`, other than to None or zero."""
        return [
            p
            for p in self.params()
            if p.grad is not None
            and self._seen.get(id(p)) != (id(p.grad), p.grad._version)
            and bool((p.grad._values() if p.grad.is_sparse else p.grad).count_nonzero())
        ]

    def kept(self) -> list[torch.Tensor]:
        """Parameters whose gradient is the one that `remember` noted."""
        return [
            p for p in self.params() if p.grad is not None and self._seen.get(id(p)) == (id(p.grad), p.grad._version)
        ]

    def all_gone(self) -> bool:
        """Whether gradients were noted and every one is None now."""
        return bool(self._seen) and all(p.grad is None for p in self.params())

    # -- reading ---------------------------------------------------------------------------------------------------

    def collect(self) -> list[Source]:
        """Every gradient of this step, accumulators included."""
        sources = []
        for param in self.params():
            grad = param.grad
            store = sink(param)
            if store is not None and store.filled:
                assert store.codes is not None
                embedding = id(param) in self._embeddings
                sources.append(Source(param, self.name(param), store.codes, store.codes, False, embedding, store))
                continue
            total = self.sums.get(param)
            if total is not None:
                if grad is not None:
                    total.add_(grad)
                    param.grad = None
                grad = total
            if grad is not None:
                sources.append(self._source(param, grad))
        return sources

    def fresh(self) -> list[Source]:
        """The gradients of the last backward alone."""
        return [self._source(param, param.grad) for param in self.params() if param.grad is not None]

    def _source(self, param: torch.Tensor, grad: torch.Tensor) -> Source:
        if grad.is_sparse:
            # duplicate rows are added in fp32: a 16-bit sum of scaled values overflows
            if not grad.is_coalesced():
                grad = param.grad = _coalesce(grad)
            values, sharded = grad._values(), False
        else:
            values, sharded = _local(grad)
        name = self.name(param)
        return Source(param, name, grad, values, sharded, id(param) in self._embeddings)


class Health(NamedTuple):
    """What the statistics of a list of sources come to.

    Args:
        inf, nan: names of tensors that hold them.
        squares: sum of squares of [other, embedding] gradients that every rank has whole.
        shares: the same of sharded ones, this rank's part.
    """

    inf: tuple[str, ...]
    nan: tuple[str, ...]
    squares: list[float]
    shares: list[float]


def measure(sources: list[Source]) -> Health:
    """One pass over every gradient: Inf apart from NaN by name, and sums of squares."""
    if not sources:
        return Health((), (), [0.0, 0.0], [0.0, 0.0])
    plain = [s for s in sources if s.store is None]
    rows = [(s, *s.store.stats()) for s in sources if s.store is not None]
    if plain:
        stats = tensor_stats([s.values for s in plain])
        rows += zip(plain, stats.inf.tolist(), stats.nan.tolist(), stats.sum_squares.tolist())
    squares, shares = [0.0, 0.0], [0.0, 0.0]
    for source, _, _, square in rows:
        (shares if source.sharded else squares)[source.embedding] += square
    inf = tuple(s.name for s, count, _, _ in rows if count)
    nan = tuple(s.name for s, _, count, _ in rows if count)
    return Health(inf, nan, squares, shares)


def _coalesce(grad: torch.Tensor) -> torch.Tensor:
    if grad.dtype not in _LOW:
        return grad.coalesce()
    wide = torch.sparse_coo_tensor(grad._indices(), grad._values().float(), grad.shape).coalesce()
    return torch.sparse_coo_tensor(wide.indices(), wide.values().to(grad.dtype), grad.shape, is_coalesced=True)


def _local(grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The part of a gradient that is here, and whether others have the rest."""
    to_local: Any = getattr(grad, "to_local", None)
    if to_local is None:
        return grad, False
    placements: Iterable[Any] = grad.placements  # type: ignore[attr-defined]
    return to_local(), any(placement.is_shard() for placement in placements)
