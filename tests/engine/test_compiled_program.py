"""Compiled programs: their folder, how many steps are in flight, and a device without memory left."""

import gc
import os
import re
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from kit.batches import numbered, random
from kit.inside import lowered
from kit.journal import hooks, raising
from kit.modules import Linear, Mean
from kit.pages import DOCS
from kit.processes import launch, say
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.engine import compiled_program as compile_cache
from jaxlit.engine.compiled_program import Bound, CompiledProgram
from jaxlit.errors import OutOfMemoryError
from jaxlit.strategies import FSDP, SingleDevice
from jaxlit.texts import size


def test_it_holds_no_array_of_its_call() -> None:
    program = CompiledProgram("train_step", jax.jit(lambda state, x: (state, x.sum())))
    state, x = [jnp.ones(3)], jnp.ones(5)
    held = [weakref.ref(a) for a in (*state, x)]
    program.run(state, x)
    del state, x
    gc.collect()
    assert [ref() for ref in held] == [None, None]


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


def test_it_is_on_by_default_in_the_users_cache_folder(unconfigured, tmp_path) -> None:
    train()
    assert [*tmp_path.glob("caches/jaxlit/compiled/jit_train_step-*-cache")]


def test_switched_off_it_writes_nothing_also_after_a_run_with_it(unconfigured, tmp_path) -> None:
    train(compile_cache="programs")
    for file in (tmp_path / "programs").iterdir():
        file.unlink()
    jax.clear_caches()
    train(compile_cache=False)
    assert not [*tmp_path.glob("programs/*step*")]
    assert not (tmp_path / "caches").exists()


