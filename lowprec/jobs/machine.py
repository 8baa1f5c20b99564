"""What a figure was measured on: a few plain facts that stand beside every table."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import lowprec

__all__ = ["describe", "facts"]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def facts() -> dict[str, Any]:
    """CPU, instruction set, threads, memory, GPU and versions."""
    from lowprec import kernels

    native, reason = kernels.available("native")
    return {
        "cpu": _cpu_name(),
        "instruction_set": kernels.native_core().isa() if native else f"none ({reason})",
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": _memory(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lowprec": lowprec.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "command": " ".join(["lowprec", *sys.argv[1:]]),
    }


def describe(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine.get("memory_bytes") else ""
    gpu = f", {machine['gpu']}" if machine.get("gpu") else ""
    return (
        f"{machine['cpu']} ({machine['instruction_set']}), {machine['threads']} threads{memory}{gpu}, "
        f"torch {machine['torch']}, lowprec {machine['lowprec']}"
    )
