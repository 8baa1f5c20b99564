"""Every command and snippet of the README and the docs runs, and every message that troubleshooting explains exists."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import snippets
from snippets import ROOT, Fence, fences, pages_with_code

from lowprec.cli import COMMANDS, cli
from lowprec.recipes import recipes

KNOWN = ("python", "console", "text", "json", "toml", "html", "")


def _hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose `lowprec` and `python` are those of this test run."""
    folder = tmp_path_factory.mktemp("bin")
    for name, arguments in (("lowprec", "-m lowprec "), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    source = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "PYTHONWARNINGS": "ignore"}


def _run_page(page: Path, folder: Path, environment: dict[str, str], long: bool) -> None:
    """Run a page from top to bottom: its Python in one process at the end of each stretch between commands."""
    script: list[str] = []
    for fence in fences(page):
        if fence.mark.startswith("outside") or (fence.mark == "long" and not long):
            continue
        if fence.title:
            (folder / fence.title).write_text(fence.body)
        elif fence.language == "python":
            script.append(fence.body)
        elif fence.language == "console":
            for command in fence.commands:
                _shell(command, folder, environment)
    if script:
        (folder / "_page.py").write_text("\n".join(script))
        _shell("python _page.py", folder, environment)


def _shell(command: str, folder: Path, environment: dict[str, str]) -> None:
    ran = subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"


@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    _run_page(page, tmp_path, environment, long=False)


@pytest.mark.long
@pytest.mark.parametrize(
    "page",
    [page for page in pages_with_code() if any(f.mark == "long" for f in fences(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_runs_with_its_long_parts(page: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    _run_page(page, tmp_path, environment, long=True)


def _all_fences() -> list[tuple[Path, Fence]]:
    return [(page, fence) for page in snippets.PAGES if page.exists() for fence in fences(page)]


def test_no_fence_escapes_the_check() -> None:
    for page, fence in _all_fences():
        assert fence.language in KNOWN, f"{page.name}: a fence of {fence.language!r} would not be run"
        assert not fence.mark or fence.mark in ("long", "figures") or fence.mark.startswith("outside: "), (
            page,
            fence.mark,
        )
        assert fence.language != "console" or fence.commands, f"{page.name}: a console fence without '$ '"


def test_every_lowprec_command_has_options_that_exist() -> None:
    """Also those that are too slow to run, or stand in a line of text."""
    text = [(page.name, c) for page, fence in _all_fences() if fence.language == "console" for c in fence.commands]
    for page in snippets.PAGES:
        if page.exists():
            text += [(page.name, c) for c in re.findall(r"`(lowprec [^`\n]+)`", page.read_text(encoding="utf-8"))]
    assert len(text) > 20
    for page_name, command in text:
        words = shlex.split(command.replace("…", "x"))
        if words[0] != "lowprec" or len(words) < 2 or words[1] in ("COMMAND", "recipe_lists"):
            continue
        words = [word for word in words[1:] if word != "--debug" and word != "COMMAND"]
        if words:
            _parse(page_name, command, words)


def _parse(page: str, command: str, words: list[str]) -> None:
    found: click.Command | None = cli
    context = click.Context(cli, info_name="lowprec")
    while isinstance(found, click.Group) and words:
        assert words[0] in found.list_commands(context), f"{page}: there is no command {words[0]!r} ({command})"
        found = found.get_command(context, words.pop(0))
        assert found is not None
    if "--help" in words:
        return
    assert found is not None
    try:
        found.make_context("lowprec", words, resilient_parsing=False)
    except click.MissingParameter:
        pass  # a command that is spoken of, not shown
    except click.UsageError as error:
        raise AssertionError(f"{page}: {command}: {error.format_message()}") from None


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, fence in _all_fences():
        for command in fence.commands if fence.language == "console" else []:
            if command.startswith("make "):
                assert command.split()[1] in targets, f"{page.name}: {command}"


def test_links_between_pages_exist() -> None:
    generated = set(_hooks().generated())
    for page in snippets.PAGES:
        if not page.exists():
            continue
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
            place = (page.parent / target).resolve()
            known = place.exists() or str(place).removeprefix(f"{ROOT / 'docs'}/") in generated
            assert known, f"{page.name} links to {target}"


# -- what the package fills in -----------------------------------------------------------------------------------------


def test_fills_and_generated_pages() -> None:
    hooks = _hooks()
    used = set()
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        used |= set(re.findall(r"^\[\[(\w+)\]\]$", text, re.MULTILINE))
        if "[[" in text:
            assert not re.search(r"^\[\[\w+\]\]$", hooks.fill(text), re.MULTILINE)
    assert used == set(hooks.FILLS)
    assert set(hooks.generated()) == {f"recipes/{name}.md" for name in recipes()}
    assert all(f"## lowprec {name}" in hooks.commands() for name in COMMANDS)


def test_nav_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in nav, page.name


# -- messages ----------------------------------------------------------------------------------------------------------


def _literals() -> list[str]:
    """Every string in the package, with a mark where an f-string puts something in."""
    found = []
    for path in (ROOT / "lowprec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_in_troubleshooting_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### (.+)$", page, re.MULTILINE)
    assert len(headings) > 20
    literals = _literals()
    for heading in headings:
        pieces = [piece.strip() for piece in heading.split("…") if len(piece.strip()) > 3]
        assert pieces, heading
        for piece in pieces:
            assert any(piece in literal for literal in literals), f"no message of lowprec has {piece!r}"
