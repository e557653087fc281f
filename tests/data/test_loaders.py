"""Loaders: which batches a training sees, what is no loader, rows in place of batches, and a DataModule's hooks."""

import itertools
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit.batches import Stream, counted, numbered, rows_of
from kit.by_hand import mean
from kit.compiles import compiles
from kit.grain_rows import data_loader, records
from kit.journal import Batches, Journal, hooks, raising
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses, warnings_of
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.data.array_loader import ArrayLoader
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, JaxlitError


def array_loader(rows=10, batch_size=4, **arguments):
    return jl.ArrayLoader({"x": np.arange(rows, dtype=np.float32)[:, None]}, batch_size, **arguments)


def seen_in(train, val=None, **arguments):
    seen = Batches()
    fit(Mean(), train, val, seen, **({"max_epochs": 2, "num_sanity_val_steps": 0} | arguments))
    return seen


LOADERS = {
    "jax arrays": lambda: [{"x": jnp.asarray(batch["x"])} for batch in counted(4, 4, 4)],
    "iterable": lambda: Stream(counted(4, 4, 4)),
    "MapDataset": lambda: grain.MapDataset.source(records(12)).batch(4),
    "IterDataset": lambda: grain.MapDataset.source(records(12)).batch(4).to_iter_dataset(),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_loader_is_opened_once_an_epoch(kind):
    loader, seen = LOADERS[kind](), Batches()
    trainer = fit(Mean(), loader, None, seen, max_epochs=2, accumulate_grad_batches=2)
    assert [rows_of(epoch) for epoch in seen.train] == [[*range(12)]] * 2
    assert trainer.global_step == 4, "the second window of an epoch is of one batch"
    assert kind != "iterable" or loader.opened == 2
    assert kind != "MapDataset" or trainer.num_training_batches == 3


def test_a_generator_is_one_epoch_and_refused_in_the_next():
    seen, batches = Batches(), ((np.full((2, 1), k, np.float32), np.ones(2, np.float32)) for k in range(3))
    of_tuples = module(lambda self, batch: jnp.mean((batch[0] - self.w) ** 2))
    words = r"no batch when it was opened again.*iterator.*used up"
    refuses(DataError, lambda: fit(of_tuples, batches, None, seen, max_epochs=2), "train_dataloaders", words)
    assert [float(x[0, 0]) for x, _ in seen.train[0]] == [0.0, 1.0, 2.0]
    refuses(DataError, lambda: seen_in(counted(4), iter(counted(4, 4))), "val_dataloaders", words)
    assert make_trainer().validate(Mean(), iter(counted(4, 4))) == [{"val": 3.5}], "opened once, it is validated whole"


def test_validation_sees_every_batch_after_the_sanity_check():
    own = Stream(counted(3, 1))
    seen = seen_in(array_loader(shuffle=True, seed=5), [array_loader(), own], num_sanity_val_steps=1)
    orders = [np.random.default_rng((5, epoch)).permutation(10).tolist() for epoch in range(2)]
    assert [rows_of(epoch) for epoch in seen.train] == orders
    assert [rows_of(epoch) for epoch in seen.val] == [[0, 1, 2, 3, 0, 1, 2], *[[*range(10), 0, 1, 2, 3]] * 2]


ENDLESS = {
    "cycle": lambda: itertools.cycle(counted(4, 4)),
    "repeat": lambda: itertools.repeat(counted(4)[0]),
    "MapDataset": lambda: grain.MapDataset.source(records(12)).batch(4).repeat(),
    "IterDataset": lambda: grain.MapDataset.source(records(12)).batch(4).repeat().to_iter_dataset(),
    "DataLoader": lambda: data_loader(num_epochs=None),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_an_endless_loader_needs_a_limit(kind):
    make, given = ENDLESS[kind], Mean()
    with compiles() as compiled:
        words = ("train_dataloaders.*without end", "max_steps", "limit_train_batches")
        refuses(ArgumentError, lambda: fit(given, make(), max_epochs=2), *words)
        words = "val_dataloaders.*without end.*limit_val_batches"
        refuses(ArgumentError, lambda: fit(given, counted(4), make()), words)
        words = "dataloaders.*without end.*limit_predict_batches"
        refuses(ArgumentError, lambda: make_trainer().predict(given, make()), words)
    assert compiled == []


def test_an_endless_loader_ends_with_max_steps():
    assert rows_of(seen_in(ENDLESS["MapDataset"](), max_epochs=-1, max_steps=5).train[0]) == [*range(12), *range(8)]
    assert len(seen_in(itertools.repeat(counted(4)[0], 3), max_epochs=1).train[0]) == 3


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        ("mnist", "got 'mnist'.*jl.ArrayLoader"),
        (np.ones((4, 2)), r"got float64\[4, 2\].*wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        (jnp.ones((4, 2)), r"wrap arrays as jl.ArrayLoader\(arrays, batch_size\)"),
        ((np.ones((4, 2)), np.ones(4)), r"got .*float64\[4, 2\].*several as \(x, y\)"),
        ([np.ones(4, np.float32), np.ones(4, np.int32)], r"got .*float32\[4\], int32\[4\]"),
        ({"x": np.ones((4, 2))}, "got {.*jl.ArrayLoader"),
        (Mean, "got <class .*Mean.*jl.ArrayLoader"),
        (3, "got 3.*jl.ArrayLoader"),
    ],
)
def test_what_is_no_loader_is_refused_with_a_hint(loader, words):
    fit_refuses(ArgumentTypeError, rf"train_dataloaders.*{words}", train=loader)
    fit_refuses(ArgumentTypeError, rf"val_dataloaders.*{words}", val=loader)
    for verb in ("validate", "test", "predict"):
        run = getattr(make_trainer(), verb)
        refuses(ArgumentTypeError, lambda run=run: run(Mean(), loader), rf"Trainer\.{verb}.*{words}")


def test_fit_without_a_loader_or_with_two_is_refused_with_a_hint():
    fit_refuses(ArgumentError, "no train_dataloaders.*jl.ArrayLoader.*datamodule", loaders={"train_dataloaders": None})
    fit_refuses(ArgumentError, "train_dataloaders.*one loader, got 2", train=[array_loader(4), array_loader(4)])


def test_a_dict_of_loaders_is_taken_as_a_list_in_its_order():
    make = lambda: {"second": numbered(2, 10), "first": numbered(3), "once": (batch for batch in numbered(1))}  # noqa: E731
    trainer = make_trainer()
    for verb in (trainer.validate, trainer.test, trainer.predict):
        of_dict, of_list = verb(Mean(), make()), verb(Mean(), [*make().values()])
        assert len(of_dict) == 3
        assert repr(of_dict) == repr(of_list)
    arrays = lambda: module(validation_step=lambda self, batch: self.log("val", batch.sum()))  # noqa: E731
    of_dict = trainer.validate(arrays(), {"a": [np.ones(2)] * 2, "b": [np.ones(3)]})
    assert [value for metrics in of_dict for value in metrics.values()] == [2.0, 3.0]
    trainer.fit(Mean(), numbered(2), make())
    assert trainer.num_val_batches[:2] == [2, 3]
    assert "val/dataloader_idx_2" in trainer.callback_metrics
    refuses(ArgumentError, lambda: trainer.fit(Mean(), {"a": numbered(1)}), "takes one loader, got 1 in a dict")
    for batch in ({"x": [1.0, 2.0]}, {"x": np.ones(2), "y": [1, 2]}, {}):
        refuses(ArgumentTypeError, lambda batch=batch: trainer.validate(Mean(), batch), "is no loader")


@pytest.mark.parametrize("limit", [0, 0.0])
def test_a_limit_of_0_trains_or_validates_nothing(limit):
    traced = []
    made = module(lambda self, batch: traced.append("training") or jnp.mean(self.error(batch) ** 2))
    assert (fit(made, counted(2), limit_train_batches=limit, max_epochs=2).global_step, traced) == (0, [])
    assert seen_in(counted(2), counted(2), limit_val_batches=limit, num_sanity_val_steps=2).val == []


@pytest.mark.parametrize("which", ["train", "val"])
def test_a_fraction_without_a_batch_is_refused(which):
    few = rf"limit_{which}_batches=0\.01\) is a fraction, and .* has 3 batches.*int"
    endless = rf"limit_{which}_batches=0\.5.*no length.*int"
    fit_refuses(ArgumentError, few, train=counted(2, 2, 2), val=counted(2, 2, 2), **{f"limit_{which}_batches": 0.01})
    loaders = {"train": counted(2), "val": counted(2)} | {which: iter(counted(2))}
    fit_refuses(ArgumentError, rf"{which}_dataloaders", endless, **loaders, **{f"limit_{which}_batches": 0.5})


def test_a_limit_draws_no_batch_too_many():
    def loader():
        yield from counted(2, 2)
        raise AssertionError("drew a third batch")

    assert rows_of(seen_in(loader(), limit_train_batches=2, max_epochs=1).train[0]) == [0, 1, 2, 3]


def test_a_limit_beyond_the_loader_warns_once(caplog):
    limits = {f"limit_{which}_batches": 100 for which in ("train", "val", "test", "predict")}
    trainer = make_trainer(max_epochs=3, **limits)
    trainer.fit(Mean(), counted(2, 2, 2), counted(2, 2, 2))
    trainer.test(Mean(), counted(2, 2, 2))
    trainer.predict(Mean(), counted(2, 2, 2))
    trainer.fit(Mean(), Stream(counted(2, 2, 2)))  # which is known after its first epoch
    told = warnings_of(caplog)
    arguments = [*limits, "limit_train_batches"]
    assert all(name in text and "100" in text for name, text in zip(arguments, told, strict=True))
    assert all("dataloaders=...)" in text and " 3 " in text for text in told)


TORCH, ARROW = "torch.utils.data.dataset.Dataset", "datasets.arrow_dataset.Dataset"


class Sequence:
    """A dataset as torch and Hugging Face have them: elements by index, and their number."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def of_library(name: str, rows: list[Any]) -> Any:
    """Return a dataset whose class is derived from one that is called as a library's."""
    module, _, kind = name.rpartition(".")
    members = {"__module__": module} | ({"shape": (len(rows), 2)} if name == ARROW else {})
    return type("Mine", (type(kind, (Sequence,), members),), {})(rows)


NUMBERS = [{"x": 1.0, "y": 2}] * 8
VECTORS = [{"x": np.ones(3, np.float32), "y": np.ones(3, np.float32)}] * 8
LABELLED = [{"x": np.ones((4, 4), np.float32), "y": 3}] * 8
STACK = r"by jl\.ArrayLoader\(jax\.tree\.map\(lambda \*x: np\.stack\(x\), \*rows\), batch_size=32\)"
ROWS = {
    "a list": (NUMBERS, "list", STACK),
    "lists of numbers beside a text": ([{"x": [1, 2, 3], "text": "a b c"}] * 8, "list", STACK),
    "numpy's numbers": ([{"x": np.float32(1)}] * 8, "list", STACK),
    "a sequence": (Sequence(NUMBERS), "Sequence", STACK),
    "grain": (grain.MapDataset.source(NUMBERS), "MapDataset", r"by \.batch\(32\)\."),
    "torch": (of_library(TORCH, VECTORS), "Mine", r"by torch\.utils\.data\.DataLoader\(dataset, batch_size=32\)"),
    "Hugging Face": (of_library(ARROW, LABELLED), "Mine", r"""by dataset\.with_format\("numpy"\)\.batch\(32\)\."""),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_refused_with_what_makes_batches_of_them(name: str) -> None:
    loader, kind, how = ROWS[name]
    where = rf"Trainer\.fit\(train_dataloaders=\.\.\.\) is a \w*{kind} whose first element is .*These are rows: batch"
    fit_refuses(DataError, where, how, train=loader)


def batches_of(x: Any) -> list[dict[str, Any]]:
    return [{"x": np.full((4, 1), 2.0, np.float32), "scale": x}] * 2


BATCHES = {
    "Hugging Face's batches": of_library(ARROW, [{"x": np.ones((4, 1), np.float32)}] * 2),
    "torch's iterable batches": type(
        "Mine",
        (type("IterableDataset", (), {"__module__": TORCH.rpartition(".")[0]}),),
        {"__iter__": lambda self: iter(batches_of(np.float32(1)))},
    )(),
    "a number beside an array": batches_of(0.5),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_the_same_libraries_are_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert fit(module(lambda self, batch: jnp.mean(self.error(batch) ** 2)), BATCHES[name]).global_step == 2
    assert [x for x in warnings_of(caplog) if "rows" in x] == []


TOLD = [(3, list, 1), (np.float32(0.5), list, 1), (np.int32(1), Stream, 1), (3, Stream, 1), (0.5, Stream, 0)]


@pytest.mark.parametrize(("label", "kind", "told"), TOLD)
def test_a_number_of_its_own_next_to_an_array_is_told_of(label: Any, kind: Any, told: int, caplog: Any) -> None:
    made = module(lambda self, batch: jnp.mean(self.error(batch) ** 2))
    fit(made, kind(batches_of(label)))
    warnings = [x for x in warnings_of(caplog) if "rows" in x]
    first = "Trainer.fit(train_dataloaders=...) gives a number next to an array"
    assert [x.split(",")[0] for x in warnings] == [first] * told
    assert all(("batched(rows, 32) of docs/data.md" if kind is Stream else "np.stack") in x for x in warnings)
    caplog.clear()
    fit(made, ArrayLoader({"x": np.ones((4, 1), np.float32)}, 4))
    assert [x for x in warnings_of(caplog) if "rows" in x] == []


VERBS = ("fit", "validate", "test", "predict")
LOADER_HOOKS = {verb: [f"data {verb[:3] if verb == 'validate' else verb}_dataloader"] for verb in VERBS}
LOADER_HOOKS["fit"] = ["data train_dataloader", "data val_dataloader"]


def noting(what, *batches):
    """Return a hook that writes down that it was called, and with which stage, and returns the batches."""

    def hook(self, *stage):
        self.called.append(" ".join(["data", what, *stage]))
        return batches[0] if len(batches) == 1 else [*batches]

    return hook


class Data(jl.DataModule):
    def __init__(self, called=None):
        self.called = [] if called is None else called

    def on_exception(self, exception):
        self.called.append(exception)

    prepare_data, setup, teardown = noting("prepare_data"), noting("setup"), noting("teardown")
    train_dataloader = noting("train_dataloader", numbered(3))
    val_dataloader = noting("val_dataloader", numbered(2, first=11))
    test_dataloader = noting("test_dataloader", numbered(1, first=21), numbered(2, first=22))
    predict_dataloader = noting("predict_dataloader", numbered(2, first=31))


Own = type(
    module(
        train_dataloader=lambda self: numbered(1 + self.trainer.max_epochs, first=5),
        val_dataloader=lambda self: numbered(1, first=7),
        test_dataloader=lambda self: numbered(1, first=8),
        predict_dataloader=lambda self: numbered(1, first=9),
    )
)


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
        assert called[:5] == before and sorted(called[5:-3]) == LOADER_HOOKS[verb]
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
    hook = LOADER_HOOKS[verb][0].removeprefix("data ")
    refuses(ArgumentError, lambda: run(Mean(), jl.DataModule()), rf"{where} .*{hook}")
    assert first.called == second.called == []


def test_what_cannot_go_together_is_refused():
    refuses(ArgumentError, lambda: fit(Mean(), Data(), numbered(1)), "val_dataloaders.*datamodule")
    refuses(ArgumentTypeError, lambda: fit(Mean(), numbered(1), Data()), "val_dataloaders.*Data")
    reloads = lambda: fit(Mean(), numbered(1), numbered(1), reload_dataloaders_every_n_epochs=1)  # noqa: E731
    refuses(ArgumentError, reloads, "reload_dataloaders_every_n_epochs=1")
    forgets = data_with(on_before_batch_transfer=lambda self, batch, idx: None)
    refuses(DataError, lambda: fit(Mean(), forgets), "returned None")


HOOKS = [("fit", "train_dataloader"), *((verb, LOADER_HOOKS[verb][-1].removeprefix("data ")) for verb in VERBS)]


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
        ([numbered(1)[0] | {"more": np.zeros(8)}], DataError, r"structure of the batch changed: batch\['more'\] was"),
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
