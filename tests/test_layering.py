"""The direction of dependency, and the layer that must not load torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lowprec

ROOT = Path(lowprec.__file__).parent
TORCH_FREE = [
    "lowprec",
    "lowprec.formats",
    "lowprec.recipe",
    "lowprec.recipes",
    "lowprec.loss_scale",
    "lowprec.errors",
    "lowprec.cli",
]
# a module (by prefix) -> prefixes of lowprec modules it must not import
FORBIDDEN = {
    "formats": ["recipe", "kernels", "quantize", "linear", "apply", "training", "optim", "cli"],
    "recipe": ["kernels", "quantize", "linear", "apply", "training", "optim", "cli"],
    "kernels": ["recipes", "quantize", "linear", "apply", "training", "optim", "cli"],
    "quantize": ["recipes", "linear", "apply", "training", "optim", "cli"],
    "linear": ["apply", "training", "cli"],
    "apply": ["training", "cli"],
    "optim": ["apply", "training", "cli"],
    "training": ["cli"],
}


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("lowprec.") for name in names if name.startswith("lowprec.")}


def test_direction_of_dependency() -> None:
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for prefix, banned in FORBIDDEN.items():
            if module == prefix or module.startswith(prefix + "."):
                for name in _imports(path):
                    wrong = [b for b in banned if name == b or name.startswith(b + ".")]
                    assert not wrong, f"{module} imports {name}"


def test_torch_free_layer() -> None:
    code = f"import sys\nfor m in {TORCH_FREE!r}: __import__(m)\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
