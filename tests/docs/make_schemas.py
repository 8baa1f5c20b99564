"""Writes docs/schemas: the shape of what every command prints with ``--json``.

    python tests/docs/make_schemas.py

The files are what is documented and tested; this script only spares typing them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent.parent / "docs" / "schemas"
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer"}
NUMBER, ANY = {"type": ["number", "null"]}, {"type": "object"}
MAYBE_TEXT, MAYBE_COUNT = {"type": ["string", "null"]}, {"type": ["integer", "null"]}


def obj(properties: dict[str, Any], more: bool = False) -> dict[str, Any]:
    """An object all of whose properties are there."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": more}


def many(items: dict[str, Any]) -> dict[str, Any]:
    """A list."""
    return {"type": "array", "items": items}


def each(value: dict[str, Any]) -> dict[str, Any]:
    """An object with names of its own."""
    return {"type": "object", "additionalProperties": value}


MACHINE = {"type": "object", "required": ["cpu", "instruction_set", "threads", "torch", "lowprec", "command"]}
ROW = obj(
    {
        "recipe": TEXT, "peer": FLAG, "rate": NUMBER, "vs_torch_fp32": NUMBER, "vs_torch_bf16": NUMBER, "loss": NUMBER,
        "difference": NUMBER, "spread": NUMBER, "bytes_a_parameter": NUMBER, "bytes": {"type": ["object", "null"]},
        "peak_bytes": NUMBER, "coverage": {"type": ["object", "null"]}, "low_share": NUMBER, "flushed": NUMBER,
        "saturated": NUMBER, "skipped_steps": COUNT, "error": MAYBE_TEXT,
        "verdict": {"enum": ["base", "keeps", "close", "loses", "fails", ""]},
    }
)  # fmt: skip
COMPARE = {
    "kind": {"enum": ["compare"]}, "job": TEXT, "about": TEXT, "unit": {"enum": ["tokens", "samples"]}, "steps": COUNT,
    "seeds": many(COUNT), "baseline": TEXT, "rows": many(ROW), "machine": MACHINE, "sentence": TEXT,
}  # fmt: skip
BAND = obj({"steps": many(COUNT), "mean": many(NUMBER), "low": many(NUMBER), "high": many(NUMBER)})
HISTORY = obj(
    {"steps": many(COUNT), "grad_norm": many(NUMBER), "loss_scale": many(NUMBER), "skipped": {"type": "array"}}
)
REPORT = {
    **COMPARE, "kind": {"enum": ["compare", "train"]}, "settings": ANY,
    "curves": each(obj({"step": BAND, "validation": BAND})), "history": each(HISTORY), "heat": ANY, "plans": ANY,
    "commands": many(obj({"what": TEXT, "command": TEXT})),
}  # fmt: skip
TRAIN = {
    "kind": {"enum": ["train"]}, "job": TEXT, "recipe": TEXT, "unit": {"enum": ["tokens", "samples"]}, "steps": COUNT,
    "skipped_steps": COUNT, "loss": NUMBER, "validation_loss": NUMBER, "rate": NUMBER, "sample": MAYBE_TEXT,
    "folder": TEXT,
}  # fmt: skip
MODULE = obj(
    {"name": TEXT, "cls": TEXT, "handler": TEXT, "recipe": MAYBE_TEXT, "output": TEXT, "grad_input": TEXT,
     "grad_weight": TEXT, "carrier": TEXT, "note": TEXT},
    more=True,
)  # fmt: skip
NEEDS = obj(
    {
        "recipe": TEXT, "parameters": COUNT, "weights": COUNT, "masters": COUNT, "gradients": COUNT, "states": COUNT,
        "activations": NUMBER, "peak_fixed": NUMBER, "peak_sample": NUMBER, "communication": COUNT,
        "flops": each({"type": "number"}), "flops_a_sample": NUMBER, "measured": FLAG, "batch": MAYBE_COUNT,
        "peak": NUMBER, "largest_batch": MAYBE_COUNT,
    }
)  # fmt: skip
PLAN = {
    "kind": {"enum": ["plan"]}, "batch": MAYBE_COUNT, "memory": NUMBER, "rows": many(NEEDS),
    "plans": many(obj({"recipe": TEXT, "device": TEXT, "strict": FLAG, "rows": many(MODULE)}, more=True)),
}  # fmt: skip
CONFIG = {
    "kind": {"enum": ["config"]}, "recipe": MAYBE_TEXT, "skip": many(TEXT), "strict": FLAG, "clip_grad_norm": NUMBER,
    "guard": MAYBE_TEXT, "seed": COUNT, "rules": each(TEXT),
}  # fmt: skip
FORMAT = obj({"name": TEXT, "kind": TEXT, "bits": COUNT, "max": NUMBER, "min_normal": NUMBER}, more=True)
RECIPE = obj({"name": TEXT, "note": TEXT, "table": each(TEXT), "equations": each(TEXT)}, more=True)
SCHEMAS = {
    "compare": obj(COMPARE),
    "report": obj(REPORT),
    "train": obj(TRAIN),
    "plan": obj(PLAN),
    "config": obj(CONFIG),
    "run": obj({"kind": {"enum": ["run"]}, "recipe": TEXT, "command": many(TEXT)}),
    "completion": obj({"kind": {"enum": ["completion"]}, "shell": {"enum": ["bash", "zsh", "fish"]}, "script": TEXT}),
    "formats": obj({"formats": many(FORMAT)}, more=True),
    "recipes": obj({"recipes": many(RECIPE)}, more=True),
    "env": ANY,
    "bench": ANY,
}


def main() -> None:
    """Write the files."""
    for name, schema in SCHEMAS.items():
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"lowprec {name} --json"}
        (OUT / f"{name}.json").write_text(json.dumps({**head, **schema}, indent=1) + "\n")


if __name__ == "__main__":
    main()
