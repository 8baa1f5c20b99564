"""Every named recipe, as a literal beside its equations.

Read a preset like this: the three lines above it are what a linear layer computes, with each operand's cast in
brackets, then come the places where numbers are stored and how they are scaled. A name of your own goes through
`register_recipe`; from then on it is as good as these, in the listing, on the command line and in tests.

Notation in the comments: ``x[e4m3]`` is x cast to e4m3 with one scale a tensor, ``[e4m3 row]`` one scale for each slice
along the contraction, ``[e4m3 1x128]`` one for each block of 128 along the contraction. ``dy`` is grad_output.

    output      y  = x  @ w^T       contracts over features in
    grad_input  dx = dy @ w         contracts over features out
    grad_weight dw = dy^T @ x       contracts over tokens

Two choices hold everywhere. The dtype of what is not cast is bf16 in every 8-bit and 4-bit recipe: it needs no loss
scaling and carries all of these formats exactly. And block scales are powers of two wherever a published recipe leaves
the choice, because then one plain GEMM computes the product exactly (`lowprec.linear` explains); the presets whose
scales are fp32 say so in their names.
"""

from __future__ import annotations

from typing import Any

from lowprec import notation
from lowprec.errors import unknown_name
from lowprec.recipe import Cast, Delayed, Gemm, LossScale, Recipe

__all__ = ["chosen", "recipe", "recipes", "register_recipe", "unregister_recipe"]

_DYNAMIC = LossScale("dynamic")  # torch's GradScaler: 2^16, doubled after 2000 good steps, halved at a bad one
_APEX = LossScale("dynamic", cap=2.0**24)
_UNSCALED = LossScale("static", init=1.0)


def _cast_all(name: str, x: str, w: str, dy: str, **fields: Any) -> Recipe:
    """A recipe that casts the input, the weight and grad_output each in one way, in both products it is part of."""
    a, b, c = (None if word == "-" else Cast.parse(word) for word in (x, w, dy))
    products = {"output": Gemm(a, b), "grad_input": Gemm(c, b), "grad_weight": Gemm(c, a)}
    return Recipe(name, **({"compute": "bf16"} | products | fields))


def _mx(name: str, element: str, **fields: Any) -> Recipe:
    """A microscaling recipe: every operand in blocks of 32 along its contraction, e8m0 scales rounded up (rceil)."""
    cast = f"{element}:1x32:e8m0:rceil"
    return _cast_all(name, cast, cast, fields.pop("dy", cast), **fields)


_NVFP4_X, _NVFP4_W = Cast.parse("e2m1:1x16:e4m3"), Cast.parse("e2m1:16x16:e4m3")
_NVFP4_DY = _NVFP4_X.replace(rounding="stochastic")
_TRUE_BF16: dict[str, Any] = {
    "weights": "bf16",
    "gradients": "bf16",
    "communication": "bf16",
    "states": ("bf16", "bf16"),
}
_TRUE_FP16: dict[str, Any] = {
    "weights": "fp16",
    "gradients": "fp16",
    "communication": "fp16",
    "states": ("fp16", "fp16"),
}

