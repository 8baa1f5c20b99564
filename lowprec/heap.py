"""Keeping freed memory: why a training step on a CPU should not give its memory back between tensors.

The C library returns every freed block above 32 MB to the system and trims the end of its heap; a step then touches
fresh pages again and again, and the kernel zeroes each of them first. On a GPT with a vocabulary of 8192 this took
0.2 of 1.6 seconds a step. GPU allocators have kept freed memory from the start; here it is a setting of the process.
"""

from __future__ import annotations

import warnings

from lowprec import kernels
from lowprec.errors import LowprecWarning

__all__ = ["keep_heap"]


def keep_heap(keep: bool = True) -> bool:
    """Let this process keep freed memory for its next tensors, or give it back as the C library does by default.

    It holds for the whole process. Resident memory then stays at its peak instead of falling between steps. Only
    glibc has the setting; elsewhere a warning says that nothing changed.

    Returns:
        Whether the setting was made.

    >>> keep_heap(True) in (True, False)
    True
    """
    if kernels.available("native")[0] and kernels.native_core().keep_heap(keep):
        return True
    warnings.warn("keep_heap has no effect: it needs the native core and glibc.", LowprecWarning, stacklevel=2)
    return False
