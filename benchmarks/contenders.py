"""Ways to train one perceptron, each of which takes a number of steps when it is its turn.

All gather their batches in a random order, from arrays of one size; Keras and Lightning, of which a turn is an epoch,
from those of one turn. A `fit` runs in a thread of its own and pauses every
so many steps, so that all of them take turns in one process, and meet the same load of the machine.
"""

import contextlib
import importlib.util
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from benchmarks.perceptron import Perceptron

LOG_EVERY = 50
BARE: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class Task(NamedTuple):
    """What is trained, and how long."""

    make: Callable[[], Any]  # the module: it has `loss(batch)` and `configure_optimizers()`
    width: int
    depth: int
    rows: int  # of a batch
    steps: int  # of a turn
    turns: int

    def arrays(self, turns: int) -> dict[str, np.ndarray]:
        """Return arrays for so many turns, whose rows overlap in memory: gathering copies them."""
        count = self.rows * self.steps * turns
        rng, rows = np.random.default_rng(0), np.lib.stride_tricks.sliding_window_view
        return {k: rows(rng.normal(size=count + self.width - 1).astype(np.float32), self.width) for k in "xy"}


class Calls:
    """Counts the calls of Python and of C functions of one thread."""

    def __init__(self) -> None:
        self.python, self.c = Counter[str](), 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.python[frame.f_code.co_qualname] += 1
        self.c += event == "c_call"


class Turns:
    """A function that trains to its end, and calls `pause` before the first turn and after each.

    Args:
        train: The function, given this object.
    """

    def __init__(self, train: Callable[["Turns"], None]) -> None:
        self._go, self._paused, self.profile = threading.Semaphore(0), threading.Semaphore(0), None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
        self._thread.start()
        self._wait()  # it has compiled nothing, or its first turn is over

    def _run(self, train: Callable[["Turns"], None]) -> None:
        try:
            train(self)
        except BaseException as error:
            self.error = error
        self._paused.release()

    def _wait(self) -> None:
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def pause(self) -> None:
        """Wait for the next turn, in the thread that trains."""
        sys.setprofile(None)
        self._paused.release()
        self._go.acquire()
        sys.setprofile(self.profile)

    def __call__(self, profile: Any = None) -> None:
        """Take a turn."""
        self.profile = profile
        self._go.release()
        self._wait()


def flat_step(model: Any) -> tuple[Callable[[list[Any], Any], tuple[list[Any], jax.Array]], list[Any]]:
    """Return a flat jit of a step, which donates its state, and that state."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = model.configure_optimizers()
    leaves, treedef = jax.tree.flatten((params, tx.init(params)))

    def update(leaves: list[Any], batch: Any) -> tuple[list[Any], jax.Array]:
        params, opt_state = jax.tree.unflatten(treedef, leaves)
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p, rest).loss(batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), opt_state)), loss

    return jax.jit(update, donate_argnums=0), leaves


def gathered(task: Task) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of all turns, gathered in a random order from arrays as large as those of a `fit`."""
    arrays = task.arrays(task.turns + 1)
    order = np.random.default_rng(0).permutation(len(arrays["x"]))
    for i in range(0, len(order), task.rows):
        index = order[i : i + task.rows]
        yield {k: x[index] for k, x in arrays.items()}


def by_hand(task: Task) -> Callable[[Any], None]:
    """Return a turn of a loop around a flat jit that donates its state."""
    batches = gathered(task)
    step, leaves = flat_step(task.make())
    place: Any = None
    if jax.device_count() > 1:
        mesh = jax.make_mesh((jax.device_count(),), ("data",))
        place = jax.sharding.NamedSharding(mesh, jax.P("data"))
        leaves = jax.device_put(leaves, jax.sharding.NamedSharding(mesh, jax.P()))

    def turn(profile: Any = None) -> None:
        nonlocal leaves
        sys.setprofile(profile)
        loss = pending = None
        for i, batch in enumerate(itertools.islice(batches, task.steps)):
            leaves, loss = step(leaves, batch if place is None else jax.device_put(batch, place))
            if pending is not None:
                float(pending)
                pending = None
            if (i + 1) % LOG_EVERY == 0:
                pending = loss
        sys.setprofile(None)
        jax.block_until_ready(loss)

    return turn


def by_nnx(task: Task, cached: bool) -> Callable[[Any], None]:
    """Return a turn of a loop around `nnx.jit`, or around `nnx.cached_partial` of it."""
    model, batches = task.make(), gathered(task)
    optimizer = nnx.Optimizer(model, model.configure_optimizers(), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda model: model.loss(batch))(model)
        optimizer.update(model, grads)
        return loss

    take = nnx.cached_partial(step, model, optimizer) if cached else lambda batch: step(model, optimizer, batch)

    def turn(profile: Any = None) -> None:
        sys.setprofile(profile)
        loss = None
        for i, batch in enumerate(itertools.islice(batches, task.steps)):
            loss = take(batch)
            if (i + 1) % LOG_EVERY == 0:
                float(loss)
        sys.setprofile(None)
        jax.block_until_ready(loss)

    return turn


