"""Frozen dataclasses as one line of text or as plain dicts, driven by `dataclasses.fields` and the type hints.

The grammar, for every class alike, so that a new field is printed and parsed the moment it exists:

* a value with fields of its own      field=value field=value, those at their default left out
* inside another value                (field=value,field=value)
* None                                -
* booleans, numbers, words            true, 0.5, nearest
* tuples                              a|b|c, and nothing at all for an empty one

A class that has a shorter form of its own (a cast, a product, a rule) gives it by ``__str__`` and ``parse``; then
that is used. This module knows no recipe: it imports nothing of lowprec but the errors.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, Union

from lowprec.errors import unknown_name

__all__ = [
    "check_choices",
    "choices",
    "from_plain",
    "is_count",
    "read_fields",
    "read_number",
    "to_plain",
    "write_fields",
]


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache
def choices(cls: type, name: str) -> tuple[Any, ...]:
    """The allowed values of a field whose type is a Literal (None among them for an optional one), else ()."""
    found: list[Any] = []
    for option in _options(_hints(cls)[name]):
        if typing.get_origin(option) is Literal:
            found += typing.get_args(option)
        elif option is type(None):
            found.append(None)
        else:
            return ()
    return tuple(found)


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)


def check_choices(value: Any, where: str = "") -> None:
    """Raise for a field that is not one of its Literal's values; near matches are listed."""
    for f in dataclasses.fields(value):
        allowed = choices(value.__class__, f.name)
        if allowed and getattr(value, f.name) not in allowed:
            error = unknown_name(f.name, getattr(value, f.name), [str(a) for a in allowed])
            raise ValueError(f"{where}{error}")


def is_count(n: object) -> bool:
    """Whether a value is a positive integer (True is none)."""
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


# -- text ----------------------------------------------------------------------------------------------------------


def write_fields(value: Any, skip: Sequence[str] = (), separator: str = " ") -> str:
    """Every field that is not at its default, as ``name=value``."""
    return separator.join(
        f"{f.name}={_write(getattr(value, f.name))}"
        for f in dataclasses.fields(value)
        if f.name not in skip and getattr(value, f.name) != _default(f)
    )


def _default(f: dataclasses.Field[Any]) -> Any:
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def _write(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "|".join(_write(item) for item in value)
    if dataclasses.is_dataclass(value) and not hasattr(value, "parse"):
        return f"({write_fields(value, separator=',')})"
    return repr(value) if isinstance(value, float) else str(value)


def read_fields(cls: type, words: Iterable[str]) -> dict[str, Any]:
    """The keyword arguments of a class from ``name=value`` words.

    Raises:
        ValueError: if a word is no ``name=value``, comes twice, or has an unknown name or value.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise ValueError(f"expected field=value in a {cls.__name__.lower()}, got {word!r}")
        if name not in names:
            raise unknown_name(f"field of a {cls.__name__.lower()}", name, names)
        if name in found:
            raise ValueError(f"{name} is given twice in one {cls.__name__.lower()}")
        found[name] = _read(_hints(cls)[name], text)
    return found


def _read(hint: Any, text: str) -> Any:
    """One value of the hinted type from its text."""
    options = _options(hint)
    if type(None) in options and text == "-":
        return None
    for option in options:
        if typing.get_origin(option) is tuple:
            item = typing.get_args(option)[0]
            return tuple(_read(item, part) for part in text.split("|")) if text else ()
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            if hasattr(option, "parse"):
                return option.parse(text)
            if text.startswith("(") and text.endswith(")"):
                return option(**read_fields(option, [w for w in text[1:-1].split(",") if w]))
            if "kind" in _hints(option):  # the short form: loss_scale=dynamic
                make: Any = option
                return make(kind=text)
    if bool in options:
        if text not in ("true", "false"):
            raise ValueError(f"expected true or false, got {text!r}")
        return text == "true"
    number = next((t for t in (int, float) if t in options), None)
    return text if number is None else read_number(text, number)


def read_number(text: str, kind: type) -> Any:
    """An int or a float from its text; a user's typing mistake is one sentence."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {'an integer' if kind is int else 'a number'}, got {text!r}") from None


# -- plain data ----------------------------------------------------------------------------------------------------


def to_plain(value: Any) -> Any:
    """A value as dicts, lists, strings and numbers (classes with a form of their own as that string)."""
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if hasattr(value, "parse"):
            return str(value)
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def from_plain(cls: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a class from what `to_plain` wrote of its fields.

    Raises:
        ValueError: if a key is not a field.
    """
    names = [f.name for f in dataclasses.fields(cls)]
    for key in plain:
        if key not in names:
            raise unknown_name(f"field of a {cls.__name__.lower()}", key, names)
    return {key: _from_plain(_hints(cls)[key], value) for key, value in plain.items()}


def _from_plain(hint: Any, value: Any) -> Any:
    for option in _options(hint):
        if typing.get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_from_plain(typing.get_args(option)[0], item) for item in value)
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            if isinstance(value, Mapping):
                return option(**from_plain(option, value))
            if isinstance(value, str) and str not in _options(hint):
                return _read(option, value)
    return value
