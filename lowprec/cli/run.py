"""`lowprec run`: a script that calls ``lp.prepare(model, optimizer)``, under a recipe named outside it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from lowprec.cli.options import complete_recipe

EXAMPLE = """\b
Examples:
  lowprec run --recipe fp8-block train.py --epochs 3
  lowprec run --recipe bf16 --nproc 4 train.py
  lowprec run --recipe int8 -m package.training
"""


@click.command(epilog=EXAMPLE, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--recipe", required=True, metavar="R", shell_complete=complete_recipe, help="The recipe.")
@click.option("--nproc", type=click.IntRange(1), help="Start that many processes with torchrun.")
@click.option("-m", "module", is_flag=True, help="SCRIPT is a module's name, as for python -m.")
@click.option("--json", "as_json", is_flag=True, help="Print what would be run, and run nothing.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    recipe: str, nproc: int | None, module: bool, as_json: bool, script: str, arguments: tuple[str, ...]
) -> None:
    """Run a script under a recipe.

    The script calls lp.prepare(model, optimizer) without naming a recipe. What the script
    prints, its exit code and its errors are its own. A script that ends without having
    called lp.prepare is told that the recipe had no effect.
    """
    from lowprec.recipes import recipe as find_recipe

    find_recipe(recipe)
    if not module and not Path(script).is_file():
        raise FileNotFoundError(f"there is no script {script}.")
    start = [sys.executable, "-m"]
    if nproc is not None:
        start += ["torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", "-m"]
    start += ["lowprec.cli.launch", "module" if module else "file", script, *arguments]
    if as_json:
        click.echo(json.dumps({"kind": "run", "recipe": recipe, "command": start}, indent=1))
        return
    sys.stdout.flush()
    os.execve(start[0], start, {**os.environ, "LOWPREC_RECIPE": recipe})
