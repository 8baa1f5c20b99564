"""Timing by turns: a machine that slows down slows all runners, so ratios of one run mean something."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["race"]


def race(runners: Mapping[str, Callable[[], Any]], seconds: float = 0.4, rounds: int = 5) -> dict[str, float]:
    """Best time of each runner in seconds, taken by turns so that a machine that slows down slows all.

    Args:
        runners: name -> what to time. Each is called twice before it counts.
        seconds: about how long each is timed in all.
        rounds: turns.
    """
    best: dict[str, float] = {}
    repeats: dict[str, int] = {}
    for name, run in runners.items():
        run()
        start = time.perf_counter()
        run()
        once = time.perf_counter() - start
        best[name] = once
        repeats[name] = max(1, int(seconds / rounds / max(once, 1e-7)))
    for _ in range(rounds):
        for name, run in runners.items():
            for _ in range(repeats[name]):
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    return best
