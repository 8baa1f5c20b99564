"""Code fences of a Markdown page, and what is to be done with each.

A page is run from top to bottom in one folder:

    ```python            runs; the fences of a page share their names
    ```python title="F"  is written to the file F
    ```console           each line that begins with "$ " runs in a shell
    ```text, json, toml  are shown only

A comment on the line before a fence changes that: ``<!-- long -->`` runs it with the long tests only (its options are
checked always), ``<!-- outside: why -->`` never, because it would change the machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^>]*?) -->\n)?^```(?P<info>[^\n]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)


class Fence(NamedTuple):
    """One code fence."""

    language: str
    title: str
    mark: str
    body: str

    @property
    def commands(self) -> list[str]:
        """The commands of a console fence."""
        joined = self.body.replace("\\\n", " ")
        return [line[2:] for line in joined.splitlines() if line.startswith("$ ")]


def fences(page: Path) -> list[Fence]:
    """The fences of a page in order."""
    found = []
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Fence(language, title[1] if title else "", match["mark"] or "", match["body"]))
    return found


def pages_with_code() -> list[Path]:
    """Pages that have something to run."""
    return [page for page in PAGES if page.exists() and any(f.language in ("python", "console") for f in fences(page))]
