"""Weights that live in 16 or 8 bits.

`convert` gives every parameter the dtype its recipe says, in place: the same `nn.Parameter`, so optimizers, ties and
hooks keep what they hold. What goes where:

    weight of a linear layer      the recipe's ``weights``: fp32, bf16, fp16, or fp8 (e4m3)
    any other weight or bias      the same, but fp16 where the recipe says fp8 (only products read fp8)
    normalisation                 fp32 with ``norms_fp32``
    embeddings                    fp32 with ``embeddings="fp32"``

An fp8 weight has dtype `torch.float8_e4m3fn` and one power-of-two fp32 scale for each row, value = code * scale: bf16
holds such a value exactly, so a bf16 product carries it. Scales are the module's buffer ``weight_scale`` (so that a
state dict has them) and the parameter's ``_lowprec_scale`` (so that an optimizer finds them). After an update the
optimizer takes new scales from the new weights; nothing is ever clipped.

The exact value before rounding is not lost where the recipe keeps masters: it becomes the master (``_lowprec_master``,
which the optimizer takes over).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lowprec import gradients
from lowprec.kernels import optim as kernels
from lowprec.recipe import Recipe

__all__ = ["convert", "is_fp8", "operand", "read", "relink", "restore", "write"]

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FP8 = {torch.float8_e4m3fn: "e4m3-row", torch.float8_e5m2: "e5m2-row"}
_MASTERS = {"fp32": "fp32", "fp16": "fp16-block"}


def is_fp8(param: torch.Tensor) -> bool:
    """Whether a parameter is stored as fp8 codes."""
    return param.dtype in _FP8


def convert(model: nn.Module, recipe: Recipe) -> dict[str, str]:
    """Store a model's parameters as a recipe says, and give weights gradient stores if it says so.

    Args:
        model: changed in place; parameters stay the same objects.
        recipe: its ``weights``, ``master``, ``gradients``, ``norms_fp32``, ``embeddings`` and ``skip`` are read.

    Returns:
        The name of each parameter's format, by parameter name.

    >>> import lowprec
    >>> model = nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4))
    >>> _ = lowprec.apply(model, 'msamp-O3')
    >>> convert(model, lowprec.recipe('msamp-O3'))
    {'0.weight': 'fp8', '0.bias': 'fp16', '1.weight': 'fp32', '1.bias': 'fp32'}
    """
    found: dict[str, str] = {}
    shared = _uses(model)
    done: set[int] = set()
    with torch.no_grad():
        for name, module in model.named_modules():
            for key, param in module.named_parameters(prefix=name, recurse=False):
                if id(param) in done or not param.is_floating_point():
                    continue
                done.add(id(param))
                wanted = _format(module, param, recipe, shared[id(param)])
                found[key] = wanted
                _store(module, param, wanted, recipe)
    if recipe.gradients != "fp32":
        weights = [p for p in model.parameters() if p.requires_grad and _is_product(shared.get(id(p), []))]
        gradients.install([p for p in weights if gradients.sink(p) is None], recipe.gradients)
    return found


def _uses(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that own each parameter (several where it is tied)."""
    uses: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                uses.setdefault(id(param), []).append(module)
    return uses


def _is_product(owners: list[nn.Module]) -> bool:
    return bool(owners) and all(isinstance(m, nn.Linear) for m in owners)


def _format(module: nn.Module, param: torch.Tensor, recipe: Recipe, owners: list[nn.Module]) -> str:
    if recipe.weights == "fp32" or (recipe.norms_fp32 and isinstance(module, _NORMS)):
        return "fp32"
    if recipe.embeddings == "fp32" and any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in owners):
        return "fp32"
    if recipe.weights == "fp8":
        product = _is_product(owners) and param.ndim == 2 and hasattr(module, "_lowprec")
        return "fp8" if product else "fp16"
    return recipe.weights


def _store(module: nn.Module, param: nn.Parameter, wanted: str, recipe: Recipe) -> None:
    if is_fp8(param):
        return
    value = param.detach().float()
    if wanted != "fp32" and recipe.master is not None:
        _keep_master(param, value, recipe.master, wanted)
    if wanted != "fp8":
        param.data = value.to(_DTYPES[wanted])
        return
    param.grad = None
    scale = torch.empty(param.shape[0], dtype=torch.float32, device=param.device)
    param.data = torch.empty(param.shape, dtype=torch.float8_e4m3fn, device=param.device)
    module.register_buffer("weight_scale", scale)
    param._lowprec_scale = scale  # type: ignore[attr-defined]
    write(param, value)


def _keep_master(param: torch.Tensor, value: torch.Tensor, master: str, wanted: str) -> None:
    """Leave the exact value as the master that the optimizer will take over."""
    if master not in _MASTERS:
        return  # 16 remainder bits: made from the parameter's value, which set_master can refine
    store = _MASTERS[master]
    codes, scale = kernels.empty(store, value.shape, value.device)
    rows, cols = kernels.matrix(value.shape)
    kernels.store_rows(value.reshape(rows, cols), codes.view(rows, cols), scale, store, value.shape, 0, add=False)
    param._lowprec_master = (codes, scale)  # type: ignore[attr-defined]


def write(param: torch.Tensor, value: torch.Tensor) -> None:
    """Round a value into a parameter, with new scales where it is fp8.

    >>> w = nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16))
    >>> write(w, torch.ones(2, 4)); w[0, 0].item()
    1.0
    """
    with torch.no_grad():
        if not is_fp8(param):
            param.copy_(value)
            return
        rows, cols = kernels.matrix(param.shape)
        fresh = value.to(param.device, torch.float32).reshape(rows, cols).contiguous()
        kernels.store_rows(fresh, param.data, _scale(param), _FP8[param.dtype], param.shape, 0, add=False)


def read(param: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of a parameter.

    Args:
        param: a parameter in any storage.
        dtype: what to give; bf16 and fp32 hold an fp8 weight exactly.
    """
    value = param.detach()
    if not is_fp8(param):
        return value.to(dtype)
    return kernels.decode(value, _scale(param), _FP8[param.dtype], param.shape).to(dtype)


def operand(param: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What a product reads: the parameter itself, or an fp8 weight's values."""
    return read(param, dtype) if is_fp8(param) else param


def _scale(param: torch.Tensor) -> torch.Tensor:
    scale: Any = getattr(param, "_lowprec_scale", None)
    if scale is None:
        raise ValueError("an fp8 weight has lost its scales (a copied model does): call lowprec.storage.relink(model)")
    assert isinstance(scale, torch.Tensor)
    return scale


def relink(model: nn.Module) -> None:
    """Give fp8 weights their scales again after a model was copied, pickled or moved."""
    for module in model.modules():
        scale, weight = module._buffers.get("weight_scale"), module._parameters.get("weight")
        if scale is not None and weight is not None and is_fp8(weight):
            weight._lowprec_scale = scale  # type: ignore[attr-defined]


def restore(model: nn.Module) -> None:
    """Bring every parameter back to fp32 and take gradient stores away (the values stay the rounded ones)."""
    relink(model)
    gradients.remove(model.parameters())
    with torch.no_grad():
        for module in model.modules():
            for param in module._parameters.values():
                if param is None or param.dtype == torch.float32 or not param.is_floating_point():
                    continue
                value = read(param)
                if is_fp8(param):
                    del module._buffers["weight_scale"], param._lowprec_scale  # type: ignore[attr-defined]
                param.grad = None
                param.data = value
