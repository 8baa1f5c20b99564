"""What `lowprec run` starts in each process: the script as ``__main__``, and a word when it took no recipe.

python -m lowprec.cli.launch file script.py args...
python -m lowprec.cli.launch module package.module args...
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

__all__ = ["main"]


def main(arguments: list[str]) -> None:
    """Run a script or a module; its exceptions and exit code are its own."""
    kind, script, *rest = arguments
    sys.argv = [script, *rest]
    try:
        if kind == "module":
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).resolve().parent))
            runpy.run_path(script, run_name="__main__")
    finally:
        # `lp.prepare` loads this module on first use, so its absence means that nobody asked for the recipe
        if "lowprec.training" not in sys.modules and sys.exc_info()[0] is None:
            name = os.environ.get("LOWPREC_RECIPE", "")
            print(
                f"warning: {script} ended without calling lp.prepare, so recipe {name} had no effect.", file=sys.stderr
            )


if __name__ == "__main__":
    main(sys.argv[1:])
