"""What a recipe says, for people: the field's own table, its parts in words, and a page of its own. No torch here.

Nothing here is written by hand for a recipe. The table's row, the listing of `lowprec recipes NAME` and the page in the
documentation all follow from the literal, so they cannot say something else than what runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from lowprec.op_table import families
from lowprec.recipe import Accumulator, Cast, LossScale, Recipe

__all__ = ["COLUMNS", "columns", "describe", "equations", "essay"]

# The table this field reads, in its order.
COLUMNS = ("compute", "communication", "weights", "master", "weight gradients", "optimizer states")

_FAMILY = {"e2m1": "FP4", "e3m2": "FP6", "e2m3": "FP6", "e4m3": "FP8", "e5m2": "FP8", "mxint8": "INT8"}
_SCALES = {
    "none": "no scale",
    "tensor": "one scale a tensor",
    "row": "one scale for each row along the contraction",
    "column": "one scale for each column",
}
_RULES = {
    "amax": "amax / max",
    "pow2": "amax / max rounded up to a power of two",
    "floor": "2 to the exponent of amax - emax (floor)",
    "ceil": "the same, rounded up (ceil)",
    "even": "the same from amax rounded to the element's mantissa (even)",
    "rceil": "amax / max rounded up to a power of two (rceil)",
    "mean": "the mean of |x|",
}
_SYMBOLS = {"input": "x", "weight": "w", "grad_output": "dy"}


def columns(recipe: Recipe) -> dict[str, str]:
    """A recipe's row of the table.

    >>> from lowprec.recipes import recipe
    >>> " ".join(columns(recipe("msamp-O3")).values())
    'FP8 FP8 FP8 FP16 FP8 FP8+FP16'
    """
    values = (
        _compute(recipe),
        recipe.communication.upper(),
        recipe.weights.upper(),
        "-" if recipe.master is None else recipe.master.upper(),
        recipe.gradients.upper(),
        "+".join(state.upper() for state in recipe.states),
    )
    return dict(zip(COLUMNS, values))


def _compute(recipe: Recipe) -> str:
    cast = recipe.output.a or recipe.output.b
    if cast is None:
        return recipe.compute.upper()
    family = _FAMILY.get(cast.format, cast.format.upper())
    return family if recipe.output.a is not None else f"{recipe.compute.upper()}/{family}"


def equations(recipe: Recipe) -> dict[str, str]:
    """The three products with each operand's cast in brackets.

    >>> from lowprec.recipes import recipe
    >>> equations(recipe("int8-switchback"))["grad_input"]
    'dx = dy[int8:row] @ w[int8:row]'
    """
    names = {name: _SYMBOLS[name.split(".")[1]] + _bracket(recipe, cast) for name, cast in recipe.casts.items()}
    return {
        "output": f"y  = {names['output.input']} @ {names['output.weight']}^T",
        "grad_input": f"dx = {names['grad_input.grad_output']} @ {names['grad_input.weight']}",
        "grad_weight": f"dw = {names['grad_weight.grad_output']}^T @ {names['grad_weight.input']}",
    }


def _bracket(recipe: Recipe, cast: Cast | None) -> str:
    return f"[{recipe.compute if cast is None else cast}]"


def cast_in_words(cast: Cast | None, compute: str) -> str:
    """One cast as a sentence's end.

    >>> cast_in_words(Cast.parse("e4m3:1x128:e8m0:pow2"), "bf16")
    'e4m3, blocks of 1x128, scale = amax / max rounded up to a power of two, kept as e8m0'
    """
    if cast is None:
        return f"{compute}, not cast"
    parts = [cast.format]
    if cast.block is None:
        parts.append(_SCALES[cast.scale])
    else:
        parts.append(f"blocks of {cast.block[0]}x{cast.block[1]}")
    if cast.scale_format == "e4m3":
        parts.append("e4m3 block scales under one fp32 tensor scale")
    elif cast.scale != "none":
        parts.append(f"scale = {_RULES[cast.rule]}" + (", kept as e8m0" if cast.scale_format == "e8m0" else ""))
    parts += [f"rounded {cast.rounding}"] if cast.rounding != "nearest" else []
    parts += [f"overflow {cast.overflow}"] if cast.overflow != "saturate" else []
    parts += ["with a zero point"] if not cast.symmetric else []
    parts += ["after a random Hadamard transform over 16"] if cast.hadamard else []
    parts += [f"block scales at least {cast.min_block_scale}"] if cast.min_block_scale else []
    return ", ".join(parts)


def _accumulation(recipe: Recipe) -> str:
    model = recipe.accumulator
    if model is None:
        return "fp32"
    name = "" if isinstance(recipe.accumulate, Accumulator) else f"{recipe.accumulate}: "
    promoted = f"added to fp32 every {model.promote_every}" if model.promote_every else "never promoted to fp32"
    return (
        f"{name}{model.k_step} products aligned and truncated to {model.fraction_bits} fraction bits, result with "
        f"{model.output_mantissa} mantissa bits, {promoted}"
    )


def _loss_scale(scale: LossScale) -> str:
    if scale.kind == "none":
        return "none"
    if scale.kind == "static":
        return f"always {scale.init:g}"
    text = f"dynamic from {scale.init:g}, times {scale.growth:g} after {scale.window} good steps, times "
    text += f"{scale.backoff:g} at a bad one"
    text += "" if scale.cap is None else f", at most {scale.cap:g}"
    text += "" if scale.floor is None else f", at least {scale.floor:g}"
    return text + (f", hysteresis {scale.hysteresis}" if scale.hysteresis > 1 else "")


def _policy(recipe: Recipe) -> str:
    if recipe.compute in ("fp32", "tf32"):
        return "none: every op in fp32" + (", products in tf32" if recipe.compute == "tf32" else "")
    text = {
        "amp": f"products, pooling, ReLU, GELU in {recipe.compute}; softmax, losses, exp, log, powers, sums in fp32; "
        "norms fp32 inside",
        "uniform": f"every op in {recipe.compute}, norms fp32 inside",
    }[recipe.policy]
    switches = ["attention's product with V in fp32"] if recipe.attention_pv == "high" else []
    switches += ["products in RNN cells in fp32"] if recipe.rnn == "high" else []
    switches += [f"your own: {', '.join(map(str, recipe.ops))}"] if recipe.ops else []
    return "; ".join([text, *switches])


def _stays_high(recipe: Recipe) -> str:
    parts = ["first layer"] if recipe.first_layer == "high" else []
    parts += ["last layer"] if recipe.last_layer == "high" else []
    parts += [f"last {recipe.high_last_fraction:.0%} of blocks"] if recipe.high_last_fraction else []
    parts += [f"skipped: {', '.join(recipe.skip)}"] if recipe.skip else []
    parts += [f"rules: {', '.join(map(str, recipe.rules))}"] if recipe.rules else []
    parts += ["norm parameters in fp32"] if recipe.norms_fp32 and recipe.weights != "fp32" else []
    parts += ["embeddings in fp32"] if recipe.embeddings == "fp32" else []
    return ", ".join(parts) or "nothing else"


def describe(recipe: Recipe) -> list[tuple[str, str]]:
    """Every part of a recipe in words, in the order a step meets them."""
    rows = [(name, cast_in_words(cast, recipe.compute)) for name, cast in recipe.casts.items()]
    rows.append(("accumulation", _accumulation(recipe)))
    rows.append(("op policy", _policy(recipe)))
    rows.append(("loss scaling", _loss_scale(recipe.loss_scale)))
    rows.append(("rounding", f"of casts: {_roundings(recipe.casts.values())}; of updates: {recipe.update}"))
    if recipe.delayed is not None:
        d = recipe.delayed
        how = "largest" if d.algo == "max" else "latest"
        text = f"from the {how} of {d.history} earlier amax values, margin {d.margin}, every {d.interval} steps"
        rows.append(("delayed scaling", text.replace("every 1 steps", "every step") + (", power of two" * d.pow2)))
    saved = "as 8-bit codes and scales" if recipe.saved == "codes" else f"in {recipe.compute}"
    rows.append(("saved for backward", saved))
    rows.append(("treated apart", _stays_high(recipe)))
    return rows


def _roundings(casts: Iterable[Cast | None]) -> str:
    found = dict.fromkeys(cast.rounding for cast in casts if cast is not None)
    return " and ".join(found) or "nearest"


def essay(recipe: Recipe) -> str:
    """A page about one recipe, in Markdown, from its literal alone."""
    table = columns(recipe)
    lines = [f"# {recipe.name}", "", f"{recipe.note[:1].upper()}{recipe.note[1:]}.", "", "## The three products", ""]
    lines += ["```", *equations(recipe).values(), "```", ""]
    if recipe.quantized:
        lines += [f"* `{name}`: {cast_in_words(cast, recipe.compute)}" for name, cast in recipe.casts.items()] + [""]
        lines += [_how_computed(recipe), ""]
    lines += ["## What is stored", "", "| " + " | ".join(table) + " |", "|" + "---|" * len(table)]
    lines += ["| " + " | ".join(table.values()) + " |", "", "## The rest of a step", ""]
    six = set(recipe.casts)
    lines += [f"* **{name}**: {text}" for name, text in describe(recipe) if name not in six]
    if recipe.policy == "amp" and recipe.compute in ("bf16", "fp16"):
        lines += ["", "## Which op runs in what", ""]
        lines += [f"* `{rule}` ({family}): {', '.join(ops)}" for rule, family, ops in families()]
    lines += ["", "## As one line", "", "```", str(recipe), "```"]
    return "\n".join(lines) + "\n"


def _how_computed(recipe: Recipe) -> str:
    """How a machine without the format computes these products, as follows from the scales."""
    blocks = [c for c in recipe.casts.values() if c is not None and c.scale == "block" and not c.power_of_two]
    if any(c.scale_format == "fp32" for c in blocks):
        return (
            "Block scales in fp32 cannot be folded into the operands: each block of the contraction is a product of "
            "its own, and these are added in fp32."
        )
    integers = {c.format for c in recipe.casts.values() if c is not None}
    if integers == {"int8"} and not any(c is not None and c.scale == "block" for c in recipe.casts.values()):
        return "Products of int8 codes with int32 sums are exact; the scales multiply the result."
    return (
        "Every cast value has at most 8 significant bits, so bf16 holds it exactly, and one bf16 product with fp32 "
        "sums is this product. Power-of-two block scales are part of the operands; other scales multiply the result."
    )
