"""Training equals a loop written by hand in plain jax: losses, metrics, gradients, parameters, statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.core.replica import Replica
from jaxlit.errors import ArgumentError
from jaxlit.leaf_names import leaf_name
from jaxlit.testing import KeepFirstGrads, Training, keep_first_grads, train

STEPS, ROWS = 20, 32
GLOBAL = ("single", "ddp", "fsdp", "sharded", "zero1")


class Net(jl.TrainModule):
    """BatchNorm, dropout and a loss that couples the rows of a batch."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(12, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def losses(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        embed = lambda x: self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))  # noqa: E731
        a, b = embed(batch["x"]), embed(batch["y"])
        logits = a @ b.T / 4
        own = jnp.arange(len(logits))
        return optax.softmax_cross_entropy_with_integer_labels(logits, own).mean(), (a**2).mean()

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        contrast, size = self.losses(batch)
        self.log_dict({"contrast": contrast, "size": size})
        return contrast + 0.1 * size

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


def loader(rows: int = 5 * ROWS) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    return jl.ArrayLoader({k: rng.normal(size=(rows, 12)).astype(np.float32) for k in ("x", "y")}, ROWS)


def by_hand(model: Any, batches: list[Any], tx: optax.GradientTransformation) -> Training:
    """Train without jaxlit: a module merged inside jax.jit, and optax."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            module = nnx.merge(graphdef, params, rest, copy=True)
            contrast, size = module.losses(batch)
            _, _, new_rest = nnx.split(module, nnx.Param, ...)
            return contrast + 0.1 * size, (nnx.as_pure(new_rest), contrast, size)

        (loss, (rest_, contrast, size)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest_, opt_state, grads, loss, contrast, size

    kept = Training("by hand")
    for i, batch in enumerate(batches):
        params, rest, opt_state, grads, loss, contrast, size = step(params, rest, opt_state, batch)
        if i == 0:
            kept.grads = flat(grads)
        kept.loss.append(float(loss))
        kept.metrics.append({"contrast": float(contrast), "size": float(size)})
    kept.params = flat(params) | flat({"norm": {k: rest["norm"][k] for k in ("mean", "var")}})
    return kept


def flat(tree: Any) -> dict[str, np.ndarray]:
    return {leaf_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def reference() -> Training:
    batches = [batch for _ in range(4) for batch in loader()]
    return by_hand(Net(rngs=nnx.Rngs(0)), batches, optax.adamw(1e-2, eps=1e-3))


@pytest.fixture(scope="module", params=GLOBAL)
def training(request: pytest.FixtureRequest) -> Training:
    strategy = jl.strategies.FSDP(min_size=0) if request.param == "sharded" else request.param
    devices = "auto" if request.param == "single" else 8
    return train(lambda: Net(rngs=nnx.Rngs(0)), loader(), strategy=strategy, devices=devices, steps=STEPS)


def test_losses_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    assert len(training.loss) == STEPS
    np.testing.assert_allclose(training.loss, reference.loss, rtol=1e-5)


def test_logged_metrics_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    for name in ("contrast", "size"):
        expected = [row[name] for row in reference.metrics]
        np.testing.assert_allclose([row[name] for row in training.metrics], expected, rtol=1e-5)


def test_first_gradients_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    assert training.grads.keys() == reference.grads.keys()
    largest = max(np.abs(g).max() for g in reference.grads.values())
    for name, expected in reference.grads.items():
        np.testing.assert_allclose(training.grads[name], expected, rtol=1e-5, atol=1e-5 * largest)


def test_parameters_and_statistics_equal_those_of_the_hand_written_loop(
    training: Training, reference: Training
) -> None:
    got = training.params
    assert reference.params.keys() <= got.keys()
    largest = max(np.abs(p).max() for p in reference.params.values())
    for name, expected in reference.params.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5 * largest)


class Rows(jl.TrainModule):
    """A loss that is a mean over rows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(12, 16, rngs=rngs)
        self.out = nnx.Linear(16, 12, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((self.out(nnx.tanh(self.hidden(batch["x"]))) - batch["y"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


@pytest.mark.parametrize("strategy", ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8"))
def test_accumulated_windows_equal_one_batch_of_all_their_rows(strategy: str) -> None:
    # 5 batches of 32 and one of 13 are windows of 96 and 77 rows.
    data = loader(5 * 32 + 13)
    graphdef, params = nnx.split(Rows(rngs=nnx.Rngs(0)))
    params, tx = nnx.as_pure(params), optax.adamw(1e-2, eps=1e-3)
    opt_state = tx.init(params)
    for _ in range(3):
        for rows in (slice(0, 96), slice(96, 173)):
            batch = {k: x[rows] for k, x in data.arrays.items()}
            grads = jax.grad(lambda p, b=batch: nnx.merge(graphdef, p).training_step(b))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
    got = train(
        lambda: Rows(rngs=nnx.Rngs(0)),
        data,
        strategy=strategy,
        steps=6,
        accumulate_grad_batches=3,
    )
    for name, expected in flat(params).items():
        np.testing.assert_allclose(got.params[name], expected, rtol=1e-5, atol=1e-6)


def test_the_kit_names_the_strategy_that_is_wrong() -> None:
    class Doubled(jl.strategies.DDP):
        def constrain_grads(self, grads: Any) -> Any:
            return jax.tree.map(lambda g: 2 * g, grads)

        def __str__(self) -> str:
            return "doubled"

    with pytest.raises(AssertionError, match="grads .* and doubled on 2 differ"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp", Doubled()], devices=(2,), compare=("grads",)
        )


class Forgetful(Replica):
    """Keeps the gradients of a replica to itself."""

    def pmean(self, tree: Any) -> Any:
        return tree


def make_forgetful(made: jl.strategies.PerReplica) -> jl.strategies.PerReplica:
    cls: Any = type(made)
    forgets = property(lambda self: Forgetful(**vars(cls.replica.fget(self))))
    made.__class__ = type("Forgets", (cls,), {"replica": forgets, "__str__": lambda self: "forgetful"})
    return made


@pytest.mark.parametrize("strategy", [jl.strategies.ShardMapDDP, jl.strategies.PMap, jl.strategies.Simulated])
def test_the_kit_says_of_a_strategy_that_forgets_its_mean_that_the_gradient_is_another(strategy: Any) -> None:
    with pytest.raises(AssertionError, match="the gradient of the first step under single on auto and forgetful on 2"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)),
            loader(),
            strategies=[make_forgetful(strategy())],
            devices=(2,),
            compare=("grads",),
        )


class Tailed(Rows):
    """Counts its rows, its batches and those of an odd number of rows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.counts = nnx.Variable(jnp.zeros(3, jnp.int32))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        rows = len(batch["x"])
        self.counts[...] += jnp.array([rows, 1, rows % 2])
        return super().training_step(batch)


def train_rows(module: Any, batches: list[Any]) -> list[jax.Array]:
    """Train `Rows` as anyone would: nnx and optax, no Trainer."""
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda module: module.training_step(batch))(module)
        optimizer.update(module, grads)
        return loss

    return [step(module, optimizer, batch) for batch in batches]


def test_the_kit_compares_with_a_loop_of_the_users_own_on_batches_with_a_tail() -> None:
    sizes = []

    def reference(module: Any, batches: list[Any]) -> list[jax.Array]:
        sizes.extend(len(batch["x"]) for batch in batches)
        return train_rows(module, batches)

    jl.testing.assert_same_training(
        lambda: Tailed(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], devices=(8,), steps=3, reference=reference
    )
    assert sizes == [32, 32, 32, 31]


def test_the_kit_says_that_all_strategies_differ_from_the_users_loop() -> None:
    def reference(module: Any, batches: list[Any]) -> list[jax.Array]:
        losses = train_rows(module, batches)
        module.hidden.kernel[...] *= 1.01
        return losses

    with pytest.raises(AssertionError, match=r"params hidden\.kernel: the reference and single on auto differ"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], devices=(2,), reference=reference
        )


def test_the_kit_compares_whole_numbers() -> None:
    class Miscounting(jl.strategies.DDP):
        def canonical(self, state: Any) -> Any:
            return state

        def __str__(self) -> str:
            return "miscounting"

        def create_state(self, init: Any, shardings: Any, *inputs: Any, donate: bool = False) -> Any:
            leaves = super().create_state(init, shardings, *inputs, donate=donate)
            one_more = lambda x: x + (x.shape == (3,) and x.dtype == jnp.int32)  # noqa: E731
            return jax.tree.map(one_more, leaves)

    with pytest.raises(AssertionError, match=r"params counts: single on auto has \[.*\], miscounting on 2 has"):
        jl.testing.assert_same_training(
            lambda: Tailed(rngs=nnx.Rngs(0)), loader(), strategies=[Miscounting()], devices=(2,)
        )


def test_the_kit_compares_random_models_with_another_strategy_never_with_themselves() -> None:
    class Random(Rows):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)
            self.rngs = rngs.fork()

        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            noise = jax.random.normal(self.rngs.noise(), batch["x"].shape)
            return super().training_step(batch | {"x": batch["x"] + noise})

    make = lambda: Random(rngs=nnx.Rngs(0))  # noqa: E731
    jl.testing.assert_same_training(make, loader(), strategies=["shard_map"], devices=(2,), steps=2)
    with pytest.raises(AssertionError, match="the gradient of the first step under Simulated on 2 and forgetful on 2"):
        jl.testing.assert_same_training(
            make,
            loader(),
            strategies=[make_forgetful(jl.strategies.ShardMapDDP())],
            devices=(2,),
            steps=2,
            compare=("grads",),
        )


def test_the_kit_refuses_to_compare_with_nothing() -> None:
    with pytest.raises(ArgumentError, match="has nothing to compare 'single' with"):
        jl.testing.assert_same_training(lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["single"])


def test_the_kit_refuses_an_unknown_part() -> None:
    with pytest.raises(ValueError, match="compare"):
        jl.testing.assert_same_training(lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], compare=("x",))


def test_the_first_gradients_are_kept_and_later_ones_are_not() -> None:
    tx = keep_first_grads()
    state: KeepFirstGrads = tx.init({"w": jnp.zeros(2)})
    for i in (1.0, 2.0, 3.0):
        updates, state = tx.update({"w": jnp.full(2, i)}, state)
        np.testing.assert_array_equal(updates["w"], [i, i])
    np.testing.assert_array_equal(state.grads["w"], [1.0, 1.0])
