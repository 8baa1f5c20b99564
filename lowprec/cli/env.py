"""`lowprec env`: what the CPU has, which path is used and why, what is missing, and who runs the threads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import emit, json_option

__all__ = ["command"]

PATHS = {
    "scalar": "baseline instructions of this architecture",
    "avx2": "256-bit vectors",
    "avx512": "512-bit vectors",
    "avx512bf16": "512-bit vectors, byte lookups in registers, bf16 and int8 products",
}


@click.command()
@json_option
def command(json_to: str | None) -> None:
    """Say what this machine has, which kernels run, why, and what is missing.

    \b
    Example:
      lowprec env
      LOWPREC_CPU=avx2 lowprec env --json
    """
    found = _environment()
    emit(found, json_to, lambda: _render(found))


def _environment() -> dict[str, Any]:
    import torch

    import lowprec
    from lowprec import kernels

    usable, reason = kernels.available("native")
    native: dict[str, Any] = {"available": usable, "reason": reason}
    if usable:
        native.update(_native(kernels.native_core()))
    return {
        "lowprec": lowprec.__version__,
        "torch": torch.__version__,
        "native": native,
        "backend": kernels.backend(torch.empty(0)),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "openmp": _openmp(),
        "onednn": bool(torch.backends.mkldnn.is_available()),  # type: ignore[no-untyped-call]
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _native(core: Any) -> dict[str, Any]:
    features: dict[str, dict[str, bool]] = {}
    for isa, name, present in core.cpu_features():
        features.setdefault(isa, {})[name] = present
    used, best, wanted = core.isa(), core.isas()[-1], os.environ.get("LOWPREC_CPU")
    why = "the best this CPU and this build have"
    if wanted:
        why = f"LOWPREC_CPU={wanted}"
    elif used != best:
        why = f"chosen by the program; {best} is there"
    missing = {isa: [n for n, present in have.items() if not present] for isa, have in features.items()}
    return {
        "path": used,
        "why": why,
        "paths": core.isas(),
        "features": features,
        "missing": {isa: names for isa, names in missing.items() if names},
    }


def _openmp() -> list[str]:
    """The OpenMP runtimes this process has mapped; there should be one, torch's."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    files = {line.split()[-1] for line in lines if "/" in line}
    return sorted(f for f in files if any(word in Path(f).name for word in ("libgomp", "libiomp", "libomp")))


def _render(found: dict[str, Any]) -> str:
    native = found["native"]
    lines = [f"lowprec {found['lowprec']}, torch {found['torch']}"]
    if native["available"]:
        lines.append(f"path       {native['path']}: {PATHS[native['path']]} ({native['why']})")
        lines.append(f"paths      {', '.join(native['paths'])}")
        for isa, have in native["features"].items():
            words = [name if present else f"no {name}" for name, present in have.items()]
            lines.append(f"{isa:<10} {', '.join(words)}")
        for isa, names in native["missing"].items():
            lines.append(f"missing    {isa} needs {', '.join(names)}")
    else:
        lines.append(f"path       reference (pure torch, slow): {native['reason']}")
        lines.append("missing    the compiled core: pip install . builds it (needs a C++20 compiler)")
    if found["backend"] == "reference" and native["available"]:
        lines.append("backend    reference, forced by LOWPREC_BACKEND")
    lines.append(f"threads    {found['threads']} of {found['cores']} cores")
    runtimes = ", ".join(found["openmp"]) or "none mapped"
    second = "" if len(found["openmp"]) <= 1 else "  (more than one: threads may be started twice)"
    lines.append(f"OpenMP     {runtimes}{second}")
    lines.append(f"products   oneDNN {'yes' if found['onednn'] else 'no'}, torch {found['torch_capability']}")
    lines.append(f"GPU        {found['gpu'] or 'none'}")
    return "\n".join(lines)
