"""Which recipe a script gets that names none: the environment, else the file ``lowprec.toml``. No torch here.

    recipe = "fp8-block"                    # a name, or a name and changes: "fp8-block last_layer=same"
    skip = ["lm_head"]
    clip_grad_norm = 1.0

    [rules]
    "blocks.*.mlp.*" = "mxfp8"              # or "high"

``LOWPREC_RECIPE``, which `lowprec run --recipe` sets, comes before the file's ``recipe``; the other keys still hold.
The file is looked for in the working directory and then in each directory above it, up to the one that holds ``.git``.

Every key is a field of `Settings`: its type, its default and its line of help stand there once, and what writes, reads
and documents the file walks them. A key that nobody knows is an error, and so is a value of the wrong type.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowprec.errors import unknown_name
from lowprec.recipe import Recipe
from lowprec.recipes import recipe as find_recipe

__all__ = ["FILE", "VARIABLE", "Settings", "chosen_recipe", "find_file", "keys", "read_file", "settings", "to_toml"]

FILE = "lowprec.toml"
VARIABLE = "LOWPREC_RECIPE"
GUARDS = ("skip", "backoff", "stop")


def _key(default: Any, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": help, **more})


@dataclass(frozen=True)
class Settings:
    """What a file ``lowprec.toml`` can say; a field is a key of the file, but for ``source``.

    Args:
        recipe: see the help of each key (`keys`).
        source: where the recipe came from, in words.
    """

    recipe: str | None = _key(None, "Recipe: a name, or a name and changes such as 'fp8 last_layer=high'.")
    skip: tuple[str, ...] = _key((), "Globs of modules that stay as they are.")
    strict: bool = _key(False, "Refuse what the device can only emulate.")
    clip_grad_norm: float | None = _key(None, "Largest norm of all gradients together.")
    guard: str | None = _key(None, "What to do when loss or gradient norm take off: skip, backoff or stop.")
    seed: int = _key(0, "Seed of stochastic rounding in the optimizer.")
    rules: Mapping[str, str] = field(
        default_factory=dict, metadata={"help": "Glob of modules = their recipe, or high; a table of its own."}
    )
    source: str = field(default="nothing chosen", compare=False)

    def __post_init__(self) -> None:
        if self.recipe is not None:
            find_recipe(self.recipe)
        for name in self.rules.values():
            if name != "high":
                find_recipe(name)
        if self.guard is not None and self.guard not in GUARDS:
            raise unknown_name("guard", self.guard, GUARDS)
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be positive, got {self.clip_grad_norm}")

    def module_rules(self) -> dict[str, Recipe | None]:
        """The rules as `lowprec.plan` takes them."""
        return {glob: None if name == "high" else find_recipe(name) for glob, name in self.rules.items()}


# key of the file -> the types it may have there, in words and as Python types
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "recipe": ("a string", (str,)),
    "skip": ("a list of strings", (list, tuple)),
    "strict": ("true or false", (bool,)),
    "clip_grad_norm": ("a number", (int, float)),
    "guard": ("a string", (str,)),
    "seed": ("an integer", (int,)),
    "rules": ("a table of strings", (dict,)),
}


def keys() -> dict[str, dataclasses.Field[Any]]:
    """Every key of the file by name, with its default and ``metadata["help"]``.

    >>> keys()["strict"].metadata["help"]
    'Refuse what the device can only emulate.'
    """
    return {f.name: f for f in dataclasses.fields(Settings) if f.name != "source"}


def find_file(start: str | Path | None = None) -> Path | None:
    """The file that counts for a directory (default: the working directory), or None."""
    here = Path.cwd() if start is None else Path(start).resolve()
    for directory in (here, *here.parents):
        if (directory / FILE).is_file():
            return directory / FILE
        if (directory / ".git").exists():
            return None
    return None


def read_file(path: str | Path) -> Settings:
    """The settings in a file.

    Raises:
        ValueError: if the file is no TOML, or has an unknown key or a value of the wrong type; it names the file.
        OSError: if it cannot be read.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        plain = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file: {error}") from None
    try:
        return dataclasses.replace(_checked(plain), source=str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(plain: Mapping[str, Any]) -> Settings:
    for name, value in plain.items():
        if name not in _TYPES:
            raise unknown_name("key", name, _TYPES)
        words, types = _TYPES[name]
        wrong = not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if wrong or not all(isinstance(item, str) for item in items):
            raise ValueError(f"{name} must be {words}, got {value!r}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()}
    return Settings(**values)


def settings(start: str | Path | None = None) -> Settings:
    """What holds here: the file's settings, with the recipe of the environment before the file's.

    Raises:
        ValueError: for an unknown recipe in the environment, and whatever `read_file` raises.
    """
    path = find_file(start)
    found = Settings() if path is None else read_file(path)
    name = os.environ.get(VARIABLE, "").strip()
    if not name:
        return found
    try:
        return dataclasses.replace(found, recipe=name, source=VARIABLE)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None


def chosen_recipe(start: str | Path | None = None) -> Recipe | None:
    """The recipe that a script gets that names none, or None."""
    name = settings(start).recipe
    return None if name is None else find_recipe(name)


def to_toml(value: Settings) -> str:
    """A file that `read_file` reads back as equal settings; keys at their default are left out.

    >>> print(to_toml(Settings(recipe="fp8", skip=("head",))), end="")
    recipe = "fp8"
    skip = ["head"]
    """
    lines = []
    for name, f in keys().items():
        item = getattr(value, name)
        if name != "rules" and item != f.default:
            lines.append(f"{name} = {json.dumps(list(item) if isinstance(item, tuple) else item)}")
    if value.rules:
        lines += ["", "[rules]", *(f"{json.dumps(glob)} = {json.dumps(name)}" for glob, name in value.rules.items())]
    return "\n".join(lines) + "\n"
