"""The engine's promises: one compile, one trace, everything donated, nothing read, nothing unbounded."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(jl.TrainModule):
    traces = 0

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(16, 1, rngs=rngs)

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = self.dropout(nnx.relu(self.norm(self.hidden(batch["x"]))))
        return jnp.mean((self.out(x) - batch["y"]) ** 2)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        Net.traces += 1
        loss = self.loss(batch)
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def loader(rows: int, batch_size: int = 16) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(rows, d)).astype(np.float32) for d in (8, 1))
    return jl.ArrayLoader({"x": x, "y": y}, batch_size)


@contextlib.contextmanager
def compiles() -> Iterator[Counter]:
    """Count what is compiled inside the block, by the name of the function."""
    found: Counter = Counter()

    def listen(event: str, seconds: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found[details.get("fun_name")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """Record every read of an array's value; complete on arrays of two devices or more."""
    cls, seen, saved = type(jnp.zeros(())), [], {}
    value = saved["_value"] = cls.__dict__["_value"]
    cls._value = property(lambda self: (seen.append("_value"), value.fget(self))[1])
    for name in ("__array__", "__dlpack__", "__buffer__"):
        if name in cls.__dict__:
            old = saved[name] = cls.__dict__[name]
            setattr(cls, name, lambda self, *a, _old=old, _n=name, **k: (seen.append(_n), _old(self, *a, **k))[1])
    try:
        yield seen
    finally:
        for name, old in saved.items():
            setattr(cls, name, old)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_kind_of_step_compiles_once_and_once_more_for_a_tail(strategy: str) -> None:
    with compiles() as found:
        trainer = jl.Trainer(strategy=strategy, max_epochs=3, accumulate_grad_batches=2, **QUIET)
        trainer.fit(Net(rngs=nnx.Rngs(0)), loader(71), loader(71))
    # 71 rows are 4 full batches and one of 7: two windows of two, and a window of the tail alone.
    assert {k: v for k, v in found.items() if "step" in str(k)} == {
        "jit(micro_step)": 1,
        "jit(train_step)": 2,
        "jit(eval_step)": 2,
    }


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ("single", "ddp", "fsdp", "zero1", "shard_map"))
def test_training_step_is_traced_once(strategy: str) -> None:
    Net.traces = 0
    trainer = jl.Trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=2, **QUIET)
    trainer.fit(Net(rngs=nnx.Rngs(0)), loader(64))
    # Where replicas split the rows it is traced with twice as many too, to see what depends on their number.
    assert Net.traces == (2 if strategy == "shard_map" else 1)


class Donated(jl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.before = list(trainer._session.engine.state.leaves)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.kept = [i for i, x in enumerate(self.before) if not x.is_deleted()]


@pytest.mark.smoke
@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_donates_the_whole_state(strategy: str, accumulate: int) -> None:
    donated = Donated()
    trainer = jl.Trainer(
        strategy=strategy, max_epochs=1, callbacks=[donated], accumulate_grad_batches=accumulate, **QUIET
    )
    trainer.fit(Net(rngs=nnx.Rngs(0)), loader(64))
    assert donated.kept == []


class CountReads(jl.Callback):
    """Notes how many reads each batch of an epoch had made by its end."""

    def __init__(self, seen: list[str]) -> None:
        self.seen, self.at = seen, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at.append(len(self.seen))


@pytest.mark.parametrize("strategy", ("ddp", "fsdp", "shard_map", "pmap"))
def test_no_array_is_read_between_log_points(strategy: str) -> None:
    with reads() as seen:
        count = CountReads(seen)
        trainer = jl.Trainer(strategy=strategy, max_epochs=1, log_every_n_steps=10, callbacks=[count], **QUIET)
        trainer.fit(Net(rngs=nnx.Rngs(0)), loader(30 * 16))
    new = [batch for batch in range(1, 30) if count.at[batch] != count.at[batch - 1]]
    # A row is due after batches 9, 19 and 29 and read one step late: before the end of 11 and 21 is noted.
    assert new == [11, 21]


def test_the_counter_of_reads_sees_a_read() -> None:
    array = jax.device_put(np.ones(8), jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",)), jax.P()))
    with reads() as seen:
        float(array.sum())
    assert seen


@pytest.mark.parametrize("strategy", ("ddp", "shard_map", "pmap"))
def test_3000_steps_on_8_devices_survive(strategy: str) -> None:
    trainer = jl.Trainer(strategy=strategy, max_steps=3000, log_every_n_steps=0, **QUIET)
    trainer.fit(Net(rngs=nnx.Rngs(0)), loader(100 * 16))
    assert int(trainer.state.step) == trainer.global_step == 3000


def test_steps_in_flight_are_bounded() -> None:
    from jaxlit.loop.train import Bound

    class Token:
        def __init__(self) -> None:
            self.waited = False

        def block_until_ready(self) -> None:
            self.waited = True

    for limit in (1, 2, 3, 4, 32):
        bound, tokens = Bound(limit), []
        for _ in range(200):
            tokens.append(Token())
            bound(tokens[-1])
            # Steps run in order, so all before a step that was waited for are done.
            done = max((i + 1 for i, t in enumerate(tokens) if t.waited), default=0)
            assert len(tokens) - done <= max(limit, 1)


def hlo_of(strategy: str, accumulate: int) -> dict[str, str]:
    """Return the compiled text of each training program."""
    texts = {}

    class Look(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            engine = trainer._session.engine
            for name in ("train_step", "micro_step"):
                if name in engine._programs and name not in texts:
                    program = engine._programs[name].split
                    texts[name] = (
                        program.lower(engine.state.leaves, engine.strategy.shard_batch(batch)).compile().as_text()
                    )

    class Plain(Net):
        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            loss = jnp.mean((self.out(nnx.relu(self.hidden(batch["x"]))) - batch["y"]) ** 2)
            self.log("train/loss", loss, on_epoch=True)
            return loss

    trainer = jl.Trainer(
        strategy=strategy, max_epochs=1, callbacks=[Look()], accumulate_grad_batches=accumulate, **QUIET
    )
    trainer.fit(Plain(rngs=nnx.Rngs(0)), loader(64))
    return texts


@pytest.mark.parametrize("strategy", ("shard_map", "pmap"))
def test_replicas_reduce_once_an_optimizer_step(strategy: str) -> None:
    count = lambda text: len(re.findall(r" all-reduce(?:-start)?\(", text))  # noqa: E731
    texts = hlo_of(strategy, accumulate=4)
    assert count(texts["micro_step"]) == 0
    assert count(texts["train_step"]) == 1
    assert count(hlo_of(strategy, accumulate=1)["train_step"]) == 1


def test_the_callers_arrays_share_no_buffer_with_the_state() -> None:
    module = Net(rngs=nnx.Rngs(0))
    held = jax.tree.leaves(nnx.as_pure(nnx.state(module, nnx.Param)))
    copies = [np.array(x) for x in held]
    jl.Trainer(strategy="single", max_epochs=1, **QUIET).fit(module, loader(64))
    for x, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(np.asarray(x), copy)


def test_an_optimizer_that_keeps_the_parameters_themselves_is_donated() -> None:
    class Slow(Net):
        def configure_optimizers(self) -> optax.GradientTransformation:
            keep = optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, params))
            return optax.chain(optax.sgd(0.1), keep)

    trainer = jl.Trainer(strategy="single", max_epochs=1, **QUIET)
    trainer.fit(Slow(rngs=nnx.Rngs(0)), loader(64))
    assert trainer.global_step == 4
