"""A device without memory left is told in one error, with what has taken it."""

import re
from typing import Any

import jax
import pytest
from kit.batches import random
from kit.inside import lowered
from kit.journal import hooks, raising
from kit.modules import Linear
from kit.pages import DOCS
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.errors import OutOfMemoryError
from jaxlit.strategies import FSDP, SingleDevice
from jaxlit.texts import size

ALLOCATING = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nMore of jax's own."
OF_A_CPU = "INTERNAL: Error dispatching computation: INTERNAL: Out of memory allocating 17179869184 bytes."
COMPILING = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm."
STATE = r"parameters 16 B, optimizer 16 B"  # a 3 x 1 kernel and a bias in float32, and their momenta
REMEDIES = ("accumulate_grad_batches", "fsdp", "zero1", "remat", "bf16-mixed", "bf16-true")


class Exhausted:
    """A compiled function that finds no memory in one of its calls."""

    def __init__(self, run: Any, at: int, words: str) -> None:
        self.run, self.left, self.words, self.trace = run, at, words, run.trace

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise jax.errors.JaxRuntimeError(self.words)
        return self.run(*args)


def small(name: str, at: int, words: str = ALLOCATING, base: type = SingleDevice, **arguments: Any) -> Any:
    """Return a strategy on whose devices a program finds no memory in one of its calls."""

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


def test_parts_are_those_of_one_device_where_they_are_split() -> None:
    told = str(error_of(small("train_step", 1, base=FSDP, min_size=0)))
    # Three rows of a kernel do not divide into eight; 128 bytes of the batch do.
    assert "parameters 16 B, optimizer 16 B, batch 16 B, temporaries of train_step " in told


def test_the_program_with_the_most_temporaries_is_named() -> None:
    # The window's last batch takes what each takes, and the optimizer's update.
    assert "temporaries of train_step " in str(error_of(small("train_step", 2), accumulate_grad_batches=2))


def test_what_cannot_be_compiled_is_not_compiled_again() -> None:
    told = str(error_of(small("train_step", 1, COMPILING)))
    assert "in train_step, as it was compiled: " in told and "temporaries of" not in told and STATE in told


@pytest.mark.parametrize(
    ("strategy", "place"),
    [
        (lambda: small("train_step", 3, OF_A_CPU), "after step 2 of epoch 0"),
        (lambda: small("eval_step", 1), "in eval_step, in its first call"),
        (lambda: small("create", 1), "in making the state of step 0"),
    ],
)
def test_any_other_place_is_named(strategy, place) -> None:
    told = str(error_of(strategy(), val=random(1)))
    assert f"ran out of memory {place}: " in told and STATE in told


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
