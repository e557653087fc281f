"""A DataModule, or the module's own loader hooks, give a run its data, in Lightning's order."""

import numpy as np
import optax
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import Batches, Journal, hooks, raising
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, JaxlitError

VERBS = ("fit", "validate", "test", "predict")
LOADERS = {
    "fit": ["data train_dataloader", "data val_dataloader"],
    "validate": ["data val_dataloader"],
    "test": ["data test_dataloader"],
    "predict": ["data predict_dataloader"],
}


def noting(what, *batches):
    """Return a hook that writes down that it was called, and with which stage, and returns the batches."""

    def hook(self, *stage):
        self.called.append(" ".join(["data", what, *stage]))
        return batches[0] if len(batches) == 1 else [*batches]

    return hook


class Data(jl.DataModule):
    """Writes down what it is asked for."""

    def __init__(self, called=None):
        self.called = [] if called is None else called

    def on_exception(self, exception):
        self.called.append(exception)

    prepare_data, setup, teardown = noting("prepare_data"), noting("setup"), noting("teardown")
    train_dataloader = noting("train_dataloader", numbered(3))
    val_dataloader = noting("val_dataloader", numbered(2, first=11))
    test_dataloader = noting("test_dataloader", numbered(1, first=21), numbered(2, first=22))
    predict_dataloader = noting("predict_dataloader", numbered(2, first=31))


class Own(Mean):
    def train_dataloader(self):
        assert self.trainer.max_epochs == 1
        return numbered(2, first=5)

    def val_dataloader(self):
        return numbered(1, first=7)

    def test_dataloader(self):
        return numbered(1, first=8)

    def predict_dataloader(self):
        return numbered(1, first=9)


def data_with(**methods):
    return type("Made", (Data,), methods)()


def assert_trained(made, *means):
    assert float(made.w[0]) == pytest.approx(mean([[x] for x in means]), rel=1e-6)


@pytest.mark.parametrize("verb", VERBS)
def test_each_run_calls_the_data_modules_hooks_in_order(verb):
    called = []
    note = lambda who, what: lambda *args: called.append(f"{who} {what} {args[-1]}")  # noqa: E731
    data, watch = Data(called), hooks(setup=note("callback", "setup"), teardown=note("callback", "teardown"))
    of_module = {"prepare_data": lambda self: called.append("module prepare_data")}
    of_module |= {name: note("module", name) for name in ("setup", "teardown")}
    trainer = make_trainer(watch)
    for arguments, named in (((data,), {}), ((), {"datamodule": data})):
        made = module(**of_module)
        result = getattr(trainer, verb)(made, *arguments, **named)
        before = ["data prepare_data", "module prepare_data"]
        before += [f"{who} setup {verb}" for who in ("data", "callback", "module")]
        assert called[:5] == before and sorted(called[5:-3]) == LOADERS[verb]
        assert called[-3:] == [f"{who} teardown {verb}" for who in ("data", "callback", "module")]
        called.clear()
        if verb == "fit":
            assert_trained(made, 1, 2, 3)
        elif verb == "predict":
            assert [x.tolist() for x in result] == [[[31.0]] * 8, [[32.0]] * 8]
        else:
            several = [{"test/dataloader_idx_0": 21.0}, {"test/dataloader_idx_1": 22.5}]
            assert result == ([{"val": 11.5}] if verb == "validate" else several)


def test_loaders_see_what_prepare_data_and_setup_made():
    class Builds(jl.DataModule):
        def prepare_data(self):
            self.count = 2

        def setup(self, stage):
            self.batches = numbered(self.count, first=4)

        def train_dataloader(self):
            return self.batches

        def teardown(self, stage):
            del self.batches

    lengths, data, watch = [], Builds(), Journal()
    asks = lambda self: lengths.append(self.trainer.estimated_stepping_batches) or optax.sgd(0.25)  # noqa: E731
    made = module(configure_optimizers=asks)
    trainer = fit(made, data, None, watch, max_epochs=4)
    assert_trained(made, *[4, 5] * 4)
    assert lengths == [8] and not hasattr(data, "batches")
    assert trainer.num_val_batches == [] and "on_validation_start" not in watch.names, "it has no val_dataloader"


