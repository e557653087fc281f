"""What a fit holds in memory, and what is left of it."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import BARE

import jaxlit as jl

SIDE = 67  # no other test has arrays of its square
BATCHES = [np.ones((4, SIDE), np.float32)] * 3


class Square(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones((SIDE, SIDE)))

    def training_step(self, batch):
        loss = jnp.mean((batch @ self.w) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return optax.sgd(1e-3)


class Copies(jl.Callback):
    def __init__(self) -> None:
        self.seen = list[int]()

    def look(self) -> None:
        gc.collect()
        self.seen.append(sum(x.size == SIDE**2 for x in jax.live_arrays()))

    def on_fit_start(self, trainer, module):
        self.look()

    def on_train_end(self, trainer, module):
        module.w  # noqa: B018 - the module takes the trained arrays
        self.look()


def left_by(num_fits: int, **given) -> tuple[list[type], int]:
    """Return the types of the objects, arrays among them, and the number of programs that fits have left."""
    for i in range(num_fits + 3):  # the first ones fill caches
        if i == 3:
            gc.collect()
            before, programs = {id(x) for x in gc.get_objects()}, len(jax.devices()[0].client.live_executables())
        jl.Trainer(max_epochs=1, **given).fit(Square(), BATCHES)
    gc.collect()
    left = [type(x) for x in gc.get_objects() if id(x) not in before and x is not before]
    return left, len(jax.devices()[0].client.live_executables()) - programs


@pytest.mark.full
def test_fits_leave_no_objects_and_no_programs() -> None:
    objects, programs = left_by(20, **BARE)
    assert len(objects) < 20, objects  # not one a fit; some are left once, as by a context that is changed
    assert programs == 0


@pytest.mark.full
def test_fits_with_files_leave_no_objects_of_jax_or_jaxlit() -> None:
    """A library that writes checkpoints leaves lists of its metrics, a few KiB a fit."""
    objects, programs = left_by(3)
    ours = [x.__name__ for x in objects if x.__module__.split(".")[0] in ("jaxlit", "jax", "jaxlib", "flax")]
    assert len(ours) < 3, ours  # not one a fit
    assert programs == 0


@pytest.mark.full
@pytest.mark.parametrize(("model", "expected"), [(Square, [2, 1, 2, 1]), (lambda: jl.lazy(Square), [1, 1])])
def test_fit_begins_with_two_copies_unless_lazy(model, expected) -> None:
    """A second fit frees the arrays of the first."""
    copies, module = Copies(), model()
    trainer = jl.Trainer(max_epochs=1, callbacks=[copies], **BARE)
    for _ in expected[::2]:
        trainer.fit(module, BATCHES)
    assert copies.seen == expected
