"""`lowprec config`: write lowprec.toml by asking, or from the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import emit, json_option, split

EXAMPLE = """\b
Examples:
  lowprec config
  lowprec config --set recipe=fp8-block --rule "*.mlp.*=mxfp8"
  lowprec config --show --json
"""


@click.command(epilog=EXAMPLE)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Set a key instead of asking.")
@click.option("--rule", "rules", multiple=True, metavar="GLOB=RECIPE", help="Add a rule instead of asking.")
@click.option("--show", is_flag=True, help="Show what holds here, and write nothing.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("lowprec.toml"), show_default=True)
@json_option
def command(pairs: tuple[str, ...], rules: tuple[str, ...], show: bool, out: Path, json_to: str | None) -> None:
    """Write lowprec.toml, which lp.prepare and lowprec train read.

    Asks for one key after the other, with what is in force as the default answer. The file
    is looked for in the working directory and above it, up to the one that holds .git.
    """
    from lowprec import settings

    if show:
        found = settings.settings()
        emit(_plain(found), json_to, lambda: f"# from {found.source}\n{settings.to_toml(found)}".rstrip())
        return
    before = settings.read_file(out) if out.exists() else settings.Settings()
    answers = _given(pairs, rules) if pairs or rules else _ask(before)
    made = dataclasses.replace(before, **answers, source=str(out))
    text = settings.to_toml(made)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"{out} could not be written: {(error.strerror or str(error)).lower()}.") from error
    emit(_plain(settings.read_file(out)), json_to, lambda: f"{out}:\n{text}".rstrip())


def _plain(found: Any) -> dict[str, Any]:
    from lowprec import settings

    values = {name: getattr(found, name) for name in settings.keys()}  # noqa: SIM118 (a function, not a dict)
    return {"kind": "config", **{k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}}


def _value(name: str, text: str) -> Any:
    """The value a key gets from what was typed; "none" and "" clear it."""
    from lowprec import settings

    known = settings.keys()
    if name not in known:
        from lowprec.errors import unknown_name

        raise unknown_name("key", name, known)
    default = known[name].default
    if name == "rules":
        return dict(_pair(rule, "--rule") for rule in split(text))
    if isinstance(default, bool):
        if text.lower() not in ("true", "false", "yes", "no"):
            raise ValueError(f"{name} is true or false, not {text!r}.")
        return text.lower() in ("true", "yes")
    if isinstance(default, tuple):
        return () if text.lower() == "none" else split(text)
    if text.lower() in ("none", ""):
        return default
    if isinstance(default, int) or name == "clip_grad_norm":
        try:
            return int(text) if isinstance(default, int) else float(text)
        except ValueError:
            raise ValueError(f"{name} is a number, not {text!r}.") from None
    return text


def _pair(text: str, option: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} takes NAME=VALUE, got {text!r}.")
    return name.strip(), value.strip()


def _given(pairs: tuple[str, ...], rules: tuple[str, ...]) -> dict[str, Any]:
    answers = {}
    for pair in pairs:
        name, text = _pair(pair, "--set")
        answers[name] = _value(name, text)
    if rules:
        answers["rules"] = dict(_pair(rule, "--rule") for rule in rules)
    return answers


def _ask(before: Any) -> dict[str, Any]:
    """Ask for every key, showing its help and what holds."""
    from lowprec import settings

    answers = {}
    for name, key in settings.keys().items():
        now = getattr(before, name)
        if isinstance(now, dict):
            shown = ",".join(f"{glob}={recipe}" for glob, recipe in now.items()) or "none"
        elif isinstance(now, bool):
            shown = "true" if now else "false"
        else:
            shown = ",".join(now) if isinstance(now, tuple) else str(now)
        text = click.prompt(f"{key.metadata['help']}\n  {name}", default=shown or "none", show_default=True)
        if text != (shown or "none"):
            answers[name] = _value(name, "" if name == "rules" and text == "none" else text)
    return answers
