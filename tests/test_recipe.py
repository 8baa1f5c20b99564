"""Recipes as values: what they refuse, how they print, and that every field survives text and plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lowprec as lp
from lowprec import notation
from lowprec.recipe import ACCUMULATORS

# One value that is not the default for every field of every class; the tests below fail when a field is missing here.
OTHER: dict[type, dict[str, Any]] = {
    lp.Cast: {
        "format": "e5m2",
        "scale": "row",
        "block": None,  # goes with scale="block"; tested on its own
        "scale_format": "e8m0",
        "rule": "even",
        "rounding": "stochastic",
        "overflow": "keep-inf",
        "symmetric": False,
        "hadamard": True,
        "min_block_scale": 0.015625,
    },
    lp.Recipe: {
        "name": "another",
        "compute": "bf16",
        "output": lp.Gemm(lp.Cast("e4m3"), None),
        "grad_input": lp.Gemm(None, lp.Cast("int8", "row")),
        "grad_weight": lp.Gemm(lp.Cast("e2m1", "block", (1, 16), "e4m3"), lp.Cast("e5m2")),
        "accumulate": lp.Accumulator(32, 13, 13, 128),
        "policy": "uniform",
        "attention_pv": "high",
        "rnn": "high",
        "ops": (lp.OpRule("softmax", "low"), lp.OpRule("exp", "given")),
        "delayed": lp.Delayed(history=16, margin=1, interval=2, algo="most_recent", pow2=True),
        "saved": "codes",
        "weights": "fp16",
        "master": "fp16",
        "gradients": "fp8",
        "communication": "fp8",
        "states": ("fp8", "fp16"),
        "update": "kahan",
        "loss_scale": lp.LossScale("dynamic", 2.0**15, 4.0, 0.25, 10, 1.0, 2.0**24, 2),
        "norms_fp32": False,
        "embeddings": "fp32",
        "first_layer": "high",
        "last_layer": "high",
        "high_last_fraction": 0.15,
        "skip": ("head", "blocks.[0-3].*"),
        "rules": (lp.Rule("blocks.*.mlp.*", "mxfp8"), lp.Rule("head")),
        "note": "a note",
    },
}
_NEEDS: dict[str, dict[str, Any]] = {
    "symmetric": {"format": "int8"},
    "scale_format": {"rule": "pow2"},
    "min_block_scale": {"scale": "block", "block": (1, 16), "scale_format": "e4m3"},
    "master": {"weights": "fp16"},
    "delayed": {"output": lp.Gemm(lp.Cast("e4m3"), None)},
}


def _made(cls: type, name: str) -> Any:
    base: dict[str, Any] = {"format": "e4m3"} if cls is lp.Cast else {"name": "mine"}
    return cls(**(base | _NEEDS.get(name, {}) | {name: OTHER[cls][name]}))


@pytest.mark.parametrize("cls", [lp.Cast, lp.Recipe])
def test_every_field_survives_text(cls: Any) -> None:
    assert set(OTHER[cls]) == {f.name for f in dataclasses.fields(cls)}
    for f in dataclasses.fields(cls):
        value = _made(cls, f.name)
        assert "\n" not in str(value)
        assert cls.parse(str(value)) == value, f.name


def test_every_field_survives_plain_data() -> None:
    for f in dataclasses.fields(lp.Recipe):
        value = _made(lp.Recipe, f.name)
        again = lp.Recipe.from_dict(json.loads(json.dumps(value.to_dict())))
        assert again == value and again.note == value.note, f.name


def test_a_recipe_with_every_field_changed() -> None:
    value = lp.Recipe(**OTHER[lp.Recipe])
    assert lp.recipe(str(value)) == value
    assert hash(lp.recipe(str(value))) == hash(value)
    assert value.replace(compute="fp16") != value and value.compute == "bf16"


@given(
    block=st.tuples(st.integers(1, 512), st.integers(1, 512)),
    element=st.sampled_from(["e4m3", "e5m2", "int8", "e2m1", "mxint8"]),
    rule=st.sampled_from(["pow2", "floor", "ceil", "even", "rceil"]),
    rounding=st.sampled_from(notation.choices(lp.Cast, "rounding")),
    overflow=st.sampled_from(notation.choices(lp.Cast, "overflow")),
    hadamard=st.booleans(),
)
def test_casts_survive_text(block: Any, element: str, rule: Any, rounding: Any, overflow: Any, hadamard: bool) -> None:
    cast = lp.Cast(element, "block", block, "e8m0", rule, rounding, overflow, hadamard=hadamard)
    assert lp.Cast.parse(str(cast)) == cast


def test_a_cast_takes_any_name_of_its_format() -> None:
    assert lp.Cast("float8_e4m3fn") == lp.Cast("e4m3")
    assert lp.Cast("e2m1", "block", [1, 16], "e4m3").block == (1, 16)  # type: ignore[arg-type]


def test_where_scales_are_powers_of_two() -> None:
    assert lp.Cast("e4m3", rule="pow2").power_of_two and lp.Cast("e4m3", "none").power_of_two
    assert lp.Cast("e4m3", "block", (1, 32), "e8m0").power_of_two and not lp.Cast("e4m3").power_of_two
    assert not lp.Cast("e2m1", "block", (1, 16), "e4m3").power_of_two


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"format": "e4m4"}, "did you mean 'e4m3'"),
        ({"format": "e8m0"}, "format of scales"),
        ({"scale": "rows"}, "did you mean 'row'"),
        ({"scale": "block"}, "block=.rows, columns."),
        ({"block": (1, 32)}, "block=.rows, columns."),
        ({"scale": "block", "block": (0, 32)}, "two positive integers"),
        ({"format": "int1", "scale_format": "e8m0", "rule": "mean"}, "which a mean is not"),
        ({"scale_format": "e4m3"}, "two-level"),
        ({"rounding": "nearset"}, "did you mean 'nearest'"),
        ({"symmetric": False}, "only int formats"),
        ({"min_block_scale": 0.5}, "floor of e4m3"),
        ({"rule": "mean"}, "int1"),
    ],
)
def test_casts_that_make_no_sense(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lp.Cast(**({"format": "e4m3"} | fields))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"compute": "bf8"}, "recipe mine: unknown compute 'bf8'. Known: fp32, tf32, bf16, fp16"),
        ({"name": "a b"}, "letters, digits"),
        ({"accumulate": "hoper-fp8"}, "did you mean 'hopper-fp8'"),
        ({"states": ("fp8", "9bit")}, "unknown format of an optimizer state"),
        ({"states": ("fp8",)}, "first and the second"),
        ({"master": "fp16"}, "own master"),
        ({"weights": "fp16", "master": "bf16+16"}, "other 16 bits"),
        ({"weights": "fp8"}, "give them a master"),
        ({"communication": "int3"}, "unknown communication"),
        ({"high_last_fraction": 1.5}, "between 0 and 1"),
        ({"delayed": lp.Delayed()}, "one scale a tensor"),
        ({"skip": ("a b",)}, "no blanks"),
    ],
)
def test_recipes_that_make_no_sense(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        lp.Recipe(**({"name": "mine"} | fields))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: lp.Accumulator(0, 13, 13), "k_step"),
        (lambda: lp.Accumulator(32, 60, 13), "fraction_bits"),
        (lambda: lp.Accumulator(32, 13, 24), "output_mantissa"),
        (lambda: lp.Accumulator(32, 13, 13, 48), "multiple of k_step"),
        (lambda: lp.LossScale("dynamic", init=0.0), "init must be positive"),
        (lambda: lp.LossScale("dynamic", backoff=2.0), "backoff between"),
        (lambda: lp.LossScale("sometimes"), "unknown kind"),  # type: ignore[arg-type]
        (lambda: lp.Delayed(history=0), "positive integers"),
        (lambda: lp.Rule("a|b"), "no blanks"),
        (lambda: lp.OpRule("sotfmax", "low"), "did you mean 'softmax'"),
        (lambda: lp.OpRule("softmax", "fp8"), "unknown rule for softmax"),
        (lambda: lp.OpRule.parse("softmax=low"), "OP->RULE"),
        (lambda: lp.recipe("fp8 compute"), "expected field=value"),
        (lambda: lp.recipe("fp8 comput=bf16"), "did you mean 'compute'"),
        (lambda: lp.recipe("fp8 compute=bf16 compute=fp16"), "given twice"),
        (lambda: lp.recipe("fp8 output=e4m3"), "CAST.CAST"),
        (lambda: lp.recipe("fp8 output=e4m3:rows*-"), "did you mean 'row'"),
        (lambda: lp.recipe("fp8 norms_fp32=yes"), "true or false"),
        (lambda: lp.recipe("fp8 high_last_fraction=abc"), "expected a number"),
        (lambda: lp.recipe("fp8 delayed=(history=x)"), "expected an integer"),
        (lambda: lp.recipe("fp9"), "did you mean"),
        (lambda: lp.recipe("  "), "empty recipe"),
        (lambda: lp.recipe("fp8").replace(comput="bf16"), "did you mean 'compute'"),
        (lambda: lp.Recipe.from_dict({"name": "a", "comput": "bf16"}), "did you mean 'compute'"),
    ],
)
def test_plain_errors(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_accumulators_by_name() -> None:
    assert lp.Recipe("mine").accumulator is None
    assert lp.Recipe("mine", accumulate="hopper-fp8").accumulator == ACCUMULATORS["hopper-fp8"]
    assert lp.Recipe("mine", accumulate=lp.Accumulator(8, 24, 23)).accumulator == ACCUMULATORS["ampere"]


def test_importing_a_module_does_not_hide_the_function_of_its_name() -> None:
    import lowprec.formats
    import lowprec.recipe
    import lowprec.recipes  # noqa: F401

    assert lp.recipe("fp8").name == "fp8" and "fp8" in lp.recipes() and "e4m3" in lp.formats()
