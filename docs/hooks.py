"""What mkdocs fills in from the tables of the package, so that no page repeats one by hand.

A line ``[[name]]`` in a page is replaced by what the function of that name in `FILLS` returns, and every recipe gets a
page of its own from its literal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lowprec import formats as formats_names
from lowprec.cli import COMMANDS, cli
from lowprec.essays import columns, essay
from lowprec.formats import format as find_format
from lowprec.recipes import recipe as find_recipe
from lowprec.recipes import recipes as recipe_names
from lowprec.settings import keys

ROOT = Path(__file__).parent


def _table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def formats() -> str:
    """Every format, from its literal."""
    rows = []
    for name in formats_names():
        f = find_format(name)
        layout = f"{f.exponent_bits}-{f.mantissa_bits}" if f.exponent_bits else "-"
        rows.append(
            [f"`{name}`", f.kind, str(f.bits), layout, f"{f.max:g}", f"{f.min_normal:g}", f"{f.min_subnormal:g}"]
        )
    return _table(["format", "kind", "bits", "exponent-mantissa", "largest", "least normal", "least"], rows)


def recipes() -> str:
    """The field's own table, with a link to every recipe's page."""
    rows = []
    for name in recipe_names():
        found = find_recipe(name)
        rows.append([f"[`{name}`]({name}.md)", *columns(found).values(), found.note])
    return _table(["recipe", *columns(find_recipe("fp32")), "in a line"], rows)


def commands() -> str:
    """The help of every command."""
    parts = []

    def add(command: click.Command, name: str) -> None:
        context = click.Context(command, info_name=name, max_content_width=80, terminal_width=80)
        parts.append(f"## {name}\n\n```text\n{command.get_help(context)}\n```\n")
        if isinstance(command, click.Group):
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                add(found, f"{name} {child}")

    for name in COMMANDS:
        found = cli.get_command(click.Context(cli), name)
        assert found is not None
        add(found, f"lowprec {name}")
    return "\n".join(parts)


def settings() -> str:
    """Every key of lowprec.toml."""
    rows = [
        [f"`{name}`", repr(key.default) if name != "rules" else "{}", key.metadata["help"]]
        for name, key in keys().items()
    ]
    return _table(["key", "default", ""], rows)


def schemas() -> str:
    """The schema of every command's JSON."""
    parts = []
    for path in sorted((ROOT / "schemas").glob("*.json")):
        parts.append(f"### {path.stem}\n\n```json\n{json.dumps(json.loads(path.read_text()), indent=1)}\n```\n")
    return "\n".join(parts)


FILLS: dict[str, Callable[[], str]] = {
    "formats": formats, "recipes": recipes, "commands": commands, "settings": settings, "schemas": schemas,
}  # fmt: skip


def fill(markdown: str) -> str:
    """A page with its ``[[name]]`` lines replaced."""
    return re.sub(r"^\[\[(\w+)\]\]$", lambda found: FILLS[found[1]](), markdown, flags=re.MULTILINE)


def generated() -> dict[str, str]:
    """Pages that exist in no file: path -> Markdown."""
    return {f"recipes/{name}.md": essay(find_recipe(name)) for name in recipe_names()}


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for path, text in generated().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_nav(nav: Any, config: Any, files: Any) -> Any:
    return nav


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return fill(markdown)
