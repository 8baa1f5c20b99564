"""Errors that say what happened, what is allowed and what to do.

Everything a user can get wrong raises `ValueError` or `TypeError` with one plain sentence; `assert` is for what only
a defect of lowprec could break. The helpers here keep the wording the same everywhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["LowprecWarning", "MissingExtraError", "missing_extra", "unknown_name"]


class LowprecWarning(UserWarning):
    """Something was asked for that has no effect here, or was done in another way than asked."""


class MissingExtraError(ImportError):
    """An optional dependency is needed and not installed; the message names the extra to install."""


def unknown_name(what: str, given: object, known: Iterable[str]) -> ValueError:
    """Build the error for an unknown name, listing near matches first and all names otherwise.

    Args:
        what: what kind of name it is, as in "format" or "rounding".
        given: the name that was not found.
        known: every name that would have been accepted.

    Returns:
        The error, to be raised by the caller.

    >>> print(unknown_name("format", "e4m4", ["e4m3", "e5m2", "int8"]))
    unknown format 'e4m4'; did you mean 'e4m3'? Known: e4m3, e5m2, int8.
    """
    names = list(known)
    near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else "."
    return ValueError(f"unknown {what} {given!r}{hint} Known: {', '.join(names)}.")


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """Build the error for an optional package that is not installed.

    >>> print(missing_extra("plotly", "report", "the report page"))
    the report page needs plotly, which is not installed: pip install 'lowprec[report]'
    """
    return MissingExtraError(f"{purpose} needs {package}, which is not installed: pip install 'lowprec[{extra}]'")
