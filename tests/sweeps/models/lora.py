"""Fine-tuning by nnx.LoRA: the weights are frozen, and only additions of a low rank are trained."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, normal_rows, rows


class LoRA(Shared):
    """A perceptron with an addition of rank 2 to each layer."""

    wrt = nnx.LoRAParam

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.LoRALinear(6, 8, lora_rank=2, rngs=rngs)
        self.out = nnx.LoRA(8, 2, 1, base_module=nnx.Linear(8, 1, rngs=rngs), rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.out(jnp.tanh(self.hidden(batch["x"])))[:, 0] - batch["y"]
        return (errors**2).mean(), {"error": jnp.abs(errors).mean()}


CASES = [Case("LoRA", LoRA, rows(TWENTY, lambda rng, size: normal_rows(rng, size, features=6)))]