_PRESETS: tuple[Recipe, ...] = (
    # ---- 32 and 16 bits: no casts, the products run in the compute dtype
    #   y = x @ w^T                dx = dy @ w                dw = dy^T @ x
    Recipe("fp32", note="everything in fp32: the baseline"),
    #   y = x[tf32] @ w[tf32]^T    dx = dy[tf32] @ w[tf32]    dw = dy[tf32]^T @ x[tf32]
    Recipe("tf32", compute="tf32", note="fp32 storage, products of operands with 10 mantissa bits"),
    #   y = x[fp16] @ w[fp16]^T    dx = dy[fp16] @ w[fp16]    dw = dy[fp16]^T @ x[fp16]
    Recipe("fp16", compute="fp16", loss_scale=_DYNAMIC, note="mixed precision with dynamic loss scaling"),
    #   y = x[bf16] @ w[bf16]^T    dx = dy[bf16] @ w[bf16]    dw = dy[bf16]^T @ x[bf16]
    Recipe("bf16", compute="bf16", note="mixed precision: bf16 products, fp32 weights, sums and norms"),
    # the same products; the weights and all that belongs to them are 16 bits wide too
    Recipe(
        "fp16-true",
        compute="fp16",
        policy="uniform",
        **_TRUE_FP16,
        loss_scale=_DYNAMIC,
        norms_fp32=False,
        note="everything in fp16, dynamic loss scaling",
    ),
    Recipe(
        "bf16-true",
        compute="bf16",
        policy="uniform",
        **_TRUE_BF16,
        norms_fp32=False,
        note="everything in bf16, updates rounded to nearest",
    ),
    Recipe(
        "bf16-kahan",
        compute="bf16",
        **_TRUE_BF16,
        update="kahan",
        norms_fp32=False,
        note="bf16 weights and states; what an update loses is kept in a bf16 buffer",
    ),
    Recipe(
        "bf16-sr",
        compute="bf16",
        **_TRUE_BF16,
        update="stochastic",
        norms_fp32=False,
        note="bf16 weights and states; updates rounded stochastically",
    ),
    # ---- Apex amp's levels: the products of fp16
    Recipe("apex-O0", policy="uniform", loss_scale=_UNSCALED, note="fp32 training, loss scale 1"),
    Recipe("apex-O1", compute="fp16", loss_scale=_APEX, note="functions cast by a list, dynamic loss scale"),
    Recipe(
        "apex-O2",
        compute="fp16",
        policy="uniform",
        weights="fp16",
        master="fp32",
        gradients="fp16",
        communication="fp16",
        loss_scale=_APEX,
        note="fp16 model with fp32 norms and fp32 masters, dynamic loss scale",
    ),
    Recipe(
        "apex-O3",
        compute="fp16",
        policy="uniform",
        **_TRUE_FP16,
        loss_scale=_UNSCALED,
        norms_fp32=False,
        note="fp16 everything, loss scale 1",
    ),
    # ---- FP8
    #   y = x[e4m3] @ w[e4m3]^T    dx = dy[e5m2] @ w[e4m3]    dw = dy[e5m2]^T @ x[e4m3]    scale = amax / max
    _cast_all("fp8", "e4m3", "e4m3", "e5m2", saved="codes", note="e4m3 forward, e5m2 backward, one scale a tensor"),
    # the same products, but scale = (max of the last 1024 amax values) / max: TransformerEngine's HYBRID
    _cast_all(
        "fp8-delayed",
        "e4m3",
        "e4m3",
        "e5m2",
        delayed=Delayed(history=1024, margin=0, interval=1, algo="max"),
        saved="codes",
        note="TransformerEngine: the scale of a step follows from earlier ones",
    ),
    #   y = x[e4m3 row] @ w[e4m3 row]^T    dx = dy[e4m3 row] @ w[e4m3 row]    dw = dy[e4m3 row]^T @ x[e4m3 row]
    _cast_all(
        "fp8-rowwise",
        "e4m3:row",
        "e4m3:row",
        "e4m3:row",
        saved="codes",
        note="e4m3 throughout, one scale for each row along the contraction",
    ),
    #   y = x[e4m3 1x128] @ w[e4m3 128x128]^T    dx = dy[e4m3 1x128] @ w[e4m3 128x128]
    #   dw = dy[e4m3 1x128]^T @ x[e4m3 1x128]    scale = amax / 448 rounded up to a power of two (UE8M0)
    # Embedding, head, norms and attention stay high; AdamW's moments are bf16, weights and gradients fp32.
    _cast_all(
        "fp8-block",
        "e4m3:1x128:e8m0:pow2",
        "e4m3:128x128:e8m0:pow2",
        "e4m3:1x128:e8m0:pow2",
        saved="codes",
        states=("bf16", "bf16"),
        last_layer="high",
        note="DeepSeek: 1x128 and 128x128 blocks, power-of-two scales",
    ),
    # the same, but scale = amax / 448 in fp32: every 128 of the contraction are a product of their own
    _cast_all(
        "fp8-block-fp32",
        "e4m3:1x128",
        "e4m3:128x128",
        "e4m3:1x128",
        saved="codes",
        states=("bf16", "bf16"),
        last_layer="high",
        note="DeepSeek with fp32 block scales: one product a block, slower",
    ),
    # ---- MS-AMP: fp8 products with power-of-two scales; the levels differ in what is stored
    #   y = x[e4m3] @ w[e4m3]^T    dx = dy[e5m2] @ w[e4m3]    dw = dy[e5m2]^T @ x[e4m3], stored in e4m3
    _cast_all(
        "msamp-O1",
        "e4m3:pow2",
        "e4m3:pow2",
        "e5m2:pow2",
        saved="codes",
        weights="fp16",
        gradients="fp8",
        communication="fp8",
        note="fp8 gradients and communication, fp16 weights",
    ),
    _cast_all(
        "msamp-O2",
        "e4m3:pow2",
        "e4m3:pow2",
        "e5m2:pow2",
        saved="codes",
        weights="fp16",
        gradients="fp8",
        communication="fp8",
        states=("fp8", "fp16"),
        note="O1 with fp8 and fp16 optimizer states",
    ),
    _cast_all(
        "msamp-O3",
        "e4m3:pow2",
        "e4m3:pow2",
        "e5m2:pow2",
        saved="codes",
        weights="fp8",
        master="fp16",
        gradients="fp8",
        communication="fp8",
        states=("fp8", "fp16"),
        note="O2 with fp8 weights and fp16 masters",
    ),
    # ---- microscaling (OCP MX): F with one e8m0 scale for each 32 along the contraction
    #   y = x[F 1x32] @ w[F 1x32]^T    dx = dy[F 1x32] @ w[F 1x32]    dw = dy[F 1x32]^T @ x[F 1x32]
    _mx("mxfp8", "e4m3", saved="codes", note="microscaling, F = e4m3"),
    _mx("mxfp6-e3m2", "e3m2", saved="codes", note="microscaling, F = e3m2"),
    _mx("mxfp6-e2m3", "e2m3", saved="codes", note="microscaling, F = e2m3"),
    # dy is rounded stochastically: at 4 bits, rounding to nearest would bias every gradient
    _mx(
        "mxfp4",
        "e2m1",
        dy="e2m1:1x32:e8m0:rceil:stochastic",
        last_layer="high",
        note="microscaling, F = e2m1; stochastic gradients, head high",
    ),
    _mx("mxint8", "mxint8", saved="codes", note="microscaling, F = int8 with step 1/64"),
    # ---- NVFP4: blocks of 16 under e4m3 scales under one fp32 scale; H = random Hadamard over 16 tokens
    #   y = x[e2m1 1x16] @ w[e2m1 16x16]^T    dx = dy[e2m1 1x16 stochastic] @ w[e2m1 16x16]
    #   dw = (H dy)[e2m1 1x16 stochastic]^T @ (H x)[e2m1 1x16]
    Recipe(
        "nvfp4",
        compute="bf16",
        output=Gemm(_NVFP4_X, _NVFP4_W),
        grad_input=Gemm(_NVFP4_DY, _NVFP4_W),
        grad_weight=Gemm(_NVFP4_DY.replace(hadamard=True), _NVFP4_X.replace(hadamard=True)),
        last_layer="high",
        high_last_fraction=0.15,
        note="two-level scales, stochastic gradients, Hadamard; head and last 15% high",
    ),
    # ---- integers
    #   y = x[int8 row] @ w[int8 row]^T    dx = dy[int8 row] @ w[int8 row]
    #   dw = dy[int8 row stochastic]^T @ x[int8 row]
    # One scale spans all tokens in dw, and most of dy is far below the largest of them: rounded to nearest it would
    # vanish, always the same way (600 steps of a byte-level GPT end 1.4% above fp32; 0.3% with stochastic rounding).
    _cast_all(
        "int8",
        "int8:row",
        "int8:row",
        "int8:row",
        grad_weight=Gemm(Cast.parse("int8:row:stochastic"), Cast.parse("int8:row")),
        saved="codes",
        note="all three products in int8",
    ),
    #   dw = dy^T @ x in bf16: its contraction, over tokens, is the longest and the one that hurts
    _cast_all(
        "int8-switchback",
        "int8:row",
        "int8:row",
        "int8:row",
        grad_weight=Gemm(),
        note="SwitchBack: the weight gradient stays in bf16",
    ),
    #   y = x[int8 1x128] @ w[int8 128x128]^T    dx = dy[int8 1x128] @ w[int8 128x128]
    #   dw = dy[int8 1x128 stochastic]^T @ x[int8 1x128]
    _cast_all(
        "int8-block",
        "int8:1x128:e8m0:pow2",
        "int8:128x128:e8m0:pow2",
        "int8:1x128:e8m0:pow2",
        grad_weight=Gemm(Cast.parse("int8:1x128:e8m0:pow2:stochastic"), Cast.parse("int8:1x128:e8m0:pow2")),
        saved="codes",
        note="int8 in 1x128 and 128x128 blocks, power-of-two scales",
    ),
    # ---- weights alone. Square blocks and tensor scales read the same from both sides: y and dx see one w.
    #   y = x @ w[int4 32x32]^T    dx = dy @ w[int4 32x32]    dw = dy^T @ x
    _cast_all(
        "int4-weight",
        "-",
        "int4:32x32:e8m0:pow2",
        "-",
        last_layer="high",
        note="weights in int4 where they are used, head high",
    ),
    #   y = x @ w[int1]^T          dx = dy @ w[int1]          dw = dy^T @ x          w[int1] = sign(w) * mean |w|
    _cast_all(
        "int1-weight",
        "-",
        "int1:mean",
        "-",
        last_layer="high",
        note="weights as signs times their mean size where they are used, head high",
    ),
)
_RECIPES: dict[str, Recipe] = {r.name: r for r in _PRESETS}