@pytest.mark.parametrize("hook", ["prepare_data", "setup", "train_dataloader", "val_dataloader", "teardown"])
def test_after_an_error_in_the_data_module_all_tear_down(hook):
    error, called = RuntimeError("the first"), []
    data = data_with(**{hook: raising(error)})
    watch = hooks(
        on_exception=lambda trainer, module, exception: called.append(exception),
        teardown=lambda trainer, module, stage: called.append(stage),
    )
    assert refuses(RuntimeError, lambda: fit(Mean(), data, None, watch)) is error
    assert called == (["fit"] if hook == "teardown" else [error, "fit"])
    assert hook == "teardown" or data.called[-2:] == [error, "data teardown fit"]


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_module_may_have_its_loaders_itself(is_lazy):
    trainer = make_trainer()
    trainer.fit(jl.lazy(Own) if is_lazy else Own())
    assert_trained(trainer.module, 5, 6)
    w = mean([[5], [6]])
    assert trainer.callback_metrics["val"] == pytest.approx(7 - w)
    assert trainer.validate()[0]["val"] == pytest.approx(7 - w)
    assert trainer.test()[0]["test"] == pytest.approx(8 - w)
    assert [x[0, 0] for x in trainer.predict()] == [pytest.approx(9 - w)]


def test_given_loaders_come_before_the_modules_own():
    made, seen = Own(), Batches()
    trainer = fit(made, numbered(1), numbered(1, first=2), seen)
    assert_trained(made, 1)
    assert seen.val[-1][0]["x"][0, 0] == 2
    assert trainer.test(Own(), numbered(1, first=3)) == [{"test": 3.0}]
    made = Own()
    fit(made, Data(), None, seen)
    assert_trained(made, 1, 2, 3)
    assert [batch["x"][0, 0] for batch in seen.val[-1]] == [11, 12]


@pytest.mark.parametrize(
    ("owner", "given", "strategy"), [("data", "data", "single"), ("module", "data", "ddp"), ("module", "own", "single")]
)
def test_on_before_batch_transfer_changes_every_batch(owner, given, strategy):
    seen, shown = [], Batches()

    def double(self, batch, dataloader_idx):
        assert type(batch["x"]) is np.ndarray
        seen.append((float(batch["x"][0, 0]), dataloader_idx))
        return {"x": batch["x"] * 2}

    data = data_with(**({"on_before_batch_transfer": double} if owner == "data" else {}))
    make = lambda: module(**({"on_before_batch_transfer": double} if owner == "module" else {}))  # noqa: E731
    made, train = make(), [data] if given == "data" else [numbered(3), numbered(2, first=11)]
    trainer = make_trainer(shown, strategy=strategy, num_sanity_val_steps=0)
    trainer.fit(made, *train)
    assert_trained(made, 2, 4, 6)
    assert [batch["x"][0, 0] for batch in shown.train[0]] == [2, 4, 6], "hooks see what was trained on"
    assert sorted(seen) == [(1, 0), (2, 0), (3, 0), (11, 0), (12, 0)]
    seen.clear()
    result = trainer.test(make(), data if given == "data" else data.test_dataloader())
    assert result == [{"test/dataloader_idx_0": 42.0}, {"test/dataloader_idx_1": 45.0}]
    assert seen == [(21, 0), (22, 1), (23, 1)]
    result = trainer.predict(make(), data if given == "data" else data.predict_dataloader())
    assert [x[0, 0] for x in result] == [62.0, 64.0]


def test_the_data_modules_on_before_batch_transfer_wins():
    made = module(on_before_batch_transfer=lambda self, batch, idx: pytest.fail("the data module has its own"))
    fit(made, data_with(on_before_batch_transfer=lambda self, batch, idx: {"x": batch["x"] * 2}))
    assert_trained(made, 2, 4, 6)


