"""`lowprec completion`: what a shell needs to complete commands, options and recipe names."""

from __future__ import annotations

import json

import click
from click.shell_completion import get_completion_class

EXAMPLE = """\b
Examples:
  eval "$(lowprec completion bash)"            # in ~/.bashrc
  eval "$(lowprec completion zsh)"             # in ~/.zshrc
  lowprec completion fish > ~/.config/fish/completions/lowprec.fish
"""


@click.command(epilog=EXAMPLE)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print the script inside JSON.")
@click.pass_context
def command(ctx: click.Context, /, shell: str, as_json: bool) -> None:
    """Print the completion script of a shell."""
    found = get_completion_class(shell)
    assert found is not None
    script = found(ctx.find_root().command, {}, "lowprec", "_LOWPREC_COMPLETE").source()
    click.echo(json.dumps({"kind": "completion", "shell": shell, "script": script}) if as_json else script)
