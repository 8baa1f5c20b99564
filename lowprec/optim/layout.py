"""Which tensor is stored how: an optimizer's settings, resolved for one parameter into a `Program`.

The rules, in one place:

* The weight's store follows from the parameter's dtype (an fp8 parameter has scales for each row beside it).
* A master exists only where the weight is below fp32; "bf16+16" is for bf16 weights.
* Kahan compensation lives in the weight's own format (bf16 for an fp8 weight) unless a dtype is given, and only where
  there is no master.
* States that share scales (fp16, fp8, 8bit, 4bit) are kept in fp32 for vectors and for tensors smaller than
  ``min_quantized`` (4,096) elements: they weigh nothing and matter most.
* States below 16 bits are rounded stochastically: an average that moves by a thousandth a step would otherwise
  never leave its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowprec.errors import unknown_name
from lowprec.kernels.stores import STORES, Program, Rounding

__all__ = ["MASTERS", "STATES", "UPDATES", "check_settings", "resolve", "weight_store"]

UPDATES = ("nearest", "kahan", "stochastic")
MASTERS = ("fp32", "fp16", "bf16+16")
# name of a setting -> store of a signed state, store of a non-negative one
STATES: dict[str, tuple[str, str]] = {
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16-block", "fp16-block+"),
    "fp8": ("e4m3-block", "e4m3-root"),
    "fp8-e5m2": ("e5m2-block", "e5m2-root"),
    "8bit": ("8bit", "8bit-root"),
    "4bit": ("4bit", "4bit-root"),
}
_WEIGHTS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "e4m3-row",
    torch.float8_e5m2: "e5m2-row",
}
_RESIDUES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def state_names(setting: str | Sequence[str], count: int) -> tuple[str, ...]:
    """One setting for each of an optimizer's states."""
    names = (setting,) * count if isinstance(setting, str) else tuple(setting)
    if len(names) < count:
        names += names[-1:] * (count - len(names))
    for name in names:
        if name not in STATES:
            raise unknown_name("state format", name, STATES)
    return names[:count]


def check_settings(group: Mapping[str, Any]) -> None:
    """Raise for settings of a parameter group that mean nothing."""
    state_names(group["states"], 2)
    if group["master"] is not None and group["master"] not in MASTERS:
        raise unknown_name("master", group["master"], MASTERS)
    if group["update"] not in UPDATES:
        raise unknown_name("update", group["update"], UPDATES)
    if group["residue"] is not None and group["residue"] not in _RESIDUES:
        raise ValueError(f"residue must be torch.float32, torch.bfloat16 or torch.float16, got {group['residue']}")
    if group["update"] == "kahan" and group["master"] is not None:
        raise ValueError("update='kahan' keeps what rounding cut off beside the weight; with a master there is nothing")
    if group["state_rounding"] not in (None, "nearest", "stochastic"):
        raise unknown_name("state_rounding", group["state_rounding"], ("nearest", "stochastic"))


def weight_store(parameter: torch.Tensor) -> str:
    """The store a parameter's dtype means."""
    if parameter.dtype not in _WEIGHTS:
        raise ValueError(f"parameters are fp32, bf16, fp16 or fp8 here, got {parameter.dtype}: convert it")
    name = _WEIGHTS[parameter.dtype]
    if STORES[name].block and getattr(parameter, "_lowprec_scale", None) is None:
        raise ValueError("an fp8 parameter needs its scales: make it with lowprec.storage.convert")
    return name


def resolve(
    parameter: torch.Tensor, group: Mapping[str, Any], rule: Any, signs: Sequence[bool], *, nesterov: bool = False
) -> Program:
    """The program that updates a parameter (its gradient's store is filled in by whoever has the gradient).

    Args:
        parameter: the parameter.
        group: the settings of its group.
        rule: the update rule.
        signs: for each state, whether it can be negative.
        nesterov: look ahead (sgd).
    """
    weight = weight_store(parameter)
    small = parameter.ndim < 2 or parameter.numel() < group["min_quantized"]
    states = []
    for name, signed in zip(state_names(group["states"], len(signs)), signs, strict=True):
        chosen = STATES[name][0 if signed else 1]
        states.append("fp32" if small and STORES[chosen].block else chosen)
    master = None
    if weight != "fp32" and group["master"] is not None:
        if group["master"] == "bf16+16" and weight != "bf16":
            raise ValueError(f"master='bf16+16' completes bf16 weights, and this parameter is {parameter.dtype}")
        master = {"fp32": "fp32", "fp16": "fp16-block", "bf16+16": "remainder16"}[group["master"]]
    residue = None
    if group["update"] == "kahan" and weight != "fp32":
        dtype = group["residue"] or (parameter.dtype if not STORES[weight].block else torch.bfloat16)
        residue = _RESIDUES[dtype]
    rounding: Rounding = "stochastic" if group["update"] == "stochastic" else "nearest"
    return Program(
        rule, weight, weight, master, residue, tuple(states), rounding, _state_rounding(states, group), nesterov
    )


def _state_rounding(states: Sequence[str], group: Mapping[str, Any]) -> Rounding:
    if group["state_rounding"] is not None:
        return "stochastic" if group["state_rounding"] == "stochastic" else "nearest"
    low = any(STORES[name].bits <= 8 for name in states)
    return "stochastic" if low or group["update"] == "stochastic" else "nearest"