@pytest.mark.parametrize("verb", VERBS)
def test_unusable_data_is_refused_before_any_hook(verb):
    first, second, run = Data(), Data(), getattr(make_trainer(), verb)
    where = rf"Trainer\.{verb}"
    for argument in {"fit": ("train_dataloaders", "val_dataloaders")}.get(verb, ("dataloaders",)):
        given = {argument: numbered(1)}
        words = rf"{where}\({argument}=\.\.\., datamodule=\.\.\.\)"
        refuses(ArgumentError, lambda: run(Mean(), datamodule=first, **given), words)  # noqa: B023
    refuses(JaxlitError, lambda: run(Mean(), first, datamodule=second), "datamodule")
    for given, name in ((Data, "<class .*Data"), (numbered(1), r"\["), ("data", "'data'"), (Mean(), "Mean")):
        words = rf"{where}\(datamodule=.*got {name}"
        refuses(ArgumentTypeError, lambda: run(Mean(), datamodule=given), words)  # noqa: B023
    hook = LOADERS[verb][0].removeprefix("data ")
    refuses(ArgumentError, lambda: run(Mean(), jl.DataModule()), rf"{where} .*{hook}")
    assert first.called == second.called == []


def test_what_cannot_go_together_is_refused():
    refuses(ArgumentError, lambda: fit(Mean(), Data(), numbered(1)), "val_dataloaders.*datamodule")
    refuses(ArgumentTypeError, lambda: fit(Mean(), numbered(1), Data()), "val_dataloaders.*Data")
    reloads = lambda: fit(Mean(), numbered(1), numbered(1), reload_dataloaders_every_n_epochs=1)  # noqa: E731
    refuses(ArgumentError, reloads, "reload_dataloaders_every_n_epochs=1")
    forgets = data_with(on_before_batch_transfer=lambda self, batch, idx: None)
    refuses(DataError, lambda: fit(Mean(), forgets), "returned None")


HOOKS = [("fit", "train_dataloader"), *((verb, LOADERS[verb][-1].removeprefix("data ")) for verb in VERBS)]


@pytest.mark.parametrize(("verb", "hook"), HOOKS)
def test_a_loader_hook_without_a_loader_is_refused_by_name(verb, hook):
    run, returns = getattr(make_trainer(), verb), {hook: lambda self: given}
    for owner in (Data, Own):
        for given in (None, 5, "loader", np.zeros((4, 1)), {"x": np.zeros((4, 1))}, Data):
            made = type("Wrong", (owner,), returns)()
            call = lambda: run(Mean(), made) if owner is Data else run(made)  # noqa: B023, E731
            error = (DataError, "returned None") if given is None else (ArgumentTypeError, "is no loader")
            refuses(error[0], call, rf"Wrong\.{hook}\(\) {error[1]}")
            assert owner is Own or made.called[-1] == f"data teardown {verb}"


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (None, DataError, r"Reloads\.train_dataloader\(\) returned None"),
        (5, ArgumentTypeError, r"Reloads\.train_dataloader\(\) is no loader"),
        ([], DataError, r"Reloads\.train_dataloader\(\) gave no batch. Check that it is not empty"),
        (
            [{"x": np.zeros((8, 1), np.float32), "more": np.zeros(8)}],
            DataError,
            r"structure of the batch changed: batch\['more'\] was nothing",
        ),
    ],
)
def test_a_reloaded_loader_is_checked_like_the_first(second, error, words):
    loaders = iter([numbered(2), second])
    data = type("Reloads", (Data,), {"train_dataloader": lambda self: next(loaders)})()
    refuses(error, lambda: fit(Mean(), data, max_epochs=3, reload_dataloaders_every_n_epochs=1), words)
    assert data.called[-1] == "data teardown fit"


def test_a_reloaded_loader_closes_the_old_iteration_first():
    said = []

    class Held:
        def __init__(self, number):
            self.number = number

        def __iter__(self):
            said.append(f"open {self.number}")
            try:
                yield from numbered(3)
            finally:
                said.append(f"closed {self.number}")

    loaders = map(Held, range(2))
    data = type("Reloads", (jl.DataModule,), {"train_dataloader": lambda self: next(loaders)})()
    fit(Mean(), data, max_epochs=2, limit_train_batches=2, reload_dataloaders_every_n_epochs=1)
    assert said == ["open 0", "closed 0", "open 1", "closed 1"]
