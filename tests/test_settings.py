"""lowprec.toml and LOWPREC_RECIPE: who wins, what is refused, and that every key is written and read."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowprec as lp
from lowprec import settings as st
from lowprec.recipes import chosen

EVERY = st.Settings(
    recipe="fp8 last_layer=high",
    skip=("head", "blocks.[0-3].*"),
    strict=True,
    clip_grad_norm=1.5,
    guard="backoff",
    seed=7,
    rules={"blocks.*.mlp.*": "mxfp8", "blocks.0": "high"},
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(st.VARIABLE, raising=False)


def test_every_key_is_written_and_read(tmp_path: Path) -> None:
    for name, f in st.keys().items():
        assert getattr(EVERY, name) != (f.default if name != "rules" else {}), name
        assert f.metadata["help"].endswith(".")
    (tmp_path / st.FILE).write_text(st.to_toml(EVERY))
    again = st.read_file(tmp_path / st.FILE)
    assert again == EVERY and again.source == str(tmp_path / st.FILE)
    (tmp_path / st.FILE).write_text(st.to_toml(st.Settings()))
    assert st.read_file(tmp_path / st.FILE) == st.Settings()


def test_rules_as_a_plan_takes_them() -> None:
    assert EVERY.module_rules() == {"blocks.*.mlp.*": lp.recipe("mxfp8"), "blocks.0": None}


def test_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert st.chosen_recipe() is None and chosen() is None
    (tmp_path / st.FILE).write_text('recipe = "mxfp8"\nclip_grad_norm = 2\n')
    assert chosen() == lp.recipe("mxfp8")
    monkeypatch.setenv(st.VARIABLE, "int8 last_layer=high")
    found = st.settings()
    assert chosen() == lp.recipe("int8 last_layer=high") and found.source == st.VARIABLE and found.clip_grad_norm == 2
    monkeypatch.setenv(st.VARIABLE, "int9")
    with pytest.raises(ValueError, match=r"LOWPREC_RECIPE: unknown recipe 'int9'; did you mean 'int8'"):
        st.settings()


def test_the_file_is_found_above_but_not_outside_the_repository(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / st.FILE).write_text('recipe = "bf16"\n')
    assert st.find_file(inner) == tmp_path / st.FILE
    (tmp_path / "a" / ".git").mkdir()
    assert st.find_file(inner) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('recipes = "fp8"', "lowprec.toml: unknown key 'recipes'; did you mean 'recipe'"),
        ("recipe = 8", "recipe must be a string, got 8"),
        ('recipe = "fp9"', "unknown recipe 'fp9'"),
        ('skip = "head"', "skip must be a list of strings"),
        ("skip = [1]", "skip must be a list of strings"),
        ("strict = 1", "strict must be true or false"),
        ("seed = true", "seed must be an integer"),
        ("clip_grad_norm = -1", "clip_grad_norm must be positive"),
        ('guard = "skipp"', "did you mean 'skip'"),
        ('[rules]\n"a" = "fp9"', "unknown recipe 'fp9'"),
        ("recipe = ", "is no TOML file"),
    ],
)
def test_files_that_make_no_sense(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / st.FILE).write_text(text + "\n")
    with pytest.raises(ValueError, match=sentence):
        st.settings()
