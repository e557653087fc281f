"""Compiled programs are found by a later process, and what goes wrong with their folder costs a warning at most."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from kit.batches import numbered
from kit.modules import Mean
from kit.processes import launch, say
from kit.trainers import BARE, make_trainer

import jaxlit as jl
from jaxlit.engine import compiled_program as compile_cache


@pytest.fixture
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave jax without the cache of the tests, as a user has it."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield
    compile_cache.use_compile_cache(False)
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


def train(**given: Any) -> np.ndarray:
    model = Mean()
    jl.Trainer(max_epochs=1, strategy="fsdp", **BARE, **given).fit(model, numbered(4))
    return np.asarray(model.w[...])


def train_in_a_process() -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    seen: list[str] = []  # hits and misses of the cache among them
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    say("w", train(compile_cache="programs").tolist())
    say("stored", seen.count("cache_misses"))
    say("loaded", seen.count("cache_hits"))


@pytest.mark.full
def test_a_second_process_compiles_nothing_that_the_first_stored(tmp_path) -> None:
    first, second = (launch(train_in_a_process, tmp_path / x, count=1, join=False)[0] for x in ("run", "run"))
    assert first.said["stored"] > 2
    assert second.said["stored"] == 0
    assert second.said["loaded"] >= first.said["stored"]
    assert second.said["w"] == first.said["w"]


@pytest.mark.usefixtures("unconfigured")
def test_it_is_on_by_default_in_the_users_cache_folder(tmp_path) -> None:
    train()
    assert [*tmp_path.glob("caches/jaxlit/compiled/jit_train_step-*-cache")]


@pytest.mark.usefixtures("unconfigured")
def test_switched_off_it_writes_nothing_also_after_a_run_with_it(tmp_path) -> None:
    train(compile_cache="programs")
    for file in (tmp_path / "programs").iterdir():
        file.unlink()
    jax.clear_caches()
    train(compile_cache=False)
    assert not [*tmp_path.glob("programs/*step*")]
    assert not (tmp_path / "caches").exists()


@pytest.mark.usefixtures("unconfigured")
def test_a_cache_that_the_user_configured_is_used_instead(tmp_path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    train(compile_cache="programs")
    assert [*(tmp_path / "mine").iterdir()]
    assert not (tmp_path / "programs").exists()


@pytest.mark.usefixtures("unconfigured")
def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    trainer = make_trainer(compile_cache=tmp_path / "file" / "programs", max_epochs=1)
    trainer.fit(Mean(), numbered(4))
    trainer.validate(Mean(), numbered(4))
    assert caplog.text.count("Compiled programs cannot be stored") == 1


@pytest.mark.usefixtures("unconfigured")
def test_every_program_is_stored_however_quickly_it_compiled(tmp_path) -> None:
    jax.jit(lambda x: x + 1)(1)  # before the first Trainer, nothing is
    jl.Trainer(compile_cache="programs", **BARE)
    jax.jit(lambda x: x + 2)(1)
    assert len([*tmp_path.glob("programs/*")]) == 1


@pytest.mark.usefixtures("unconfigured")
def test_a_damaged_entry_is_compiled_again(tmp_path) -> None:
    trained = train(compile_cache="programs")
    (entry,) = tmp_path.glob("programs/jit_train_step-*-cache")
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    for _ in range(2):
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit_train_step'"):
            assert train(compile_cache="programs") == trained


@pytest.mark.usefixtures("unconfigured")
def test_the_oldest_entries_make_room(tmp_path, monkeypatch) -> None:
    (tmp_path / "notes").write_bytes(b"x" * 100)
    for i, key in enumerate("abc"):
        (tmp_path / f"{key}-cache").write_bytes(b"x" * 10)
        os.utime(tmp_path / f"{key}-cache", (i, i))
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 25)
    compile_cache.use_compile_cache(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"notes", "b-cache", "c-cache"}
