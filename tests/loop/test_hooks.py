"""Which hooks are called, in which order, with what, and what is no hook."""

import inspect
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import HOOKS, Journal, hooks
from kit.modules import Mean, module
from kit.refusals import fit_refuses
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.errors import ModuleError
from jaxlit.faces import advice

Event = tuple[Any, ...]  # a hook, the indices among its arguments, and the epoch and step that the Trainer counts there
OF_MODULE = ("configure_callbacks", "prepare_data", "train_dataloader", "val_dataloader", "configure_optimizers")
DEFAULTS: dict[str, Any] = {"max_epochs": 2, "max_steps": -1, "val_check_interval": 1.0}
DEFAULTS |= dict.fromkeys(("limit_train_batches", "limit_val_batches"), 1.0)
ONES = ("accumulate_grad_batches", "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps")
DEFAULTS |= dict.fromkeys(ONES, 1)


def indices_of(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(x for x in args if isinstance(x, int))


class Program:
    """Runs the docstring's program on stand-ins that keep the order of the calls, and the batches of each step.

    `train` and `val` are numbers of batches; `skip` says whether on_train_batch_start returns -1.
    """

    def __init__(self, train: int, val: list[int], skip: Callable[[int, int], bool], **arguments: Any) -> None:
        self.events: list[Event] = []
        self.windows: list[list[int]] = []
        self.arguments, self.skip, self.window = arguments, skip, list[int]()
        self.epoch = self.step = self.total = self.batch = 0
        self.sanity_check = False
        cut = lambda n, limit: min(n, limit) if isinstance(limit, int) else int(n * limit)  # noqa: E731
        self.num = cut(train, arguments["limit_train_batches"])
        nums = [cut(n, arguments["limit_val_batches"]) for n in val]
        sanity = arguments["num_sanity_val_steps"]
        scope: dict[str, Any] = {name: partial(self.hook, name) for name in (*HOOKS, *OF_MODULE)}
        scope |= {} if val else {"val_dataloader": lambda: None}
        scope |= {
            "range": self.epochs,
            "train_batches": self,
            "val_batches": [numbered(n) for n in nums],
            "num_sanity_val_steps": (99 if sanity < 0 else sanity) if val else 0,
            "training_step": self.train,
            "validation_step": lambda *_: None,
            "validation_is_due": lambda: bool(val) and self.is_due(),
            "log": self.log,
            "row_of_step": lambda: self.step - 1 if self.fits and not self.window else None,
            "row_of_epoch": lambda: self.step - 1,
            "row_of_validation": lambda: max(self.step - 1, 0),
            "training_is_over": lambda: self.epoch + 1 == arguments["max_epochs"],
            **dict.fromkeys(("max_epochs", "outputs", "checkpoint")),
        }
        (block,) = re.findall(r"```\n(.*?)```", inspect.cleandoc(jl.Callback.__doc__ or ""), re.DOTALL)
        exec(block, scope)
        scope["fit"]()

    def hook(self, name: str, *args: Any) -> Any:
        self.sanity_check = name == "on_sanity_check_start" or (self.sanity_check and name != "on_sanity_check_end")
        self.events.append((name, indices_of(args), self.epoch, self.step))
        if name == "on_train_batch_start":
            self.batch = args[1]
            if self.skip(self.epoch, self.batch):
                self.window.clear()
                return -1
        return None

    @property
    def over(self) -> bool:
        return self.epoch >= self.arguments["max_epochs"] or 0 <= self.arguments["max_steps"] <= self.step

    def epochs(self, _: Any) -> Iterator[int]:
        while not self.over:
            yield self.epoch
            self.epoch += 1

    def __iter__(self) -> Iterator[Any]:
        for batch in numbered(self.num):
            if self.over:
                return
            yield batch

    def __len__(self) -> int:
        return self.num

    def train(self, *_: Any) -> None:
        self.window.append(1 + self.batch)
        self.total += 1
        if self.batch == self.num - 1 or len(self.window) == self.arguments["accumulate_grad_batches"]:
            self.windows.append(self.window)
            self.window, self.step = [], self.step + 1

    @property
    def fits(self) -> bool:
        return self.step % self.arguments["log_every_n_steps"] == 0

    def is_due(self) -> bool:
        interval, every = self.arguments["val_check_interval"], self.arguments["check_val_every_n_epoch"]
        if every is not None and (self.epoch + 1) % every:
            return False
        if interval == 1.0 and isinstance(interval, float):
            return self.batch == self.num - 1
        period = interval if isinstance(interval, int) else max(1, int(self.num * interval))
        return (self.total if every is None else self.batch + 1) % period == 0

    def log(self, row: int | None) -> None:
        if row is not None and not self.sanity_check:
            self.hook("on_log", row)


def run_trainer(
    train: int, val: list[int], skip: Callable[[int, int], bool], **arguments: Any
) -> tuple[list[Event], float, jl.Trainer]:
    """Train for real; returns the order of the calls, the weight and the Trainer."""
    events: list[Event] = []

    def of_callback(name: str) -> Callable[..., Any]:
        def call(self: Any, trainer: jl.Trainer, *args: Any) -> int | None:
            result = (args[1],) if name == "on_log" else indices_of(args)
            events.append((name, result, trainer.current_epoch, trainer.global_step))
            return -1 if name == "on_train_batch_start" and skip(trainer.current_epoch, args[2]) else None

        return call

    def noting(name: str, value: Any) -> Callable[..., Any]:
        return lambda self: (events.append((name, (), 0, 0)), value() if callable(value) else value)[1]

    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    members = {
        "configure_callbacks": noting("configure_callbacks", []),
        "prepare_data": noting("prepare_data", None),
        "train_dataloader": noting("train_dataloader", numbered(train)),
        "configure_optimizers": noting("configure_optimizers", lambda: Mean().configure_optimizers()),
    }
    if val:
        members["val_dataloader"] = noting("val_dataloader", [numbered(n) for n in val])
    keep = type("Keep", (jl.Callback,), {name: of_callback(name) for name in HOOKS})()
    model = module(step, **members)
    # Without checkpoints, whose hooks come when a file is written.
    trainer = fit(model, None, None, keep, enable_checkpointing=False, **arguments)
    return events, float(model.w[...][0]), trainer


def draw_case(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    train = rng.randint(1, 5)
    limit = rng.choice([1.0, 1.0, 0.5 if train > 1 else 1.0, rng.randint(1, 6)])
    num = min(train, limit) if isinstance(limit, int) else int(train * limit)
    every = rng.choice([1, 1, 2, 3, None])
    return {
        "train": train,
        "val": [rng.randint(1, 4) for _ in range(rng.choice([0, 1, 1, 2, 3]))],
        "max_epochs": rng.choice([1, 2, 3, 4]),
        "max_steps": rng.choice([-1, -1, -1, 1, 3, 4, 7]),
        "accumulate_grad_batches": rng.choice([1, 2, 3]),
        # An interval in batches must fit into an epoch, unless it is counted across epochs; a fraction is not.
        "val_check_interval": rng.randint(1, 7) if every is None else rng.choice([1.0, 0.5, 0.34, rng.randint(1, num)]),
        "check_val_every_n_epoch": every,
        "limit_train_batches": limit,
        "limit_val_batches": rng.choice([1.0, 1.0, 1, 2]),
        "num_sanity_val_steps": rng.choice([-1, 0, 1, 2]),
        "log_every_n_steps": rng.choice([1, 2, 3]),
    }


CASES: dict[str, dict[str, Any]] = {
    "validation at the end of each epoch": {},
    "the rest of an epoch skipped": {"skip": lambda epoch, batch: (epoch, batch) == (0, 2)},
    **{f"drawn {seed}": draw_case(seed) for seed in range(12)},
}


@pytest.mark.parametrize("name", thinned(CASES, *[*CASES][1::2], "drawn 1", "drawn 5"))
def test_hooks_come_in_the_order_of_the_callback_docstring(name: str) -> None:
    case = DEFAULTS | {"train": 3, "val": [2], "skip": lambda *_: False} | CASES[name]
    program, (events, weight, trainer) = Program(**case), run_trainer(**case)
    # Where max_steps cuts an epoch its place is not over, which the program says in a comment only.
    left_out = ("on_safe_point",) if case["max_steps"] > 0 else ()
    without = lambda result: [e if e[0] != "on_safe_point" else e[:2] for e in result if e[0] not in left_out]  # noqa: E731
    assert without(events) == without(program.events)
    assert weight == pytest.approx(mean(program.windows), rel=1e-6)
    assert (trainer.current_epoch, trainer.global_step) == program.events[-1][2:]


@pytest.mark.parametrize("limit", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_where_there_is_nothing_to_train_no_train_hook_comes(limit: dict[str, Any]) -> None:
    journal = Journal()
    fit(Mean(), numbered(2), numbered(1), journal, num_sanity_val_steps=0, **limit)
    assert journal.names == ["setup", "on_fit_start", "on_fit_end", "teardown"]


def test_runs_last_holds_for_epoch_ends_and_safe_points() -> None:
    late, early = ("on_train_epoch_end", "on_safe_point"), ("on_train_end", "on_fit_end")
    called: dict[str, list[str]] = {hook: [] for hook in (*late, *early)}
    note = lambda hook, name: lambda *_, **__: called[hook].append(name)  # noqa: E731

    def named(name: str, last: bool) -> jl.Callback:
        made = hooks(**{hook: note(hook, name) for hook in called})
        made.runs_last = last
        return made

    order = [("last 1", True), ("first 1", False), ("last 2", True), ("first 2", False)]
    model = module(**{hook: note(hook, "module") for hook in called})
    fit(model, numbered(1), None, *[named(*each) for each in order], enable_checkpointing=False)
    for hook in late:
        assert called[hook] == ["first 1", "first 2", "module", "last 1", "last 2"], hook
    for hook in early:
        assert called[hook] == ["last 1", "first 1", "last 2", "first 2", "module"], hook


def test_a_hook_with_a_wrong_signature_is_refused_at_once() -> None:
    started: list[str] = []
    wrong = hooks(
        setup=lambda trainer, module, stage: started.append(stage),
        on_train_batch_end=lambda trainer, module, outputs: None,
    )
    words = r"Made\.on_train_batch_end\(trainer, module, outputs\) is called with .*batch_idx"
    fit_refuses(ModuleError, words, "Give it these arguments", callbacks=[wrong])
    assert started == []


GONE = {**advice("hook"), "trace_step": "Put it into a Callback", "on_trace": "Put it into a Callback"}


@pytest.mark.parametrize("hook", GONE)
def test_a_hook_that_nothing_calls_is_refused_with_advice(hook: str) -> None:
    model = module(**{hook: lambda self, *args: None})
    fit_refuses(ModuleError, rf"Made\.{hook} would never be called", re.escape(GONE[hook].strip()), model=model)


def test_manual_optimization_is_refused() -> None:
    words = (r"Made\.automatic_optimization = False", r"jl\.compile_step")
    fit_refuses(ModuleError, *words, model=module(automatic_optimization=False))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("on_epoch_end", "on_train_epoch_end"),
        ("on_train_begin", "on_train_start"),
        ("on_train_bach_end", "Did you mean 'on_train_batch_end'"),
        ("on_keyboard_interrupt", "trainer.interrupted"),
    ],
)
def test_a_hook_that_nothing_calls_is_refused_on_any_owner(name: str, word: str) -> None:
    called = lambda self, *_: None  # noqa: E731
    fit_refuses(ModuleError, f"{name} would never be called.*{word}", model=type("Slips", (Mean,), {name: called})())
    callback = type("Slips", (jl.Callback,), {name: called})()
    fit_refuses(ModuleError, f"{name} would never be called.*{word}", callbacks=callback)
    fit(type("Fine", (Mean,), {"on_my_own": called})(), numbered(1))


def test_only_minus_one_of_any_integer_type_skips() -> None:
    for answer, steps in ((-1, 0), (np.int64(-1), 0), (0, 2), (True, 2), ("-1", 2), (-1.0, 2)):
        skip = hooks(on_train_batch_start=lambda *_, a=answer: a)
        assert fit(Mean(), numbered(2), None, skip).global_step == steps, answer
