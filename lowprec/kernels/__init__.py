"""Kernels: every op that touches bits, once as readable torch and once as native code.

For each topic (cast, scale, optim, ...) there are three files with the same function names:

* ``kernels/<topic>.py``            what the rest of lowprec calls: typed, documented, picks a backend
* ``kernels/reference/<topic>.py``  pure torch, any device; it defines what the op means
* ``kernels/native/<topic>.py``     checks and flattens tensors, then calls the compiled core

The native core serves CPU tensors; everything else goes to the reference. Both give the same bits, and a test compares
them op by op, so the choice is about speed alone. `use` forces a backend, and so does the environment variable
``LOWPREC_BACKEND`` (for tests); ``LOWPREC_CPU=scalar|avx2|avx512|avx512bf16`` forces an instruction set.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from lowprec.errors import LowprecWarning, unknown_name

__all__ = ["BACKENDS", "REFERENCE_ONLY", "available", "backend", "native_core", "native_topic", "pick", "use"]

BACKENDS = ("native", "reference")

# What the native core leaves to the reference, by topic: no other function may be missing from it.
REFERENCE_ONLY: dict[str, tuple[str, ...]] = {
    "cast": ("pack", "unpack"),
}

_core: ModuleType | None = None
_reason = ""
_forced: str | None = None


def _load() -> None:
    """Import the compiled core (torch first: it brings the OpenMP runtime the core shares)."""
    global _core, _reason, _forced
    try:
        _core = importlib.import_module("lowprec.kernels._native")
    except ImportError as error:
        _reason = f"the compiled core could not be loaded: {error}"
        warnings.warn(f"{_reason}. The reference backend gives the same bits, slowly.", LowprecWarning, stacklevel=3)
        return
    wanted = os.environ.get("LOWPREC_CPU")
    if wanted and not _core.set_isa(wanted):
        raise unknown_name("LOWPREC_CPU instruction set", wanted, _core.isas())


def _load_forced() -> str | None:
    forced = os.environ.get("LOWPREC_BACKEND") or None
    if forced is not None and forced not in BACKENDS:
        raise unknown_name("LOWPREC_BACKEND", forced, BACKENDS)
    return forced


_forced = _load_forced()
_load()


def native_core() -> ModuleType:
    """The compiled module; only `lowprec.kernels.native` calls into it."""
    if _core is None:
        raise RuntimeError(_reason)
    return _core


def available(name: str) -> tuple[bool, str]:
    """Whether a backend can be used here, and why not.

    >>> available("reference")
    (True, '')
    """
    if name not in BACKENDS:
        raise unknown_name("backend", name, BACKENDS)
    if name == "native" and _core is None:
        return False, _reason
    return True, ""


def backend(tensor: torch.Tensor) -> str:
    """The backend an op on this tensor runs on: "native" for CPU tensors where the core is loaded."""
    if _forced is not None:
        return _forced if _forced == "reference" or tensor.device.type == "cpu" else "reference"
    return "native" if _core is not None and tensor.device.type == "cpu" else "reference"


def pick(tensor: torch.Tensor, native: ModuleType, reference: ModuleType) -> ModuleType:
    """Choose between the two modules of a topic by where the tensor lives."""
    return native if backend(tensor) == "native" else reference


def native_topic(name: str, reference: ModuleType) -> ModuleType:
    """The native module of a topic (the reference's, where there is no core), complete or said to be incomplete.

    Raises:
        RuntimeError: if a function is neither in the native module nor listed in `REFERENCE_ONLY`.
    """
    if _core is None:
        return reference
    found = importlib.import_module(f"lowprec.kernels.native.{name}")
    missing = [f for f in reference.__all__ if callable(getattr(reference, f)) and not hasattr(found, f)]
    for function in missing:
        if function not in REFERENCE_ONLY.get(name, ()):
            raise RuntimeError(f"lowprec.kernels.native.{name} lacks {function}, which the reference has")
        setattr(found, function, getattr(reference, function))
    return found


@contextmanager
def use(name: str | None) -> Iterator[None]:
    """Force a backend within a block (None: choose by device again)."""
    global _forced
    if name is not None:
        usable, reason = available(name)
        if not usable:
            raise ValueError(reason)
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