def test_a_cache_that_the_user_configured_is_used_instead(unconfigured, tmp_path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    train(compile_cache="programs")
    assert [*(tmp_path / "mine").iterdir()]
    assert not (tmp_path / "programs").exists()


def test_a_folder_that_cannot_be_made_costs_one_warning(unconfigured, tmp_path, caplog) -> None:
    (tmp_path / "file").touch()
    trainer = make_trainer(compile_cache=tmp_path / "file" / "programs", max_epochs=1)
    trainer.fit(Mean(), numbered(4))
    trainer.validate(Mean(), numbered(4))
    assert caplog.text.count("Compiled programs cannot be stored") == 1


def test_every_program_is_stored_however_quickly_it_compiled(unconfigured, tmp_path) -> None:
    jax.jit(lambda x: x + 1)(1)  # before the first Trainer, nothing is
    jl.Trainer(compile_cache="programs", **BARE)
    jax.jit(lambda x: x + 2)(1)
    assert len([*tmp_path.glob("programs/*-cache")]) == 1


def test_an_entry_that_is_cut_is_compiled_again_and_a_later_start_replaces_it(unconfigured, tmp_path) -> None:
    trained = train(compile_cache="programs")
    (entry,) = tmp_path.glob("programs/jit_train_step-*-cache")
    entry.write_bytes(entry.read_bytes()[: entry.stat().st_size // 2])
    for _ in range(2):
        jax.clear_caches()
        with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry for 'jit_train_step'"):
            assert train(compile_cache="programs") == trained
    for stays in (False, True):  # a later start deletes the entry, and its own program is stored
        jax.clear_caches()
        jl.Trainer(compile_cache=False, **BARE)
        jl.Trainer(compile_cache="programs", **BARE)
        assert entry.exists() == stays
        with warnings.catch_warnings(action="error"):
            assert train(compile_cache="programs") == trained


def test_entries_are_read_once_to_see_whether_they_are_cut(unconfigured, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "programs"
    train(compile_cache=folder)
    reads = list[Path]()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (reads.append(path), read(path))[1])
    for _ in range(2):
        jl.Trainer(compile_cache=False, **BARE)
        jl.Trainer(compile_cache=folder, **BARE)
    assert sorted(reads) == sorted(folder.glob("*-cache"))


def test_the_oldest_entries_make_room(unconfigured, tmp_path, monkeypatch) -> None:
    (tmp_path / "notes").write_bytes(b"x" * 100)
    for i, key in enumerate("abc"):
        (tmp_path / f"{key}-cache").write_bytes(b"x" * 10)
        os.utime(tmp_path / f"{key}-cache", (i, i))
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 25)
    compile_cache.use_compile_cache(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"notes", "b-cache", "c-cache", "checked"}


class Token:
    def __init__(self) -> None:
        self.waited = False

    def block_until_ready(self) -> None:
        self.waited = True


@pytest.mark.parametrize("limit", (1, 2, 3, 4, 32))
def test_steps_in_flight_are_bounded(limit) -> None:
    bound, tokens = Bound(limit), list[Any]()
    for _ in range(200):
        tokens.append(Token())
        bound(tokens[-1])
        # Steps run in order, so all before a step that was waited for are done.
        done = max((i + 1 for i, t in enumerate(tokens) if t.waited), default=0)
        # So that there is room for the next, and the devices have something to do.
        assert min(len(tokens), limit // 2) <= len(tokens) - done < limit
    assert sum(token.waited for token in tokens) <= 200 // max(1, limit // 2)


def test_draining_waits_for_the_newest_step_once_a_period() -> None:
    bound, tokens = Bound(4), [Token() for _ in range(6)]
    for token in tokens:
        bound.drain(token)  # type: ignore[arg-type]
    assert [token.waited for token in tokens] == [False, True] * 3


ALLOCATING = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nMore of jax's own."
OF_A_CPU = "INTERNAL: Error dispatching computation: INTERNAL: Out of memory allocating 17179869184 bytes."
COMPILING = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."
STATE = r"parameters 16 B, optimizer 16 B"  # a 3 x 1 kernel and a bias in float32, and their momenta
REMEDIES = ("accumulate_grad_batches", "fsdp", "zero1", "remat", "bf16-mixed", "bf16-true")


class Exhausted:
    def __init__(self, run: Any, at: int, words: str) -> None:
        self.run, self.left, self.words, self.trace = run, at, words, run.trace

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise jax.errors.JaxRuntimeError(self.words)
        return self.run(*args)


def small(name: str, at: int, words: str = ALLOCATING, base: type = SingleDevice, **arguments: Any) -> Any:
    class Small(base):
        def compile(self, program: Any) -> Any:
            run = super().compile(program)
            return Exhausted(run, at, words) if program.name == name else run

        def create_state(self, *given: Any, **more: Any) -> Any:
            if name == "create":
                raise jax.errors.JaxRuntimeError(words)
            return super().create_state(*given, **more)

    return Small(**arguments)


def error_of(strategy: Any, *callbacks: Any, val: Any = None, **arguments: Any) -> OutOfMemoryError:
    given = {"num_sanity_val_steps": 0, **BARE, **arguments}
    with pytest.raises(OutOfMemoryError) as caught:
        fit(Linear(), random(3), val, *callbacks, strategy=strategy, **given)
    assert [word for word in REMEDIES if word not in str(caught.value)] == []
    assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)
    return caught.value


def test_a_call_without_memory_names_the_program_and_parts() -> None:
    trainer = make_trainer(**BARE)
    trainer.fit(Linear(), random(3))
    memory = lowered(trainer, "train_step", random(1)[0]).compile().memory_analysis()
    told = str(error_of(small("train_step", 1)))
    assert told.startswith("The devices ran out of memory in train_step, in its first call: RESOURCE_EXHAUSTED: Out of")
    assert "17179869184 bytes. On the device that holds the most: " in told and "More of jax's own" not in told
    batch = 8 * (3 + 1) * 4
    (shown,) = re.findall(r"```text\n(The devices ran out.*?)```", (DOCS / "first_errors.md").read_text(), re.S)
    pieces = [" ".join(piece.split()) for piece in re.split(r"\.\.\.|[\d.]+ [MG]iB", shown)]
    assert len(pieces) > 5 and [piece for piece in pieces if piece not in told] == []
    assert f"{STATE}, batch {batch} B, temporaries of train_step {size(memory.temp_size_in_bytes)}." in told


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # Three rows of a kernel do not divide into eight; 128 bytes of the batch do.
        (lambda: small("train_step", 1, base=FSDP, min_size=0), f"{STATE}, batch 16 B, temporaries of train_step "),
        # It is not compiled again.
        (lambda: small("train_step", 1, COMPILING), f"train_step, as it was compiled: (?!.*temporaries of).*{STATE}"),
        (lambda: small("train_step", 3, OF_A_CPU), f"after step 2 of epoch 0: .*{STATE}"),
        (lambda: small("eval_step", 1), f"in eval_step, in its first call: .*{STATE}"),
        (lambda: small("create", 1), f"in making the state of step 0: .*{STATE}"),
    ],
)
def test_the_place_and_the_parts_on_one_device_are_named(make, words) -> None:
    assert re.search(words, str(error_of(make(), val=random(1))), re.DOTALL)


def test_the_program_with_the_most_temporaries_is_named() -> None:
    # The window's last batch takes what each takes, and the optimizer's update.
    assert "temporaries of train_step " in str(error_of(small("train_step", 2), accumulate_grad_batches=2))


def test_a_hook_without_memory_is_named() -> None:
    heard: list[BaseException] = []
    listens = hooks(on_exception=lambda trainer, module, error: heard.append(error))
    error = error_of("single", hooks(on_train_batch_end=raising(jax.errors.JaxRuntimeError, ALLOCATING)), listens)
    assert "ran out of memory after step 1 of epoch 0: " in str(error) and heard == [error]


def test_a_step_of_ones_own_loop_says_it_as_well() -> None:
    (batch,) = random(1)
    state, step = jl.compile_step(Linear(), batch=batch, strategy=small("train_step", 1))
    with pytest.raises(OutOfMemoryError, match=r"memory in step\(state, batch\): "):
        step(state, batch)
