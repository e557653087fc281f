"""State that counts and sums over the rows of batches, and metrics that a module holds."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sweeps.models.case import FEW, Batch, Case, Logs, Shared, normal_rows, rows


class Line(Shared):
    """A linear model that counts in `count`; subclasses say what."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def count(self, batch: Batch, errors: jax.Array) -> None:
        """Write to what is held."""

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.linear(batch["x"])[:, 0] - batch["y"]
        self.count(batch, errors)
        return (errors**2).mean(), {}


class Tokens(Line):
    """Sums floats over the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nnx.Variable(jnp.zeros(()))

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.tokens[...] += (batch["x"] > 0).sum()


class Rows(Line):
    """Adds up the static number of rows, an int that no value of the batch enters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32))

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.rows[...] += batch["x"].shape[0]


class Positives(Rows):
    """Counts rows by their values, in an int."""

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.rows[...] += (batch["y"] > 0).sum()


class Steps(Rows):
    """Counts the steps."""

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.rows[...] += 1


class Moments(Line):
    """Holds the statistics of its errors."""

    def __init__(self) -> None:
        super().__init__()
        self.moments = nnx.metrics.Welford()

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.moments.update(values=errors)


class Held(Line):
    """Holds an average and an accuracy over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nnx.metrics.Average("values")
        self.accuracy = nnx.metrics.Accuracy()

    def count(self, batch: Batch, errors: jax.Array) -> None:
        logits, labels = self.classes(batch, errors)
        self.average.update(values=jnp.abs(errors))  # a total without cancellation
        self.accuracy.update(logits=logits, labels=labels)

    def classes(self, batch: Batch, errors: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the logits of a guess at the sign of y, (rows, 2), and the true class."""
        guess = errors + batch["y"]
        return jnp.stack([jnp.zeros_like(guess), guess], 1), (batch["y"] > 0).astype(jnp.int32)


class HeldAndReset(Held):
    """The same, reset at the beginning of each step."""

    def count(self, batch: Batch, errors: jax.Array) -> None:
        self.average.reset()
        self.accuracy.reset()
        super().count(batch, errors)


class HeldAndLogged(Held):
    """The same, logged in the step: each row has the step's own share, and what is held stays as it came."""

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.linear(batch["x"])[:, 0] - batch["y"]
        logits, labels = self.classes(batch, errors)
        right = (logits.argmax(1) == labels).mean()
        return (errors**2).mean(), {"average": jnp.abs(errors).mean(), "accuracy": right}

    def training_step(self, batch: Batch) -> dict[str, jax.Array]:
        errors = self.linear(batch["x"])[:, 0] - batch["y"]
        self.count(batch, errors)
        self.log("average", self.average)
        self.log("accuracy", self.accuracy)
        return {"loss": (errors**2).mean()}


class Codebook(Shared):
    """Quantises a code to the nearest of 4 vectors, which follow what falls to them by moving averages."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.encoder, self.decoder = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 3, rngs=rngs)
        vectors = jax.random.normal(rngs.params(), (4, 2))
        self.counts, self.totals = nnx.Variable(jnp.ones(4)), nnx.Variable(vectors)
        self.vectors = nnx.Variable(jnp.array(vectors))

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        code = self.encoder(batch["x"])  # (rows, 2)
        distances = ((code[:, None] - self.vectors[...]) ** 2).sum(-1)
        chosen = jax.nn.one_hot(distances.argmin(1), 4)
        nearest = chosen @ self.vectors[...]
        through = code + jax.lax.stop_gradient(nearest - code)
        rebuilt = ((self.decoder(through) - batch["x"]) ** 2).mean()
        committed = ((code - jax.lax.stop_gradient(nearest)) ** 2).mean()
        follow = jax.lax.stop_gradient(code)
        self.counts[...] = 0.9 * self.counts[...] + 0.1 * chosen.sum(0)
        self.totals[...] = 0.9 * self.totals[...] + 0.1 * chosen.T @ follow
        self.vectors[...] = self.totals[...] / self.counts[...][:, None]
        return rebuilt + 0.25 * committed, {"rebuilt": rebuilt}


class Masked(Line):
    """Logs a mean over the valid rows, of which there may be none."""

    epochs = True

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = (self.linear(batch["x"])[:, 0] - batch["y"]) ** 2
        valid = batch["valid"]
        # A metric of the data alone, so that its truth needs no training.
        size = (batch["x"] ** 2).sum(1)
        return errors.mean(), {"size": ((size * valid).sum() / valid.sum(), valid.sum())}


def masked_rows(rng: np.random.Generator, size: int) -> Batch:
    """Return 8 rows of which the first `size` are valid."""
    return {**normal_rows(rng, 8), "valid": (np.arange(8) < size).astype(np.float32)}


def mean_size(batches: list[Batch]) -> dict[str, float]:
    """Return the metric of `Masked` over the epoch."""
    joined = {k: np.concatenate([b[k] for b in batches]).astype(np.float64) for k in ("x", "valid")}
    size = (joined["x"] ** 2).sum(1)
    return {"size": float((size * joined["valid"]).sum() / joined["valid"].sum())}


BATCHES = rows(FEW, normal_rows)
CASES = [
    Case("float count of tokens", Tokens, BATCHES),
    Case("int count of rows", Rows, BATCHES),
    Case("int count of positive rows", Positives, BATCHES),
    Case("int count of steps", Steps, BATCHES),
    Case("Welford held", Moments, BATCHES),
    Case("Average and Accuracy held", Held, BATCHES),
    Case("Average and Accuracy reset in each step", HeldAndReset, BATCHES),
    Case("Average and Accuracy logged", HeldAndLogged, BATCHES),
    Case("codebook by moving averages", Codebook, BATCHES),
    Case("metric of weight 0", Masked, rows((8, 2, 0), masked_rows), epoch=mean_size),
    Case("metric of weight 0 at first", Masked, rows((0, 8, 2), masked_rows), epoch=mean_size),
]
