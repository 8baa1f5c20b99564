"""The command line: one command a file, loaded when it is called.

`lowprec --help` must answer at once, so neither this module nor a command's help may import torch. A command's module
defines a click command named ``command``; its summary for the listing stands in the table below, so that listing the
commands loads none of them. To add a command: one file and one row.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

__all__ = ["main"]

# name -> (module, one-line summary)
COMMANDS: dict[str, tuple[str, str]] = {
    "compare": ("lowprec.cli.compare", "Train one model under many recipes: speed, memory, loss."),
    "plan": ("lowprec.cli.plan", "Say what a step will need: bytes, batch, FLOPs, layers."),
    "run": ("lowprec.cli.run", "Run a script under a recipe."),
    "formats": ("lowprec.cli.formats", "List number formats, or what they make of a value."),
    "recipes": ("lowprec.cli.recipes", "List recipes, or show one in full."),
    "config": ("lowprec.cli.config", "Write lowprec.toml by asking."),
    "report": ("lowprec.cli.report", "Make the report page of a run."),
    "train": ("lowprec.cli.train", "Train a model under one recipe, with checkpoints and resume."),
    "bench": ("lowprec.cli.bench", "Measure kernels, training and optimizers."),
    "env": ("lowprec.cli.env", "Say what this machine has, and which path is used."),
    "completion": ("lowprec.cli.completion", "Print the completion script of a shell."),
}


class _LazyGroup(click.Group):
    """A click group that imports a command's module only when that command runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS:
            from lowprec.errors import unknown_name

            raise click.UsageError(str(unknown_name("command", args[0], COMMANDS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not COMMANDS:
            return
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"max_content_width": 80, "help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lowprec")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Every training precision, on the machine you have.

    \b
    Example:
      lowprec formats 0.3
    """
    ctx.obj = {"debug": debug}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a user's mistake is one sentence and exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(args=arguments, prog_name="lowprec", standalone_mode=False)
        if isinstance(code, int) and code:  # what a command gave to click's Exit
            sys.exit(code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.Abort:
        click.echo("stopped.", err=True)
        sys.exit(130)
    except (ValueError, TypeError, ImportError, OSError) as error:
        if "--debug" in arguments:
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
