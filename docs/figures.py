"""Put measured figures into the READMEs, so that no number there is typed by hand.

    lowprec compare --json docs/figures/compare.json
    python docs/figures.py

The table between ``<!-- figures -->`` and ``<!-- /figures -->`` in every README is written anew from that file, and so
is the picture `docs/figures/compare.svg`: speed against torch fp32 across, change of the loss upwards.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from lowprec.jobs import table

HERE = Path(__file__).parent
READMES = [HERE.parent / "README.md", HERE.parent / "README.zh.md"]
DATA = HERE / "figures" / "compare.json"


def block(result: dict[str, Any]) -> str:
    """What stands between the marks."""
    shown = "![Speed against change of the loss, a dot a recipe](docs/figures/compare.svg)"
    return f"<!-- figures -->\n```text\n{table.render(result)}\n```\n\n{shown}\n<!-- /figures -->"


def put(text: str, result: dict[str, Any]) -> str:
    """A README with its figures replaced."""
    return re.sub(r"<!-- figures -->.*?<!-- /figures -->", lambda _: block(result), text, flags=re.DOTALL)


def picture(result: dict[str, Any]) -> str:
    """The trade-off as an SVG that follows light and dark."""
    rows = [row for row in result["rows"] if row["vs_torch_fp32"] and row["loss"]]
    xs = [row["vs_torch_fp32"] for row in rows]
    ys = [100 * (row["difference"] or 0.0) for row in rows]
    left, right = 0.0, max(xs, default=1.0) * 1.12
    low, high = min([*ys, 0.0]) - 0.3, max([*ys, 0.5]) + 0.3
    width, height, pad = 760, 340, 54

    def px(x: float) -> float:
        return pad + (x - left) / (right - left) * (width - 2 * pad)

    def py(y: float) -> float:
        return height - pad - (y - low) / (high - low) * (height - 1.6 * pad)

    style = (
        "text{font:13px system-ui,sans-serif;fill:#333}line{stroke:#bbb}circle{fill:#4477aa;fill-opacity:.75}"
        ".peer{fill:#888}@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#555}}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{html.escape(result["sentence"])}"><style>{style}</style>',
        f'<line x1="{pad}" y1="{py(0):.1f}" x2="{width - pad}" y2="{py(0):.1f}"/>',
        f'<line x1="{pad}" y1="{pad / 2}" x2="{pad}" y2="{height - pad}"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">times the speed of torch fp32</text>',
        f'<text x="14" y="{height / 2}" text-anchor="middle" transform="rotate(-90 14 {height / 2})">'
        f"validation loss against {result['baseline']}, %</text>",
    ]
    parts += [f'<text x="{px(x):.1f}" y="{height - pad + 18}">{x}</text>' for x in range(1, int(right) + 1)]
    for index, (row, x, y) in enumerate(zip(rows, xs, ys)):
        radius = 3 + 0.5 * (row["bytes_a_parameter"] or 8)
        kind = ' class="peer"' if row["peer"] else ""
        above = py(y) - radius - 5 if index % 2 else py(y) + radius + 14
        parts.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="{radius:.1f}"{kind}/>')
        parts.append(f'<text x="{px(x):.1f}" y="{above:.1f}" text-anchor="middle">{html.escape(row["recipe"])}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Write the READMEs and the picture."""
    result = json.loads(DATA.read_text())
    for readme in READMES:
        readme.write_text(put(readme.read_text(encoding="utf-8"), result), encoding="utf-8")
    (HERE / "figures" / "compare.svg").write_text(picture(result))


if __name__ == "__main__":
    main()
