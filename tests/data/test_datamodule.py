"""A DataModule, or the module's own loader hooks, give a run its data, in Lightning's order."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit import modules as kit_modules
from kit import trainers as kit_trainers
from kit.by_hand import mean
from kit.journal import hooks

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, JaxlitError

VERBS = ("fit", "validate", "test", "predict")
LOADERS = {
    "fit": ["val_dataloader", "train_dataloader"],
    "validate": ["val_dataloader"],
    "test": ["test_dataloader"],
    "predict": ["predict_dataloader"],
}


def make_batches(*values: float) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((8, 1), value, np.float32)} for value in values]


def by_hand(*means: float) -> float:
    return mean([[x] for x in means])


class Mean(kit_modules.Mean):
    """Logs and predicts its batches as they came."""

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(batch["x"]))

    def test_step(self, batch: Any) -> None:
        self.log("test", jnp.mean(batch["x"]))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] + 0


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    return kit_trainers.make_trainer(*callbacks, **({"num_sanity_val_steps": 0} | arguments))


class Data(jl.DataModule):
    """Writes down what it is asked for."""

    def __init__(self) -> None:
        self.called: list[Any] = []

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(("setup", stage))

    def teardown(self, stage: str) -> None:
        self.called.append(("teardown", stage))

    def on_exception(self, exception: BaseException) -> None:
        self.called.append(("on_exception", exception))

    def train_dataloader(self) -> Any:
        self.called.append("train_dataloader")
        return make_batches(1, 2, 3)

    def val_dataloader(self) -> Any:
        self.called.append("val_dataloader")
        return make_batches(11, 12)

    def test_dataloader(self) -> Any:
        self.called.append("test_dataloader")
        return [make_batches(21), make_batches(22, 24)]

    def predict_dataloader(self) -> Any:
        self.called.append("predict_dataloader")
        return make_batches(31, 32)


def run(trainer: jl.Trainer, verb: str, *arguments: Any, **named: Any) -> Any:
    return getattr(trainer, verb)(*arguments, **named)


# The order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("positional", [False, True])
def test_a_run_prepares_sets_up_asks_for_its_loaders_once_and_tears_down(verb: str, positional: bool) -> None:
    data, module = Data(), Mean()
    named = {} if positional else {"datamodule": data}
    found = run(make_trainer(), verb, module, *([data] if positional else []), **named)
    called = [x for x in data.called if x not in LOADERS[verb]]
    assert called == ["prepare_data", ("setup", verb), ("teardown", verb)]
    assert sorted(data.called[2:-1]) == sorted(LOADERS[verb])
    if verb == "fit":
        assert float(module.w[...][0]) == pytest.approx(by_hand(1, 2, 3), rel=1e-6)
    elif verb == "predict":
        assert [x.tolist() for x in found] == [[[31.0]] * 8, [[32.0]] * 8]
    else:
        several = [{"test/dataloader_idx_0": 21.0}, {"test/dataloader_idx_1": 23.0}]
        assert found == ([{"val": 11.5}] if verb == "validate" else several)


@pytest.mark.parametrize("verb", VERBS)
def test_the_data_module_comes_before_the_callbacks_and_they_before_the_module(verb: str) -> None:
    called: list[tuple[str, str]] = []

    def noting(who: str, what: str) -> Callable[..., None]:
        return lambda *_: called.append((who, what))

    names = ("prepare_data", "setup", "teardown")
    data = type("Ordered", (Data,), {name: noting("data", name) for name in names})()
    module = type("Hooked", (Mean,), {name: noting("module", name) for name in names})()
    watch = hooks(**{name: noting("callback", name) for name in names[1:]})
    run(make_trainer(watch), verb, module, datamodule=data)
    prepared = [("data", "prepare_data"), ("module", "prepare_data")]
    assert called == prepared + [(who, what) for what in names[1:] for who in ("data", "callback", "module")]


def test_what_prepare_data_and_setup_make_is_there_for_the_loaders() -> None:
    class Builds(jl.DataModule):
        def prepare_data(self) -> None:
            self.numbers = (4, 8)

        def setup(self, stage: str) -> None:
            self.batches = make_batches(*self.numbers)

        def train_dataloader(self) -> Any:
            return self.batches

        def teardown(self, stage: str) -> None:
            del self.batches

    data, module = Builds(), Mean()
    make_trainer().fit(module, data)
    assert float(module.w[...][0]) == pytest.approx(by_hand(4, 8), rel=1e-6) and not hasattr(data, "batches")


def test_the_module_may_read_in_configure_optimizers_how_long_its_data_is() -> None:
    lengths: list[Any] = []

    class Asks(Mean):
        def configure_optimizers(self) -> optax.GradientTransformation:
            lengths.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    make_trainer(max_epochs=4).fit(Asks(), Data())
    assert lengths == [12]


@pytest.mark.parametrize("verb", VERBS)
def test_after_an_error_the_data_module_hears_of_it_and_tears_down(verb: str) -> None:
    error = RuntimeError("the first")

    def fail(*_: Any) -> None:
        raise error

    stage = {"fit": "train", "validate": "validation"}.get(verb, verb)
    data = Data()
    with pytest.raises(RuntimeError) as raised:
        run(make_trainer(hooks(**{f"on_{stage}_batch_end": fail})), verb, Mean(), data)
    assert raised.value is error
    assert data.called[-2:] == [("on_exception", error), ("teardown", verb)]


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "train_dataloader", "val_dataloader", "teardown"])
def test_after_an_error_of_its_own_the_data_module_and_the_callbacks_tear_down(hook: str) -> None:
    error, called = RuntimeError("the first"), []

    def fail(*_: Any) -> None:
        raise error

    data = type("Fails", (Data,), {hook: fail})()
    watch = hooks(
        on_exception=lambda trainer, module, exception: called.append(exception),
        teardown=lambda trainer, module, stage: called.append(stage),
    )
    with pytest.raises(RuntimeError) as raised:
        make_trainer(watch).fit(Mean(), data)
    assert raised.value is error
    assert called == (["fit"] if hook == "teardown" else [error, "fit"])
    assert hook == "teardown" or data.called[-2:] == [("on_exception", error), ("teardown", "fit")]


def test_every_run_prepares_and_sets_up_anew() -> None:
    data, trainer = Data(), make_trainer()
    for verb in VERBS:
        run(trainer, verb, Mean(), data)
    stages = [x for x in data.called if isinstance(x, tuple)]
    assert data.called.count("prepare_data") == 4
    assert stages == [(what, verb) for verb in VERBS for what in ("setup", "teardown")]


def test_loaders_of_hooks_obey_the_limits() -> None:
    data, module = Data(), Mean()
    trainer = make_trainer(limit_train_batches=2, limit_test_batches=1, limit_predict_batches=0.5)
    trainer.fit(module, data)
    assert float(module.w[...][0]) == pytest.approx(by_hand(1, 2), rel=1e-6)
    assert trainer.test(module, data)[1] == {"test/dataloader_idx_1": 22.0}
    assert [x[0, 0] for x in trainer.predict(module, data)] == [31.0]


def test_without_a_val_dataloader_nothing_is_validated() -> None:
    class Trains(jl.DataModule):
        def train_dataloader(self) -> Any:
            return make_batches(1)

    seen: list[Any] = []
    watch = hooks(on_validation_start=lambda *_: seen.append("validation"))
    trainer = make_trainer(watch, num_sanity_val_steps=2)
    trainer.fit(Mean(), Trains())
    assert seen == [] and trainer.num_val_batches == []


# The module's own hooks ------------------------------------------------------------------------------


class Own(Mean):
    """Has its loaders itself."""

    def train_dataloader(self) -> Any:
        return make_batches(5, 6)

    def val_dataloader(self) -> Any:
        return make_batches(7)

    def test_dataloader(self) -> Any:
        return make_batches(8)

    def predict_dataloader(self) -> Any:
        return make_batches(9)


def test_a_module_may_have_its_loaders_itself() -> None:
    module, trainer = Own(), make_trainer()
    trainer.fit(module)
    assert float(module.w[...][0]) == pytest.approx(by_hand(5, 6), rel=1e-6)
    assert trainer.callback_metrics["val"] == 7.0
    assert (trainer.validate(), trainer.test()) == ([{"val": 7.0}], [{"test": 8.0}])
    assert [x[0, 0] for x in trainer.predict()] == [9.0]


def test_a_lazy_module_may_have_its_loaders_itself() -> None:
    trainer = make_trainer()
    trainer.fit(jl.lazy(Own))
    assert float(trainer.module.w[...][0]) == pytest.approx(by_hand(5, 6), rel=1e-6)  # type: ignore[union-attr]


def test_loaders_that_are_given_come_before_the_modules_own() -> None:
    module, trainer = Own(), make_trainer()
    trainer.fit(module, make_batches(1), make_batches(2))
    assert float(module.w[...][0]) == pytest.approx(by_hand(1), rel=1e-6) and trainer.callback_metrics["val"] == 2.0
    assert trainer.test(module, make_batches(3)) == [{"test": 3.0}]


def test_a_data_module_comes_before_the_modules_own_loaders() -> None:
    module, trainer = Own(), make_trainer()
    trainer.fit(module, Data())
    assert float(module.w[...][0]) == pytest.approx(by_hand(1, 2, 3), rel=1e-6)
    assert trainer.callback_metrics["val"] == 11.5


def test_hooks_of_the_module_see_its_trainer() -> None:
    seen: list[Any] = []

    class Looks(Own):
        def prepare_data(self) -> None:
            seen.append(self.trainer)

        def train_dataloader(self) -> Any:
            seen.append(self.trainer)
            return make_batches(1)

    trainer = make_trainer()
    trainer.fit(Looks())
    assert len(seen) == 2 and all(x is trainer for x in seen)


# Batches on their way --------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["data", "module"])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_on_before_batch_transfer_changes_every_batch_and_knows_its_loader(owner: str, strategy: str) -> None:
    seen: list[tuple[float, int]] = []

    def double(self: Any, batch: Any, dataloader_idx: int) -> Any:
        assert type(batch["x"]) is np.ndarray
        seen.append((float(batch["x"][0, 0]), dataloader_idx))
        return {"x": batch["x"] * 2}

    members = {"on_before_batch_transfer": double}
    data = type("Doubles", (Data,), members if owner == "data" else {})()
    module = type("Doubles", (Mean,), members if owner == "module" else {})()
    shown: list[float] = []
    watch = hooks(on_train_batch_end=lambda trainer, module, outputs, batch, i: shown.append(batch["x"][0, 0]))
    trainer = make_trainer(watch, strategy=strategy)
    trainer.fit(module, data)
    assert float(module.w[...][0]) == pytest.approx(by_hand(2, 4, 6), rel=1e-6)
    assert shown == [2.0, 4.0, 6.0]  # what was trained on
    assert sorted(seen) == [(1, 0), (2, 0), (3, 0), (11, 0), (12, 0)]
    seen.clear()
    assert trainer.test(module, data) == [{"test/dataloader_idx_0": 42.0}, {"test/dataloader_idx_1": 46.0}]
    assert seen == [(21, 0), (22, 1), (24, 1)]
    assert [x[0, 0] for x in trainer.predict(module, data)] == [62.0, 64.0]


def test_on_before_batch_transfer_of_the_data_module_comes_in_place_of_the_modules() -> None:
    class Doubles(Data):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch["x"] * 2}

    class Never(Mean):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("the data module has its own")

    module = Never()
    make_trainer().fit(module, Doubles())
    assert float(module.w[...][0]) == pytest.approx(by_hand(2, 4, 6), rel=1e-6)


def test_on_before_batch_transfer_of_the_module_holds_for_loaders_that_are_given() -> None:
    class Halves(Mean):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch["x"] / 2}

    module = Halves()
    make_trainer().fit(module, make_batches(2, 6))
    assert float(module.w[...][0]) == pytest.approx(by_hand(1, 3), rel=1e-6)


def test_a_batch_that_on_before_batch_transfer_forgets_to_return_is_refused() -> None:
    class Forgets(Data):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            batch["x"] *= 2

    with pytest.raises(DataError, match="None"):
        make_trainer().fit(Mean(), Forgets())


# What is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("fit", "train_dataloaders"),
        ("fit", "val_dataloaders"),
        ("validate", "dataloaders"),
        ("test", "dataloaders"),
        ("predict", "dataloaders"),
    ],
)
def test_loaders_and_a_data_module_together_are_refused_before_any_hook(verb: str, argument: str) -> None:
    data = Data()
    with pytest.raises(ArgumentError, match=rf"Trainer\.{verb}\({argument}=\.\.\., datamodule=\.\.\.\)"):
        run(make_trainer(), verb, Mean(), datamodule=data, **{argument: make_batches(1)})
    assert data.called == []


def test_a_positional_data_module_with_validation_loaders_is_refused() -> None:
    with pytest.raises(ArgumentError, match="val_dataloaders.*datamodule"):
        make_trainer().fit(Mean(), Data(), make_batches(1))


@pytest.mark.parametrize("verb", VERBS)
def test_a_positional_data_module_with_another_by_name_is_refused(verb: str) -> None:
    first, second = Data(), Data()
    with pytest.raises(JaxlitError, match="datamodule"):
        run(make_trainer(), verb, Mean(), first, datamodule=second)
    assert first.called == second.called == []


def test_a_data_module_among_validation_loaders_is_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="val_dataloaders.*Data"):
        make_trainer().fit(Mean(), make_batches(1), Data())


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_data_module_object_is_refused_by_its_name(verb: str) -> None:
    for given, name in ((Data, "the class Data"), (make_batches(1), "list"), ("data", "str"), (Mean(), "Mean")):
        with pytest.raises(ArgumentTypeError, match=rf"Trainer\.{verb}\(datamodule=.*got {name}"):
            run(make_trainer(), verb, Mean(), datamodule=given)


@pytest.mark.parametrize("owner", ["data", "module"])
@pytest.mark.parametrize(("verb", "hook"), [("fit", "train_dataloader"), *((verb, LOADERS[verb][0]) for verb in VERBS)])
def test_a_loader_hook_that_returns_none_is_refused_by_its_name(verb: str, hook: str, owner: str) -> None:
    base: Any = Data if owner == "data" else Own
    forgets = type("Forgets", (base,), {hook: lambda self: None})()
    arguments = (Mean(), forgets) if owner == "data" else (forgets,)
    with pytest.raises(DataError, match=rf"Forgets\.{hook}\(\) returned None"):
        run(make_trainer(), verb, *arguments)


@pytest.mark.parametrize("given", [5, "loader", np.zeros((4, 1)), {"x": np.zeros((4, 1))}, Data])
def test_a_loader_hook_that_returns_no_loader_is_refused_by_its_name(given: Any) -> None:
    for hook in ("train_dataloader", "val_dataloader"):
        data = type("Wrong", (Data,), {hook: lambda self: given})()
        with pytest.raises(ArgumentTypeError, match=rf"Wrong\.{hook}\(\) is no loader"):
            make_trainer().fit(Mean(), data)
        assert data.called[-1] == ("teardown", "fit")


@pytest.mark.parametrize("verb", VERBS)
def test_a_data_module_without_the_loader_of_a_stage_is_refused_by_the_hooks_name(verb: str) -> None:
    hook = {"fit": "train_dataloader"}.get(verb, LOADERS[verb][0])
    with pytest.raises(ArgumentError, match=rf"Trainer\.{verb} .*{hook}"):
        run(make_trainer(), verb, Mean(), jl.DataModule())


# Made again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "at"), [(0, [0]), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_the_loaders_of_a_data_module_are_made_again_every_n_epochs(every: int, at: list[int]) -> None:
    class Counts(Data):
        def train_dataloader(self) -> Any:
            super().train_dataloader()
            return make_batches(self.called.count("train_dataloader"))

    data, module, made = Counts(), Mean(), []
    watch = hooks(on_train_epoch_start=lambda *_: made.append(data.called.count("train_dataloader")))
    make_trainer(watch, max_epochs=4, reload_dataloaders_every_n_epochs=every).fit(module, data)
    numbers = [sum(epoch <= e for epoch in at) for e in range(4)]
    assert made == numbers
    assert data.called.count("val_dataloader") == len(at)
    assert [x for x in data.called if x not in LOADERS["fit"]] == [
        "prepare_data",
        ("setup", "fit"),
        ("teardown", "fit"),
    ]
    assert float(module.w[...][0]) == pytest.approx(by_hand(*numbers), rel=1e-6)


def test_a_reloaded_loader_goes_through_on_before_batch_transfer_as_well() -> None:
    class Doubles(Data):
        def train_dataloader(self) -> Any:
            return make_batches(1)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch["x"] * 2}

    module = Mean()
    make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module, Doubles())
    assert float(module.w[...][0]) == pytest.approx(by_hand(2, 2, 2), rel=1e-6)


@pytest.mark.parametrize("late", [None, [], 5])
def test_a_reloaded_loader_is_checked_like_the_first(late: Any) -> None:
    class Changes(Data):
        def train_dataloader(self) -> Any:
            self.called.append("train_dataloader")
            return make_batches(1) if self.called.count("train_dataloader") == 1 else late

    data = Changes()
    with pytest.raises(JaxlitError, match=r"Changes\.train_dataloader\(\)"):
        make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Mean(), data)
    assert data.called[-1] == ("teardown", "fit")


def test_reloading_loaders_that_were_given_is_refused() -> None:
    with pytest.raises(ArgumentError, match="reload_dataloaders_every_n_epochs=1"):
        make_trainer(reload_dataloaders_every_n_epochs=1).fit(Mean(), make_batches(1), make_batches(1))


class Reloads(jl.DataModule):
    def __init__(self, *loaders: Any) -> None:
        self.loaders = iter(loaders)

    def train_dataloader(self) -> Any:
        return next(self.loaders)


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (
            [{"x": np.zeros((8, 1), np.float32), "more": np.zeros(8)}],
            r"structure of the batch changed: new batch\['more'\]",
        ),
        ([], "gave no batch. Check that it is not empty"),
    ],
)
def test_batches_of_a_reloaded_loader_are_compared_with_those_before(second: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        make_trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(Mean(), Reloads(make_batches(1, 2), second))


@pytest.mark.parametrize("argument", ["train", "val"])
def test_a_lazy_module_is_not_built_before_its_loaders_were_looked_at(argument: str) -> None:
    built: list[bool] = []

    class Watched(Mean):
        def __init__(self) -> None:
            built.append(True)
            super().__init__()

    bad = [{"x": np.zeros((0, 4), np.float32)}]
    loaders = (bad, make_batches(1)) if argument == "train" else (make_batches(1), bad)
    with pytest.raises(DataError, match=rf"{argument}_dataloaders.*0 rows"):
        make_trainer().fit(jl.lazy(Watched), *loaders)
    assert built == []


def test_the_old_iteration_of_a_reloaded_loader_is_closed_before_the_next_is_opened() -> None:
    """What a loader holds open, a thread or a file, is let go of in time."""
    said: list[str] = []

    def loader(k: int) -> Any:
        class Held:
            def __iter__(self) -> Any:
                said.append(f"open {k}")
                try:
                    yield from make_batches(1, 2, 3)
                finally:
                    said.append(f"closed {k}")

        return Held()

    data = Reloads(*map(loader, range(2)))
    make_trainer(max_epochs=2, limit_train_batches=2, reload_dataloaders_every_n_epochs=1).fit(Mean(), data)
    assert said == ["open 0", "closed 0", "open 1", "closed 1"]
