"""What is said about a recipe, against the published tables and against the recipe itself."""

from __future__ import annotations

import dataclasses

import pytest

import lowprec as lp
from lowprec.essays import COLUMNS, columns, describe, equations, essay

# MS-AMP's table as published
PUBLISHED = [
    "fp16        FP16 FP32 FP32 -    FP32 FP32+FP32",
    "fp8-delayed FP8  FP32 FP32 -    FP32 FP32+FP32",
    "msamp-O1    FP8  FP8  FP16 -    FP8  FP32+FP32",
    "msamp-O2    FP8  FP8  FP16 -    FP8  FP8+FP16",
    "msamp-O3    FP8  FP8  FP8  FP16 FP8  FP8+FP16",
]


@pytest.mark.parametrize("line", PUBLISHED)
def test_the_published_table(line: str) -> None:
    name, *cells = line.split()
    assert list(columns(lp.recipe(name)).values()) == cells


@pytest.mark.parametrize("name", lp.recipes())
def test_every_recipe_has_a_page(name: str) -> None:
    recipe = lp.recipe(name)
    page = essay(recipe)
    assert page.startswith(f"# {name}\n") and str(recipe) in page
    assert tuple(columns(recipe)) == COLUMNS
    for line in equations(recipe).values():
        assert line in page
    for cast in recipe.casts.values():
        assert cast is None or f"[{cast}]" in page


def test_every_part_of_a_recipe_is_told() -> None:
    """Changing any field changes what is said."""
    base = lp.recipe("fp8")
    other = {
        "compute": "fp16",
        "output": lp.Gemm(),
        "grad_input": lp.Gemm(),
        "grad_weight": lp.Gemm(),
        "accumulate": "hopper-fp8",
        "policy": "uniform",
        "attention_pv": "high",
        "rnn": "high",
        "ops": (lp.OpRule("softmax", "low"),),
        "delayed": lp.Delayed(16),
        "saved": "high",
        "weights": "fp16",
        "master": "fp32",
        "gradients": "bf16",
        "communication": "fp8",
        "states": ("fp8", "fp16"),
        "update": "kahan",
        "loss_scale": lp.LossScale("dynamic", hysteresis=2),
        "norms_fp32": False,
        "embeddings": "fp32",
        "first_layer": "high",
        "last_layer": "high",
        "high_last_fraction": 0.15,
        "skip": ("head",),
        "rules": (lp.Rule("head"),),
    }
    assert set(other) == {f.name for f in dataclasses.fields(lp.Recipe)} - {"name", "note"}
    for name, value in other.items():
        start = base.replace(weights="fp16") if name in ("master", "norms_fp32") else base
        changed = start.replace(**{name: value})
        said = (columns(changed), describe(changed))
        assert said != (columns(start), describe(start)), name


def test_words_of_one_recipe() -> None:
    words = dict(describe(lp.recipe("nvfp4")))
    assert words["grad_weight.grad_output"] == (
        "e2m1, blocks of 1x16, e4m3 block scales under one fp32 tensor scale, rounded stochastic, "
        "after a random Hadamard transform over 16"
    )
    assert words["treated apart"] == "last layer, last 15% of blocks"
    assert dict(describe(lp.recipe("apex-O2")))["loss scaling"] == (
        "dynamic from 65536, times 2 after 2000 good steps, times 0.5 at a bad one, at most 1.67772e+07"
    )