def recipes() -> list[str]:
    """Names of all recipes, built-in and registered.

    >>> "fp8-block" in recipes()
    True
    """
    return list(_RECIPES)


def recipe(spec: str | Recipe) -> Recipe:
    """A recipe by its name, from its one line, or from a name followed by changes.

    Args:
        spec: a Recipe (returned as it is), the name of one, ``str(recipe)``, or a name and ``field=value`` words.

    Returns:
        The frozen Recipe.

    Raises:
        ValueError: if the name, a field or a value is unknown; near matches are listed.

    >>> recipe("fp8").compute
    'bf16'
    >>> recipe("fp8 last_layer=high").last_layer
    'high'
    >>> recipe(str(recipe("nvfp4"))) == recipe("nvfp4")
    True
    """
    if isinstance(spec, Recipe):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"a recipe is a name, a line of text or a Recipe, got {type(spec).__name__}")
    words = spec.split()
    if not words:
        raise ValueError(f"an empty recipe; known: {', '.join(_RECIPES)}.")
    if "=" in words[0]:
        return Recipe.parse(spec)
    if words[0] not in _RECIPES:
        raise unknown_name("recipe", words[0], _RECIPES)
    base = _RECIPES[words[0]]
    return base if len(words) == 1 else base.replace(**notation.read_fields(Recipe, words[1:]))


