"""Every key that `lowprec config` writes is read back, and reaches the training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowprec import settings
from lowprec.cli.config import command

# a value other than the default for every key, and what it reads back as
OTHER: dict[str, tuple[str, Any]] = {
    "recipe": ("fp8-block", "fp8-block"),
    "skip": ("lm_head,blocks.0", ("lm_head", "blocks.0")),
    "strict": ("true", True),
    "clip_grad_norm": ("0.5", 0.5),
    "guard": ("skip", "skip"),
    "seed": ("7", 7),
    "rules": ("blocks.*.mlp.*=mxfp8,norm=high", {"blocks.*.mlp.*": "mxfp8", "norm": "high"}),
}


def test_there_is_a_value_for_every_key() -> None:
    assert set(OTHER) == set(settings.keys())


@pytest.mark.parametrize("name", sorted(OTHER))
def test_every_key_is_written_and_read(tmp_path: Path, name: str) -> None:
    text, value = OTHER[name]
    ran = CliRunner().invoke(command, ["--set", f"{name}={text}", "--out", str(tmp_path / "lowprec.toml")])
    assert ran.exit_code == 0, ran.output
    found = settings.read_file(tmp_path / "lowprec.toml")
    assert getattr(found, name) == value
    for other in set(OTHER) - {name}:
        assert getattr(found, other) == getattr(settings.Settings(), other)


def test_asking(tmp_path: Path) -> None:
    answers = "\n".join(OTHER[name][0] for name in settings.keys()) + "\n"  # noqa: SIM118
    ran = CliRunner().invoke(command, ["--out", str(tmp_path / "lowprec.toml")], input=answers)
    assert ran.exit_code == 0, ran.output
    found = settings.read_file(tmp_path / "lowprec.toml")
    assert {name: getattr(found, name) for name in OTHER} == {name: value for name, (_, value) in OTHER.items()}
    again = CliRunner().invoke(command, ["--out", str(tmp_path / "lowprec.toml")], input="\n" * len(OTHER))
    assert again.exit_code == 0 and settings.read_file(tmp_path / "lowprec.toml") == found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "recip=fp8"], "did you mean 'recipe'"),
        (["--set", "recipe=fp88"], "unknown recipe 'fp88'"),
        (["--set", "strict=perhaps"], "strict is true or false, not 'perhaps'"),
        (["--set", "seed=x"], "seed is a number, not 'x'"),
        (["--set", "seed"], "--set takes NAME=VALUE"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(command, [*arguments, "--out", str(tmp_path / "lowprec.toml")])
    assert isinstance(ran.exception, ValueError) and message in str(ran.exception)
    assert not (tmp_path / "lowprec.toml").exists()
