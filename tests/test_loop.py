"""The loops call the hooks as Lightning does, and end as they say."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import JaxlitError, NonFiniteError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
HOOKS = [name for name in vars(jl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


class Linear(jl.TrainModule):
    """Linear regression: small enough to train by hand."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 3)[:, None])
        self.bias = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((batch["x"] @ self.kernel + self.bias - batch["y"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean((batch["x"] @ self.kernel + self.bias - batch["y"]) ** 2))

    def test_step(self, batch: Any) -> None:
        self.log("test", jnp.mean(batch["x"]))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] @ self.kernel

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


def make_batches(count: int, rows: int = 8) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(rows, 3), "y": draw(rows, 1)} for _ in range(count)]


def by_hand(windows: list[list[dict[str, np.ndarray]]], start: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train `Linear` in plain JAX: one optimizer step a window, on the mean over the window's rows."""

    def loss_of(params: dict[str, Any], x: Any, y: Any) -> jax.Array:
        return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)

    params = start or {"kernel": jnp.linspace(-1.0, 1.0, 3)[:, None], "bias": jnp.zeros(1)}
    tx = optax.sgd(0.1, momentum=0.9)
    opt_state = tx.init(params)
    for window in windows:
        x, y = (np.concatenate([batch[key] for batch in window]) for key in ("x", "y"))
        updates, opt_state = tx.update(jax.grad(loss_of)(params, x, y), opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_params(module: Linear, expected: dict[str, Any]) -> None:
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(np.asarray(getattr(module, name)[...]), expected[name], rtol=1e-5, atol=1e-6)


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "strategy": "single",
    }
    return jl.Trainer(callbacks=list(callbacks), **(quiet | arguments))


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


