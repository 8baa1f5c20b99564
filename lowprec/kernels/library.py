"""Ops that torch.compile sees as one node: registered with torch.library, each with a fake kernel.

A graph compiler cannot look into the native core, nor into Python that chooses a backend. What appears in a model
during compilation is therefore one op of the ``lowprec`` namespace per layer and direction; its fake kernel says which
shapes and dtypes it will return. Eager code calls the same implementation directly, without the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define"]

_library: Any = torch.library.Library("lowprec", "FRAGMENT")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an op.

    Args:
        schema: as in ``"twice(Tensor x) -> Tensor"``; an argument that is written to is ``Tensor(a!)``.
        run: what it does; no result may share memory with an argument or another result.
        fake: the same for tensors without data.

    Returns:
        The op, to be called in code that is compiled.
    """
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"lowprec::{name}", fake, lib=_library)
    return getattr(torch.ops.lowprec, name).default
