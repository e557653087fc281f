"""Functions are called as the hooks that they are given as, and others are refused."""

from typing import Any

import jax
import jax.numpy as jnp
from kit.batches import random
from kit.modules import Linear
from kit.trainers import BARE, fit

from jaxlit.callbacks import LambdaCallback


def test_each_function_is_called_as_its_hook_and_arrays_are_kept() -> None:
    seen: list[Any] = []
    callback = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
        init_arrays=lambda params: jnp.zeros((), jnp.int32),
        update_arrays=lambda arrays, params, grads, global_step: (arrays + 1, jax.tree.map(jnp.zeros_like, params)),
        state_dict=lambda: {"seen": len(seen)},
        on_fit_end=lambda trainer, module: seen.append(float(module.kernel[...].sum())),
    )
    trainer = fit(Linear(), random(2), None, callback, **BARE)
    assert seen == ["fit", 0, 1, 0.0] and int(trainer.callback_arrays(callback)) == 2
