"""Ctrl-C between steps, never inside one.

The first SIGINT or SIGTERM only asks to stop: the loop finishes what it is doing, saves, and says how to go on. A
second one stops at once, and the newest whole checkpoint is what remains.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Stopped", "Stopper"]


class Stopped(Exception):
    """The run was asked to stop, and what was asked of it until then is saved."""


class Stopper:
    """Within the block, `wanted` says whether somebody asked to stop.

    Args:
        tell: called once with a line of text when it happens.
    """

    def __init__(self, tell: Callable[[str], object] = print) -> None:
        self.wanted = False
        self._tell = tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopper:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._asked)
        return self

    def __exit__(self, *unused: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
        self._tell("stopping after this step (once more to stop at once) ...")
