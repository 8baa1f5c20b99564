"""`lowprec recipes`: the field's table of all recipes, or one recipe in full."""

from __future__ import annotations

from typing import Any

import click

from lowprec.cli.options import complete_recipe, emit, json_option
from lowprec.recipe import Recipe

__all__ = ["command"]


@click.command(short_help="List recipes, or show one in full.")
@click.argument("name", required=False, shell_complete=complete_recipe)
@json_option
def command(name: str | None, json_to: str | None) -> None:
    """List every recipe, or show one in full.

    The table: what the products compute in, what gradients are communicated in,
    and where weights, master weights, weight gradients and optimizer states
    live. NAME is a recipe, or one with changes.

    \b
    Example:
      lowprec recipes
      lowprec recipes fp8-block
      lowprec recipes "fp8 last_layer=high" --json
    """
    from lowprec.recipes import recipe, recipes

    if name is None:
        every = [recipe(each) for each in recipes()]
        emit({"recipes": [_plain(each) for each in every]}, json_to, lambda: _table(every))
    else:
        one = recipe(name)
        emit(_plain(one), json_to, lambda: _one(one))


def _plain(recipe: Recipe) -> dict[str, Any]:
    from lowprec.essays import columns, describe, equations

    return {
        "name": recipe.name,
        "note": recipe.note,
        "table": columns(recipe),
        "equations": equations(recipe),
        "parts": dict(describe(recipe)),
        "line": str(recipe),
        "fields": recipe.to_dict(),
    }


def _table(every: list[Recipe]) -> str:
    from lowprec.essays import columns

    heads = ("recipe", "compute", "commun.", "weights", "master", "w. grads", "opt. states")
    rows = [heads, *((each.name, *columns(each).values()) for each in every)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", "lowprec recipes NAME shows one in full: its casts, op policy, rounding."])


def _one(recipe: Recipe) -> str:
    import textwrap

    from lowprec.essays import columns, describe, equations

    lines = [f"{recipe.name}: {recipe.note}" if recipe.note else recipe.name, ""]
    lines += [*equations(recipe).values(), ""]
    rows = [*columns(recipe).items(), *describe(recipe)]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        first, *rest = textwrap.wrap(text, 78 - width) or [""]
        lines += [f"{name.ljust(width)}  {first}", *(f"{'':{width}}  {line}" for line in rest)]
    return "\n".join([*lines, "", "as one line:", *textwrap.wrap(str(recipe), 80, break_on_hyphens=False)])