def by_fit(task: Task, *callbacks: jl.Callback, **arguments: Any) -> Callable[[Any], None]:
    """Return a turn of `Trainer.fit` inside one long epoch."""

    class Pauses(jl.Callback):
        def due_in(self, step: int) -> int:
            return task.steps - step % task.steps

        def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
            if not (epoch_over or training_over):
                jax.block_until_ready(trainer.state.params)
                turns.pause()

    def train(self: Turns) -> None:
        nonlocal turns
        turns = self
        loader = jl.ArrayLoader(task.arrays(task.turns + 1), task.rows, shuffle=True)
        given = {"strategy": "single", "max_epochs": 1, "compile_cache": False} | arguments
        jl.Trainer(callbacks=[*callbacks, Pauses()], **given).fit(task.make(), loader)

    turns: Any = None
    return Turns(train)


def by_hand_evaluation(task: Task, predicts: bool) -> Callable[[Any], None]:
    """Return a turn of a loop over the rows in order, which adds up losses, or keeps the outputs."""
    model, arrays = task.make(), {k: np.ascontiguousarray(x) for k, x in task.arrays(1).items()}
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    merge = lambda leaves: nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))  # noqa: E731
    validate = jax.jit(lambda leaves, total, batch: total + merge(leaves).loss(batch))
    predict = jax.jit(lambda leaves, batch: merge(leaves).predict_step(batch))

    def turn(profile: Any = None) -> None:
        sys.setprofile(profile)
        total, waiting, outputs = jax.numpy.zeros(()), None, []
        for i in range(task.steps):
            batch = {k: x[i * task.rows : (i + 1) * task.rows].copy() for k, x in arrays.items()}
            if predicts:
                now = predict(leaves, batch)
                outputs += [np.asarray(waiting)] if waiting is not None else []
                waiting = now
            else:
                total = validate(leaves, total, batch)
                if i % 16 == 15:
                    total.block_until_ready()
        float(total if waiting is None else waiting.sum())
        sys.setprofile(None)

    return turn


def by_evaluation(task: Task, predicts: bool) -> Callable[[Any], None]:
    """Return a turn that is an entire call of `Trainer.validate` or `Trainer.predict`."""
    arrays = {k: np.ascontiguousarray(x) for k, x in task.arrays(1).items()}
    model, loader = task.make(), jl.ArrayLoader(arrays, task.rows)
    trainer = jl.Trainer(strategy="single", compile_cache=False, **BARE)

    def turn(profile: Any = None) -> None:
        sys.setprofile(profile)
        trainer.predict(model, loader) if predicts else trainer.validate(model, loader, verbose=False)
        sys.setprofile(None)

    return turn


def by_keras(task: Task, steps_per_execution: int) -> Callable[[Any], None]:
    """Return a turn of Keras' `fit` on jax, which is an epoch."""
    os.environ["KERAS_BACKEND"] = "jax"
    import keras

    class Pauses(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            turns.pause()

    def train(self: Turns) -> None:
        nonlocal turns
        turns = self
        model = keras.Sequential(
            [keras.Input((task.width,))]
            + [keras.layers.Dense(task.width, activation="relu") for _ in range(task.depth)]
        )
        model.compile(keras.optimizers.AdamW(1e-3), "mse", steps_per_execution=steps_per_execution)
        arrays = {k: np.ascontiguousarray(x) for k, x in task.arrays(1).items()}
        model.fit(
            *(arrays["x"], arrays["y"]),
            batch_size=task.rows,
            epochs=task.turns + 1,
            verbose=0,
            callbacks=[Pauses()],
        )

    turns: Any = None
    return Turns(train)


def by_lightning(task: Task) -> Callable[[Any], None]:
    """Return a turn of Lightning's `fit` on the CPU, which is an epoch; logger, bar and checkpoints are off."""
    import lightning
    import torch

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [(torch.nn.Linear(task.width, task.width), torch.nn.ReLU()) for _ in range(task.depth)]
            self.layers = torch.nn.Sequential(*[part for pair in layers for part in pair])

        def training_step(self, batch: Any) -> Any:
            return ((self.layers(batch[0]) - batch[1]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-3)

        def on_train_epoch_start(self) -> None:
            turns.pause()

    def train(self: Turns) -> None:
        nonlocal turns
        turns = self
        data = torch.utils.data.TensorDataset(*[torch.tensor(x.copy()) for x in task.arrays(1).values()])
        loader = torch.utils.data.DataLoader(data, task.rows, shuffle=True)
        lightning.Trainer(accelerator="cpu", max_epochs=task.turns + 1, **BARE).fit(Model(), loader)

    turns: Any = None
    return Turns(train)


CONTENDERS: dict[str, Callable[[Task], Callable[[Any], None]]] = {
    "hand-written": by_hand,
    "jaxlit, default": by_fit,
    "jaxlit, stripped": lambda task: by_fit(task, **BARE),
    "jaxlit, k=10": lambda task: by_fit(task, steps_per_execution=10),
    "jaxlit, k=32": lambda task: by_fit(task, steps_per_execution=32),
    "nnx.jit": lambda task: by_nnx(task, False),
    "nnx.cached_partial": lambda task: by_nnx(task, True),
    "Keras": lambda task: by_keras(task, 1),
    "Keras, 32 steps": lambda task: by_keras(task, 32),
    "Lightning, torch": by_lightning,
}


def installed(name: str) -> bool:
    """Return whether what a contender needs is installed."""
    package = {"Keras": "keras", "Lightning": "lightning"}.get(name.split(",")[0])
    return package is None or importlib.util.find_spec(package) is not None


def perceptron(width: int, depth: int) -> Callable[[], Any]:
    """Return what makes the module."""
    return lambda: Perceptron(width, depth, rngs=nnx.Rngs(0))


@contextlib.contextmanager
def quiet() -> Any:
    """Keep bars and summaries of contenders off the terminal."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield
