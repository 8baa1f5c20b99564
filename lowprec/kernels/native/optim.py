"""Optimizer kernels on the compiled core: a table of addresses, one call for a whole batch.

A row of the table is an ``OptimSlot`` of native/optim.h. Rows are made once for a batch and kept with it; a step
rewrites the column of gradients alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from lowprec.kernels import native_core
from lowprec.kernels.stores import RULES, STORES, Batch, Program, Slot, Store, matrix

__all__ = ["decode", "store_rows", "store_stats", "update"]

_COLUMNS = 18
_GRAD, _GRAD_SCALE, _NONFINITE = 7, 8, 17


def _codes(p: Program) -> list[int]:
    """The integers of an ``OptimProgram``."""

    def code(name: str | None) -> int:
        return 0 if name is None else STORES[name].code

    states = [code(name) for name in (*p.states, None, None, None)[:3]]
    flags = [int(p.rounding == "stochastic"), int(p.state_rounding == "stochastic"), int(p.nesterov)]
    return [RULES.index(p.rule), code(p.weight), code(p.grad), code(p.master), code(p.residue), *states, *flags]


def _address(t: torch.Tensor | None) -> int:
    if t is None:
        return 0
    assert t.is_contiguous(), "the caller makes tensors contiguous"
    return t.data_ptr()


def _row(s: Slot) -> list[int]:
    states = [_address(t) for t in (*s.states, None, None, None)[:3]]
    scales = [_address(t) for t in (*s.scales, None, None, None)[:3]]
    weights = (s.weight, s.weight_scale, s.master, s.master_scale, s.residue)
    return [*matrix(s.weight.shape), *map(_address, weights), 0, 0, *states, *scales, s.stream, s.offset, 0]


def update(batch: Batch, coefficients: Sequence[float], seed: int, step: int) -> None:
    """Update every parameter of a batch."""
    if batch.table is None:
        batch.table = (torch.tensor([_row(s) for s in batch.slots], dtype=torch.int64), _codes(batch.program))
    table, codes = batch.table
    if batch.addresses is None:
        table[:, _GRAD] = torch.tensor([_address(s.grad) for s in batch.slots])
        table[:, _GRAD_SCALE] = torch.tensor([_address(s.grad_scale) for s in batch.slots])
    else:
        table[:, _GRAD] = torch.frombuffer(array("q", batch.addresses), dtype=torch.int64)
    threads = torch.get_num_threads()
    native_core().optim_update(codes, list(coefficients), seed, step, threads, table.data_ptr(), len(batch.slots))
    spoiled = bool(table[:, _NONFINITE].any())
    if spoiled or batch.spoiled:
        for slot, bad in zip(batch.slots, table[:, _NONFINITE].tolist(), strict=True):
            slot.nonfinite = bad
    batch.spoiled = spoiled


def decode(codes: torch.Tensor, scale: torch.Tensor | None, s: Store, shape: Sequence[int]) -> torch.Tensor:
    """fp32 values of codes."""
    codes = codes.contiguous()
    out = torch.empty(tuple(shape), dtype=torch.float32)
    rows, cols = matrix(shape)
    scale = None if scale is None else scale.contiguous()
    threads = torch.get_num_threads()
    native_core().optim_decode_rows(s.code, codes.data_ptr(), _address(scale), out.data_ptr(), rows, cols, threads)
    return out


def store_rows(
    chunk: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor | None,
    s: Store,
    shape: Sequence[int],
    first: int,
    add: bool,
    key: tuple[int, int, int],
) -> None:
    """Encode rows of a stored tensor in place, or add to what they hold."""
    rows, cols = matrix(shape)
    chunk = chunk.contiguous()
    assert chunk.dtype == torch.float32 and first + chunk.shape[0] <= rows
    native_core().optim_store_rows(
        s.code, _address(codes), _address(scale), chunk.data_ptr(), chunk.shape[0], cols, first, add, add, *key,
        torch.get_num_threads(),
    )  # fmt: skip


def store_stats(
    codes: torch.Tensor, scale: torch.Tensor | None, s: Store, shape: Sequence[int]
) -> tuple[int, int, float]:
    """Number of Inf, number of NaN and the sum of squares (of the finite) of a stored tensor."""
    inf, nan, squares = native_core().optim_stats(
        s.code, _address(codes), _address(scale), *matrix(shape), torch.get_num_threads()
    )
    return int(inf), int(nan), squares