def chosen() -> Recipe | None:
    """The recipe of a script that names none: of ``LOWPREC_RECIPE``, else of ``lowprec.toml``, else None."""
    from lowprec.settings import chosen_recipe

    return chosen_recipe()


def register_recipe(new: Recipe) -> Recipe:
    """Add a recipe of your own to the table; every function and command takes it by name from then on.

    Args:
        new: the recipe; its name must be free.

    Returns:
        The recipe itself.

    Raises:
        ValueError: if the name is taken.

    >>> register_recipe(recipe("fp8").replace(name="fp8-mine", last_layer="high")).name
    'fp8-mine'
    >>> unregister_recipe("fp8-mine")
    """
    if not isinstance(new, Recipe):
        raise TypeError(f"register_recipe takes a Recipe, got {type(new).__name__}")
    if new.name in _RECIPES:
        raise ValueError(f"a recipe named {new.name!r} exists already: choose another name")
    _RECIPES[new.name] = new
    return new


def unregister_recipe(name: str) -> None:
    """Take a registered recipe out of the table again (for tests and notebooks)."""
    if name not in _RECIPES:
        raise unknown_name("recipe", name, _RECIPES)
    if any(name == preset.name for preset in _PRESETS):
        raise ValueError(f"{name} is built in and stays")
    del _RECIPES[name]
