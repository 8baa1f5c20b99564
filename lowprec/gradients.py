"""Weight gradients that are stored in low precision as they are produced.

A weight's gradient is as large as the weight, and in fp32 four times as large as an fp8 one. It need never exist: a
chunk of its rows at a time,

    chunk = grad_output[:, rows]^T @ input        (fp32, a few MB, in cache)
    chunk = chunk + decode(codes[rows])           (from the second micro-batch on)
    codes[rows], scale[rows] = encode(chunk)      (e4m3 under one fp32 scale for every 256 elements)

Each encode takes new scales from what it stores, so accumulation over micro-batches neither saturates nor loses the
small ones beside the large; from the second micro-batch on it rounds stochastically, so that many small contributions
add up. A parameter that has such a store (a `Sink`, put there by `install`) has no ``.grad``; the backward of a linear
layer hands its product to the sink, any other gradient reaches it through a hook that empties ``.grad``, and the
optimizer reads the codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from lowprec.errors import unknown_name
from lowprec.kernels import optim as kernels

__all__ = ["FORMATS", "Sink", "Stats", "install", "remove", "sink", "sinks", "zero"]

FORMATS = {"fp8": "e4m3-block", "fp8-e5m2": "e5m2-block", "bf16": "bf16", "fp16": "fp16-block"}
# rows of a chunk are chosen so that it has about this many elements
CHUNK = 1 << 20


class Stats(NamedTuple):
    """What a finite check and a norm need to know of a gradient."""

    inf: int
    nan: int
    sum_of_squares: float


class Sink:
    """The gradient of one parameter, in codes and scales.

    Args:
        param: the parameter.
        form: "fp8" (e4m3), "fp8-e5m2", "bf16" or "fp16" (scaled).
        seed: key of the draws of accumulation.
        stream: number of the parameter, part of the counter of the draws.
    """

    def __init__(self, param: torch.Tensor, form: str = "fp8", *, seed: int = 0, stream: int = 0) -> None:
        if form not in FORMATS:
            raise unknown_name("gradient format", form, FORMATS)
        self.form, self.store = form, FORMATS[form]
        self.shape, self.device = param.shape, param.device
        self.seed, self.stream, self.draws = seed, stream, 0
        self.codes: torch.Tensor | None = None
        self.scale: torch.Tensor | None = None
        self.filled = False

    def add_product(
        self, grad_output: torch.Tensor, inputs: torch.Tensor, scale: torch.Tensor | float | None = None
    ) -> None:
        """Add grad_output^T @ inputs * scale, a chunk of rows at a time.

        Args:
            grad_output: (tokens, rows of the weight), bf16 or fp32.
            inputs: (tokens, columns of the weight), of the same dtype.
            scale: what the product is multiplied by: a number, a 0-d tensor, or a column of one number a row.
        """
        rows, cols = kernels.matrix(self.shape)
        if (grad_output.shape[1], inputs.shape[1]) != (rows, cols):
            raise ValueError(
                f"operands of {tuple(grad_output.shape)} and {tuple(inputs.shape)} do not make "
                f"a gradient of {tuple(self.shape)}"
            )
        step = max(1, min(rows, CHUNK // max(cols, 1)))
        for first in range(0, rows, step):
            chunk = torch.mm(grad_output[:, first : first + step].t(), inputs).float()
            if scale is not None:
                per_row = isinstance(scale, torch.Tensor) and scale.ndim > 0 and scale.numel() == rows > 1
                chunk = chunk * (scale.reshape(-1, 1)[first : first + step] if per_row else scale)  # type: ignore[union-attr]
            self._put(chunk, first)
        self._done()

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient that exists already."""
        if grad.shape != self.shape:
            raise ValueError(f"a gradient has its parameter's shape {tuple(self.shape)}, got {tuple(grad.shape)}")
        rows, cols = kernels.matrix(self.shape)
        grad = grad.to_dense() if grad.is_sparse else grad
        flat = grad.detach().reshape(rows, cols)
        step = max(1, min(rows, CHUNK // max(cols, 1)))
        for first in range(0, rows, step):
            self._put(flat[first : first + step].float(), first)
        self._done()

    def _put(self, chunk: torch.Tensor, first: int) -> None:
        if self.codes is None:
            self.codes, self.scale = kernels.empty(self.store, self.shape, self.device)
        kernels.store_rows(
            chunk, self.codes, self.scale, self.store, self.shape, first, add=self.filled,
            seed=self.seed, step=self.draws, stream=self.stream,
        )  # fmt: skip

    def _done(self) -> None:
        self.filled = True
        self.draws += 1

    def dense(self) -> torch.Tensor | None:
        """The gradient as one fp32 tensor (for looking at it), or None."""
        if not self.filled:
            return None
        assert self.codes is not None
        return kernels.decode(self.codes, self.scale, self.store, self.shape)

    def stats(self) -> Stats:
        """Counts of Inf and NaN and the sum of squares, from what is stored.

        A block with an Inf or NaN in it reads as NaN, so a stored gradient counts those as NaN.
        """
        if not self.filled:
            return Stats(0, 0, 0.0)
        assert self.codes is not None
        return Stats(*kernels.store_stats(self.codes, self.scale, self.store, self.shape))

    def zero(self) -> None:
        """Forget the gradient; the memory is kept for the next."""
        self.filled = False


def sink(param: torch.Tensor) -> Sink | None:
    """The gradient store of a parameter, or None if its gradient is an ordinary ``.grad``."""
    found = getattr(param, "_lowprec_sink", None)
    assert found is None or isinstance(found, Sink)
    return found


def install(params: Iterable[torch.Tensor], form: str = "fp8", *, seed: int = 0) -> list[Sink]:
    """Give parameters of two or more dimensions a gradient store.

    Args:
        params: parameters.
        form: "fp8", "fp8-e5m2", "bf16" or "fp16".
        seed: key of the draws of accumulation.

    Returns:
        The stores, in the order of the parameters that have one.

    >>> w = torch.nn.Parameter(torch.zeros(4, 300))
    >>> made = install([w])
    >>> (w * 2.0).sum().backward()
    >>> w.grad is None, sink(w).dense().unique().tolist()
    (True, [2.0])
    """
    made = []
    for stream, p in enumerate(params):
        if p.ndim < 2 or not p.requires_grad:
            continue
        store = Sink(p, form, seed=seed, stream=stream)
        p._lowprec_sink = store  # type: ignore[attr-defined]
        p._lowprec_hook = p.register_post_accumulate_grad_hook(_swallow)  # type: ignore[attr-defined, no-untyped-call]
        made.append(store)
    return made


def _swallow(param: torch.Tensor) -> None:
    """Move a gradient that arrived as ``.grad`` into the store."""
    store = sink(param)
    if store is not None and param.grad is not None:
        store.add(param.grad)
        param.grad = None


def remove(params: Iterable[torch.Tensor]) -> None:
    """Take gradient stores away again."""
    for p in params:
        if sink(p) is not None:
            p._lowprec_hook.remove()  # type: ignore[attr-defined]
            del p._lowprec_sink, p._lowprec_hook  # type: ignore[attr-defined]


def sinks(params: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, Sink]]:
    """The parameters among these that have a store, with it."""
    for p in params:
        found = sink(p)
        if found is not None:
            yield p, found


def zero(params: Iterable[torch.Tensor]) -> None:
    """Forget stored gradients."""
    for _, store in sinks(params):
        store.zero()
