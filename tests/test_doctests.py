"""Every doctest in the package runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import lowprec

NAMES = sorted(
    m.name for m in pkgutil.walk_packages(lowprec.__path__, "lowprec.") if not m.name.endswith(("__main__", "_native"))
)


@pytest.mark.parametrize("name", NAMES)
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
