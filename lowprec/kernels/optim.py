"""Optimizer kernels: read states, update, round, write states, in one pass.

An optimizer's memory is its state, and its time is the time to move that state. So the update here never decodes a
state into a second copy: a tile of weights, gradients and states is read, decoded in cache, updated in fp32, rounded,
encoded and written back, and every byte crosses the memory bus once in each direction. Thousands of small tensors go
through one call, as rows of a table. How each tensor is stored is a row of `lowprec.kernels.stores`.

The order of operations in an update is part of its definition (see `lowprec.kernels.reference.optim`); both backends
follow it to the last bit, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowprec.kernels import backend
from lowprec.kernels.native import optim as native
from lowprec.kernels.reference import optim as reference
from lowprec.kernels.stores import Batch, Program, Rounding, Slot, blocks, matrix, store

__all__ = [
    "decode",
    "empty",
    "encode",
    "encode_state",
    "matrix",
    "read_weight",
    "store_rows",
    "store_stats",
    "update",
    "write_weight",
]


def _backend(tensor: torch.Tensor) -> Any:
    return native if backend(tensor) == "native" else reference


def empty(name: str, shape: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of a tensor of zeros in a store.

    >>> codes, scale = empty("8bit", (4, 300), torch.device("cpu"))
    >>> codes.shape, scale.shape
    (torch.Size([4, 300]), torch.Size([4, 2]))
    """
    s = store(name)
    rows, cols = matrix(shape)
    size = (rows, -(-cols // 2)) if s.bits == 4 else tuple(shape)
    codes = torch.zeros(size, dtype=s.dtype, device=device)
    if not s.block:
        return codes, None
    fill = 0.0 if s.name == "4bit-root" else 1.0
    return codes, torch.full((rows, blocks(s, cols)), fill, dtype=torch.float32, device=device)


def encode(
    values: torch.Tensor, name: str, rounding: Rounding = "nearest", *, seed: int = 0, step: int = 0, stream: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales of a tensor.

    Args:
        values: a float tensor.
        name: a store.
        rounding: "nearest" or "stochastic".
        seed, step, stream: key and counters of the draws.

    Returns:
        Codes and scales (None where the store has none).
    """
    draw = reference.Draw(seed, step, stream, 0)
    return reference.encode_weight(values.float(), store(name), rounding, draw)


def encode_state(
    values: torch.Tensor, name: str, rounding: Rounding, *, seed: int = 0, step: int = 0, stream: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`encode` with the cheaper draws that states are rounded with."""
    return reference.encode_state(values, store(name), rounding, reference.Draw(seed, step, stream, 0), 0)


def decode(codes: torch.Tensor, scale: torch.Tensor | None, name: str, shape: Sequence[int]) -> torch.Tensor:
    """The fp32 values of codes under a store."""
    values: torch.Tensor = _backend(codes).decode(codes, scale, store(name), shape)
    return values


def read_weight(slot: Slot, program: Program) -> torch.Tensor:
    """The exact fp32 value of a weight: its master, or itself with what Kahan kept."""
    return reference.read_weight(slot, program)


def write_weight(value: torch.Tensor, slot: Slot, program: Program) -> None:
    """Store a value as master, weight and residue, rounded as the program says."""
    reference.write_weight(value, slot, program, reference.Draw(0, 0, slot.stream, slot.offset))


def update(batch: Batch, coefficients: Sequence[float], seed: int, step: int) -> None:
    """Update every parameter of a batch in place: weights, masters, residues and states.

    Args:
        batch: the parameters, with their gradients set.
        coefficients: the numbers of the rule, in the order of its reference.
        seed: key of the stochastic draws.
        step: counts updates; part of the counter of the draws.
    """
    if not batch.slots:
        return
    _backend(batch.slots[0].weight).update(batch, coefficients, seed, step)


def store_rows(
    chunk: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    name: str,
    shape: Sequence[int],
    first: int,
    *,
    add: bool,
    seed: int = 0,
    step: int = 0,
    stream: int = 0,
) -> None:
    """Encode rows of a stored tensor in place, or add to what they hold.

    Args:
        chunk: fp32 values (rows, columns), contiguous.
        codes, scale: the stored tensor.
        name: its store.
        shape: its shape.
        first: index of the first row.
        add: add to the stored rows, rounding stochastically; else overwrite them, rounding to nearest.
        seed, step, stream: key and counters of the draws.
    """
    _backend(chunk).store_rows(chunk, codes, scale, store(name), shape, first, add, (seed, step, stream))


def store_stats(
    codes: torch.Tensor, scale: torch.Tensor | None, name: str, shape: Sequence[int]
) -> tuple[int, int, float]:
    """Number of Inf, number of NaN and the sum of squares (of the finite) of a stored tensor."""
    found: tuple[int, int, float] = _backend(codes).store_stats(codes, scale, store(name), shape)
    return found
