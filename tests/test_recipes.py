"""The presets against the tables this field publishes, written down here a second time."""

from __future__ import annotations

import pytest

import lowprec as lp
from lowprec.recipes import unregister_recipe

NAMES = [
    *("fp32", "tf32", "fp16", "bf16", "fp16-true", "bf16-true", "bf16-kahan", "bf16-sr"),
    *("apex-O0", "apex-O1", "apex-O2", "apex-O3"),
    *("fp8", "fp8-delayed", "fp8-rowwise", "fp8-block", "fp8-block-fp32", "msamp-O1", "msamp-O2", "msamp-O3"),
    *("mxfp8", "mxfp6-e3m2", "mxfp6-e2m3", "mxfp4", "mxint8", "nvfp4"),
    *("int8", "int8-switchback", "int8-block", "int4-weight", "int1-weight"),
]

# name: output input, output weight | grad_input grad_output, weight | grad_weight grad_output, input
UE8M0 = ":e8m0:pow2"
MX = ":1x32:e8m0:rceil"
SIX = {
    "bf16": "- - - - - -",
    "fp8": "e4m3:tensor e4m3:tensor e5m2:tensor e4m3:tensor e5m2:tensor e4m3:tensor",
    "fp8-delayed": "e4m3:tensor e4m3:tensor e5m2:tensor e4m3:tensor e5m2:tensor e4m3:tensor",
    "fp8-rowwise": "e4m3:row e4m3:row e4m3:row e4m3:row e4m3:row e4m3:row",
    "fp8-block": " ".join(f"e4m3:{b}{UE8M0}" for b in ("1x128", "128x128", "1x128", "128x128", "1x128", "1x128")),
    "fp8-block-fp32": "e4m3:1x128 e4m3:128x128 e4m3:1x128 e4m3:128x128 e4m3:1x128 e4m3:1x128",
    "msamp-O3": " ".join(f"{f}:tensor:pow2" for f in ("e4m3", "e4m3", "e5m2", "e4m3", "e5m2", "e4m3")),
    "mxfp8": " ".join(["e4m3" + MX] * 6),
    "mxfp6-e3m2": " ".join(["e3m2" + MX] * 6),
    "mxfp6-e2m3": " ".join(["e2m3" + MX] * 6),
    "mxint8": " ".join(["mxint8" + MX] * 6),
    "mxfp4": " ".join("e2m1" + MX + s for s in ("", "", ":stochastic", "", ":stochastic", "")),
    "nvfp4": "e2m1:1x16:e4m3 e2m1:16x16:e4m3 e2m1:1x16:e4m3:stochastic e2m1:16x16:e4m3 "
    "e2m1:1x16:e4m3:stochastic:hadamard e2m1:1x16:e4m3:hadamard",
    "int8": " ".join([*["int8:row"] * 4, "int8:row:stochastic", "int8:row"]),
    "int8-switchback": "int8:row int8:row int8:row int8:row - -",
    "int8-block": f"int8:1x128{UE8M0} int8:128x128{UE8M0} " * 2 + f"int8:1x128{UE8M0}:stochastic int8:1x128{UE8M0}",
    "int4-weight": "- int4:32x32:e8m0:pow2 - int4:32x32:e8m0:pow2 - -",
    "int1-weight": "- int1:tensor:mean - int1:tensor:mean - -",
}

# MS-AMP's own table: communication, weights, master, weight gradients, optimizer states
STORED = {
    "fp16": ("fp32", "fp32", None, "fp32", ("fp32", "fp32")),
    "fp8-delayed": ("fp32", "fp32", None, "fp32", ("fp32", "fp32")),
    "msamp-O1": ("fp8", "fp16", None, "fp8", ("fp32", "fp32")),
    "msamp-O2": ("fp8", "fp16", None, "fp8", ("fp8", "fp16")),
    "msamp-O3": ("fp8", "fp8", "fp16", "fp8", ("fp8", "fp16")),
}

# Apex: compute, weights, norms fp32, master, loss scale kind and start
APEX = {
    "apex-O0": ("fp32", "fp32", True, None, "static", 1.0),
    "apex-O1": ("fp16", "fp32", True, None, "dynamic", 65536.0),
    "apex-O2": ("fp16", "fp16", True, "fp32", "dynamic", 65536.0),
    "apex-O3": ("fp16", "fp16", False, None, "static", 1.0),
}


def test_every_preset_is_there() -> None:
    assert lp.recipes() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_one_line_gives_the_recipe_back(name: str) -> None:
    r = lp.recipe(name)
    assert r.name == name and "\n" not in str(r)
    assert lp.recipe(str(r)) == r == lp.Recipe.from_dict(r.to_dict())
    assert r.note and len(r.note) <= 80


@pytest.mark.parametrize("name", SIX)
def test_six_casts(name: str) -> None:
    assert ["-" if c is None else str(c) for c in lp.recipe(name).casts.values()] == SIX[name].split()


@pytest.mark.parametrize("name", STORED)
def test_where_numbers_are_stored(name: str) -> None:
    r = lp.recipe(name)
    assert (r.communication, r.weights, r.master, r.gradients, r.states) == STORED[name]


@pytest.mark.parametrize("name", APEX)
def test_apex_levels(name: str) -> None:
    r = lp.recipe(name)
    scale = r.loss_scale
    assert (r.compute, r.weights, r.norms_fp32, r.master, scale.kind, scale.init) == APEX[name]
    assert scale.kind == "static" or (scale.growth, scale.backoff, scale.window, scale.cap) == (2.0, 0.5, 2000, 2.0**24)
    assert r.policy == ("amp" if name == "apex-O1" else "uniform") and not r.quantized


def test_transformer_engine_defaults() -> None:
    assert lp.recipe("fp8-delayed").delayed == lp.Delayed(1024, 0, 1, "max", False)
    assert lp.recipe("fp8").delayed is None


def test_what_stays_high() -> None:
    deepseek, nvfp4 = lp.recipe("fp8-block"), lp.recipe("nvfp4")
    assert deepseek.last_layer == "high" and deepseek.states == ("bf16", "bf16") and deepseek.weights == "fp32"
    assert nvfp4.last_layer == "high" and nvfp4.high_last_fraction == 0.15


def test_compute_dtype() -> None:
    for name in NAMES:
        r = lp.recipe(name)
        if r.quantized:
            assert r.compute == "bf16" and r.loss_scale.kind == "none"


def test_registering() -> None:
    mine = lp.recipe("fp8 last_layer=high").replace(name="mine")
    try:
        assert lp.register_recipe(mine) is lp.recipe("mine")
        with pytest.raises(ValueError, match="exists already"):
            lp.register_recipe(mine)
    finally:
        unregister_recipe("mine")
    with pytest.raises(ValueError, match="unknown recipe 'mine'"):
        lp.recipe("mine")
    with pytest.raises(ValueError, match="built in"):
        unregister_recipe("fp8")
    with pytest.raises(TypeError, match="takes a Recipe"):
        lp.register_recipe("fp8")  # type: ignore[arg-type]