class Recorder(jl.Callback):
    """Writes every hook down as the recorded lines do."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @property
    def names(self) -> list[str]:
        return [line.split()[0] for line in self.lines]

    def note(self, hook: str, trainer: jl.Trainer, *args: Any) -> None:
        words = [hook]
        if hook in ("setup", "teardown"):
            words.append(args[-1])
        elif "batch" in hook:
            held = 1 if hook.endswith("start") else 2  # what comes before the index: the batch, and the outputs
            index, *dataloader = args[1 + held :]
            words += [f"b{index}"] + [f"dl{idx}" for idx in dataloader if idx]
        words += [f"@e{trainer.current_epoch}", f"s{trainer.global_step}"]
        self.lines.append(" ".join(words + ["sanity"] * trainer.sanity_checking))


for _hook in HOOKS:
    if _hook not in ("on_log", "on_safe_point"):
        setattr(Recorder, _hook, lambda self, trainer, *args, hook=_hook: self.note(hook, trainer, *args))


# The order -------------------------------------------------------------------------------------------


def test_each_hook_of_a_callback_comes_just_before_that_of_the_module() -> None:
    called: list[tuple[str, str]] = []

    class Both(Linear):
        pass

    class Early(jl.Callback):
        pass

    hooks = [name for name in HOOKS if name not in ("on_exception", "on_log", "on_trace") and "test" not in name]
    hooks = [name for name in hooks if "predict" not in name and "checkpoint" not in name]
    for name in hooks:
        setattr(Both, name, lambda self, *args, name=name: called.append(("module", name)))
        setattr(Early, name, lambda self, *args, name=name: called.append(("callback", name)))
    make_trainer(Early(), max_epochs=2).fit(Both(), make_batches(2), make_batches(1))
    assert {name for _, name in called} == set(hooks)
    assert [who for who, _ in called] == ["callback", "module"] * (len(called) // 2)
    assert [name for who, name in called if who == "callback"] == [name for who, name in called if who == "module"]


def test_module_hooks_get_the_arguments_without_trainer_and_module() -> None:
    got: dict[str, tuple[Any, ...]] = {}

    class Hooked(Linear):
        def setup(self, stage: str) -> None:
            got["setup"] = (stage,)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            got["end"] = (float(outputs["loss"]), batch, batch_idx)

    batches = make_batches(1)
    make_trainer(max_epochs=1).fit(Hooked(), batches)
    kernel = np.linspace(-1.0, 1.0, 3)[:, None]
    assert got["setup"] == ("fit",)
    assert got["end"][0] == pytest.approx(np.mean((batches[0]["x"] @ kernel - batches[0]["y"]) ** 2), rel=1e-5)
    assert got["end"][1] is batches[0] and got["end"][2] == 0


def test_a_hook_gets_the_host_batch_as_the_loader_gave_it() -> None:
    batches, seen = make_batches(3), []
    keep = make_callback(on_train_batch_end=lambda trainer, module, outputs, batch, i: seen.append(batch))
    make_trainer(keep, strategy="ddp", max_epochs=1).fit(Linear(), batches)
    assert all(batch["x"] is given["x"] for batch, given in zip(seen, batches, strict=True))


def test_callbacks_that_run_last_come_after_the_module_at_the_epoch_end_only() -> None:
    called: list[tuple[str, str]] = []

    class Hooked(Linear):
        def on_train_epoch_end(self) -> None:
            called.append(("epoch", "module"))

        def on_train_end(self) -> None:
            called.append(("train", "module"))

    def named(name: str, last: bool) -> jl.Callback:
        callback = make_callback(
            on_train_epoch_end=lambda trainer, module: called.append(("epoch", name)),
            on_train_end=lambda trainer, module: called.append(("train", name)),
        )
        callback.runs_last = last
        return callback

    callbacks = [
        named("last 1", True),
        named("first 1", False),
        named("last 2", True),
        named("first 2", False),
    ]
    make_trainer(*callbacks, max_epochs=1).fit(Hooked(), make_batches(1))
    assert [who for when, who in called if when == "epoch"] == [
        "first 1",
        "first 2",
        "module",
        "last 1",
        "last 2",
    ]
    assert [who for when, who in called if when == "train"] == [
        "last 1",
        "first 1",
        "last 2",
        "first 2",
        "module",
    ]


# Skipping and stopping -------------------------------------------------------------------------------

SKIPPED = ["on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_train_batch_start"]


@pytest.mark.parametrize("owner", ["module", "callback"])
def test_minus_one_from_on_train_batch_start_skips_the_rest_of_the_epoch(owner: str) -> None:
    class Skips(Linear):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 1 else None

    recorder = Recorder()
    skip = make_callback(on_train_batch_start=lambda trainer, module, batch, i: -1 if i == 1 else None)
    trainer = make_trainer(recorder, *([skip] if owner == "callback" else []), max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Skips() if owner == "module" else Linear(), make_batches(3), make_batches(1))
    epoch = [*SKIPPED, "on_train_epoch_end"]
    ends = ["on_train_end", "on_fit_end", "teardown"]
    assert recorder.names == ["setup", "on_fit_start", "on_train_start", *epoch, *epoch, *ends]


def test_a_skipped_epoch_trains_on_the_batches_before_the_skip_only() -> None:
    module, batches = Linear(), make_batches(3)
    skip = make_callback(on_train_batch_start=lambda trainer, module, batch, i: -1 if i == 2 else None)
    make_trainer(skip, max_epochs=2).fit(module, batches)
    assert_params(module, by_hand([[batch] for batch in batches[:2] * 2]))


def test_every_callback_is_asked_before_an_epoch_is_skipped() -> None:
    skip, recorder = make_callback(on_train_batch_start=lambda trainer, module, batch, i: -1), Recorder()
    make_trainer(skip, recorder, max_epochs=1).fit(Linear(), make_batches(3))
    assert recorder.names.count("on_train_batch_start") == 1


def test_an_epoch_may_be_skipped_from_its_first_batch() -> None:
    module, skip = Linear(), make_callback(on_train_batch_start=lambda trainer, module, batch, i: -1)
    trainer = make_trainer(skip, max_epochs=2)
    trainer.fit(module, make_batches(3))
    assert (trainer.current_epoch, trainer.global_step) == (2, 0)


def test_stop_ends_after_the_batch_and_validates_once() -> None:
    recorder = Recorder()
    stop = make_callback(on_train_batch_end=lambda trainer, module, outputs, batch, i: trainer.stop("enough"))
    make_trainer(recorder, stop, max_epochs=3, num_sanity_val_steps=0).fit(Linear(), make_batches(3), make_batches(1))
    validation = ["start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end"]
    assert recorder.names[3:] == [
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_train_batch_end",
        *(f"on_validation_{name}" for name in validation),
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_stop_in_on_train_start_trains_no_epoch() -> None:
    recorder = Recorder()
    stop = make_callback(on_train_start=lambda trainer, module: trainer.stop("enough"))
    make_trainer(recorder, stop, max_epochs=3).fit(Linear(), make_batches(3))
    assert recorder.names == [
        "setup",
        "on_fit_start",
        "on_train_start",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_stop_in_validation_ends_with_the_epoch() -> None:
    stop = make_callback(on_validation_end=lambda trainer, module: trainer.stop("flat"))
    trainer = make_trainer(stop, max_epochs=5, num_sanity_val_steps=0)
    trainer.fit(Linear(), make_batches(2), make_batches(1))
    assert (trainer.current_epoch, trainer.global_step) == (1, 2)


def test_the_first_reason_to_stop_is_kept() -> None:
    def stop(trainer: jl.Trainer, *_: Any) -> None:
        trainer.stop("first")
        trainer.stop("second")

    trainer = make_trainer(make_callback(on_train_batch_end=stop), max_epochs=1)
    trainer.fit(Linear(), make_batches(2))
    assert trainer.should_stop and trainer.stop_reason == "first"


def test_a_stop_holds_for_one_fit() -> None:
    trainer = make_trainer(max_epochs=2)
    trainer.stop("before fit")
    trainer.fit(Linear(), make_batches(2))
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)


# Counters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "epochs", "steps"),
    [
        ({"max_epochs": 2}, 2, 10),
        ({"max_steps": 7}, 2, 7),
        ({"max_steps": 5}, 1, 5),
        ({"max_epochs": 3, "max_steps": 4}, 1, 4),
        ({"max_epochs": 1, "max_steps": 40}, 1, 5),
        ({"max_epochs": 2, "accumulate_grad_batches": 2}, 2, 6),
        ({"max_steps": 4, "accumulate_grad_batches": 2}, 2, 4),
        ({"max_epochs": 2, "limit_train_batches": 3}, 2, 6),
    ],
)
def test_after_fit_the_counters_tell_epochs_and_optimizer_steps(
    arguments: dict[str, Any], epochs: int, steps: int
) -> None:
    trainer = make_trainer(**arguments)
    trainer.fit(Linear(), make_batches(5))
    assert (trainer.current_epoch, trainer.global_step, int(trainer.state.step)) == (epochs, steps, steps)


def test_num_batches_tell_what_the_limits_leave() -> None:
    trainer = make_trainer(max_epochs=1, limit_train_batches=0.5, limit_val_batches=2)
    trainer.fit(Linear(), make_batches(5), make_batches(3))
    assert (trainer.num_training_batches, trainer.num_val_batches) == (2, [2])


def test_a_second_fit_trains_on_from_the_weights_with_a_fresh_optimizer() -> None:
    module, batches = Linear(), make_batches(3)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, batches)
    trainer.fit(module, batches)
    windows = [[batch] for batch in batches]
    assert_params(module, by_hand(windows, start=by_hand(windows)))
    assert (trainer.current_epoch, trainer.global_step) == (1, 3)


def test_a_second_fit_takes_the_loader_from_its_first_batch() -> None:
    module, batches = Linear(), make_batches(4)
    loader = jl.ArrayLoader({key: np.concatenate([batch[key] for batch in batches]) for key in ("x", "y")}, 8)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, loader)
    trainer.fit(module, loader)
    windows = [[batch] for batch in batches[:2]]
    assert_params(module, by_hand(windows, start=by_hand(windows)))


def test_validate_after_fit_sees_the_trained_weights() -> None:
    module, batches = Linear(), make_batches(2)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, batches)
    params = by_hand([[batch] for batch in batches])
    expected = float(np.mean((batches[0]["x"] @ params["kernel"] + params["bias"] - batches[0]["y"]) ** 2))
    assert trainer.validate(dataloaders=batches[:1]) == [{"val": pytest.approx(expected, rel=1e-5)}]


# Errors ----------------------------------------------------------------------------------------------

RAISING = [
    name
    for name in HOOKS
    if not any(word in name for word in ("test", "predict", "exception", "teardown", "checkpoint"))
]


@pytest.mark.parametrize("hook", RAISING)
def test_after_an_error_in_a_hook_every_callback_gets_on_exception_and_teardown(hook: str) -> None:
    told: list[tuple[str, Any]] = []

    class Listens(jl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            told.append(("on_exception", exception))

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            told.append(("teardown", stage))

    def fail(*_: Any) -> None:
        raise RuntimeError("the first")

    looks = {"trace_step": lambda *_: {"one": jnp.ones(())}}
    failing = make_callback(**looks, **{hook: fail})
    trainer = make_trainer(Listens(), failing, Listens(), max_epochs=1, log_every_n_steps=1)
    with pytest.raises(RuntimeError, match="the first") as raised:
        trainer.fit(Linear(), make_batches(3), make_batches(2))
    assert told == [("on_exception", raised.value)] * 2 + [("teardown", "fit")] * 2


def test_an_error_in_a_step_reaches_on_exception_and_teardown() -> None:
    class Fails(Linear):
        def training_step(self, batch: Any) -> jax.Array:
            raise RuntimeError("in the step")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="in the step"):
        make_trainer(recorder, max_epochs=1).fit(Fails(), make_batches(1))
    assert recorder.names[-2:] == ["on_exception", "teardown"]


def test_an_error_in_a_loader_reaches_on_exception_and_teardown() -> None:
    def loader() -> Any:
        yield from make_batches(2)
        raise RuntimeError("in the loader")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="in the loader"):
        make_trainer(recorder, max_epochs=1).fit(Linear(), loader())
    assert recorder.names[-2:] == ["on_exception", "teardown"]


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_an_error_in_evaluation_reaches_on_exception_and_teardown(method: str) -> None:
    stage = {"validate": "validation"}.get(method, method)

    def fail(*_: Any) -> None:
        raise RuntimeError("the first")

    recorder = Recorder()
    trainer = make_trainer(recorder, make_callback(**{f"on_{stage}_batch_end": fail}))
    with pytest.raises(RuntimeError, match="the first"):
        getattr(trainer, method)(Linear(), make_batches(1))
    assert recorder.names[-2:] == ["on_exception", "teardown"]


@pytest.mark.parametrize("hook", ["on_exception", "teardown"])
def test_an_error_in_the_handling_of_an_error_never_hides_the_first(hook: str) -> None:
    def first(*_: Any) -> None:
        raise RuntimeError("the first")

    def second(*_: Any) -> None:
        raise ValueError("the second")

    recorder = Recorder()
    trainer = make_trainer(make_callback(**{"on_train_start": first, hook: second}), recorder, max_epochs=1)
    with pytest.raises(RuntimeError, match="the first") as raised:
        trainer.fit(Linear(), make_batches(1))
    assert recorder.names[-2:] == ["on_exception", "teardown"]
    assert any("the second" in note and f"Made.{hook}" in note for note in raised.value.__notes__)


def test_an_error_in_one_teardown_does_not_keep_the_others_from_theirs() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in teardown")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="in teardown"):
        make_trainer(make_callback(teardown=fail), recorder, max_epochs=1).fit(Linear(), make_batches(1))
    assert recorder.names[-1] == "teardown"


def test_a_trainer_may_fit_again_after_an_error() -> None:
    def fail(*_: Any) -> None:
        if trainer.global_step == 1 and not failed:
            failed.append(True)
            raise RuntimeError("once")

    failed: list[bool] = []
    module, batches = Linear(), make_batches(2)
    trainer = make_trainer(make_callback(on_train_batch_end=fail), max_epochs=1)
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(module, batches)
    trainer.fit(module, batches)
    assert_params(module, by_hand([[batch] for batch in batches], start=by_hand([batches[:1]])))


def test_after_an_error_the_module_holds_the_weights_of_the_last_step() -> None:
    def fail(trainer: jl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise RuntimeError("after two")

    module, batches = Linear(), make_batches(4)
    with pytest.raises(RuntimeError, match="after two"):
        make_trainer(make_callback(on_train_batch_end=fail), max_epochs=1).fit(module, batches)
    assert_params(module, by_hand([[batch] for batch in batches[:2]]))


def test_a_trainer_refuses_to_run_inside_its_own_run() -> None:
    def again(trainer: jl.Trainer, module: Any) -> None:
        trainer.fit(module, make_batches(1))

    trainer = make_trainer(make_callback(on_train_start=again), max_epochs=1)
    with pytest.raises(JaxlitError, match="second Trainer"):
        trainer.fit(Linear(), make_batches(1))


# Numbers that are not finite -------------------------------------------------------------------------

BAD = 2  # the batch that holds a NaN


def batches_with_nan() -> list[dict[str, np.ndarray]]:
    batches = make_batches(6)
    batches[BAD]["x"][0, 0] = np.nan
    return batches


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_policy_raise_keeps_the_parameters_from_before_the_bad_step_and_names_it(strategy: str) -> None:
    module, batches = Linear(), batches_with_nan()
    with pytest.raises(NonFiniteError, match=f"step {BAD} "):
        make_trainer(strategy=strategy, max_epochs=1).fit(module, batches)
    assert_params(module, by_hand([[batch] for batch in batches[:BAD]]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_policy_skip_leaves_out_that_update_only(strategy: str) -> None:
    module, batches = Linear(), batches_with_nan()
    make_trainer(strategy=strategy, max_epochs=1, nan_policy="skip").fit(module, batches)
    assert_params(module, by_hand([[batch] for i, batch in enumerate(batches) if i != BAD]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_policy_ignore_lets_them_into_the_parameters(strategy: str) -> None:
    module = Linear()
    make_trainer(strategy=strategy, max_epochs=1, nan_policy="ignore").fit(module, batches_with_nan())
    assert np.isnan(np.asarray(module.kernel[...])).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_policy_raise_looks_at_whole_accumulation_windows(strategy: str) -> None:
    module, batches = Linear(), batches_with_nan()
    with pytest.raises(NonFiniteError, match=f"step {BAD // 2} "):
        make_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2).fit(module, batches)
    assert_params(module, by_hand([batches[:2]]))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_policy_skip_leaves_out_whole_accumulation_windows(strategy: str) -> None:
    module, batches = Linear(), batches_with_nan()
    trainer = make_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2, nan_policy="skip")
    trainer.fit(module, batches)
    assert_params(module, by_hand([batches[:2], batches[4:]]))


def test_nan_policy_raise_notices_a_bad_step_at_a_logged_row() -> None:
    recorder = Recorder()
    trainer = make_trainer(recorder, max_epochs=1, log_every_n_steps=1)
    with pytest.raises(NonFiniteError, match=f"step {BAD} "):
        trainer.fit(Linear(), batches_with_nan())
    assert recorder.names.count("on_train_batch_end") < 6


def test_nan_policy_skip_keeps_bad_batches_out_of_the_epoch_mean() -> None:
    class Logs(Linear):
        def training_step(self, batch: Any) -> jax.Array:
            loss = super().training_step(batch)
            self.log("mean", jnp.mean(batch["x"]), on_step=False, on_epoch=True)
            return loss

    batches = batches_with_nan()
    trainer = make_trainer(max_epochs=1, nan_policy="skip")
    trainer.fit(Logs(), batches)
    expected = np.mean([batch["x"].mean() for i, batch in enumerate(batches) if i != BAD])
    assert trainer.callback_metrics["mean"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_an_infinite_gradient_of_a_finite_loss_is_noticed(policy: str) -> None:
    class Root(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros(1))

        def training_step(self, batch: Any) -> jax.Array:
            return jnp.sqrt(self.w[...] ** 2).sum() * batch["x"].mean()  # 0, with a NaN as gradient

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    module, trainer = Root(), make_trainer(max_epochs=1, nan_policy=policy)
    if policy == "raise":
        with pytest.raises(NonFiniteError, match="step 0 "):
            trainer.fit(module, make_batches(2))
    else:
        trainer.fit(module, make_batches(2))
    assert module.w[...].tolist() == [0.0]
