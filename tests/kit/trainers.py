"""Trainers as users get them: bar, summary and CSV file are on; checkpoints where a test asks for any."""

from collections.abc import Iterable
from typing import Any

import pytest

import jaxlit as jl

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "replicas:8")
THREE = ("single", "fsdp", "shard_map")  # one of each kind: one device, global arrays, replicas
FOUR = (*THREE, "pmap")  # which compiles replicas in its own way
SEVERAL = STRATEGIES[1:]
REPLICAS = ("shard_map", "pmap", "replicas:8")  # those that run a step once on each replica's rows

# For what looks at the terminal, counts files or writes, or takes thousands of steps.
BARE: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)
OF_FIT = ("ckpt_path", "datamodule", "reset_optimizer", "init_from", "strict")


def splitting(name: str) -> Any:
    """Return a strategy by its name; those that shard split even the smallest array."""
    kinds = {"fsdp": {}, "zero2": {"stage": 2}, "zero1": {"stage": 1}, "hsdp": {"replicas": 2}}
    sharding = kinds.get(name)
    return name if sharding is None else jl.strategies.FSDP(**sharding, min_size=0)


def thinned(cases: Iterable[Any], *often: Any, full: Iterable[Any] | None = None) -> list[Any]:
    """Return the cases of a test, some for every run, and those of `full` (all others if it is not given) marked so.

    What is in neither is run by `pytest -m sweep`.
    """
    every = list(cases)
    seldom = every if full is None else list(full)
    assert (often or full is not None) and all(case in every for case in [*often, *seldom]), (often, seldom)
    assert not (left := constant([*often, *seldom], every)), f"a sample that is the same in each case: {left}"

    def marked(case: Any) -> Any:
        mark = pytest.mark.full if case in seldom else pytest.mark.sweep
        return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)

    return [case if case in often else marked(case) for case in every]


def constant(sample: list[Any], every: list[Any]) -> list[int]:
    """Return the factors that a sample of three cases or more leaves as they are, and all cases do not."""
    if len(sample) < 3 or not isinstance(every[0], tuple):
        return []
    kinds = [[len({*map(repr, values)}) for values in zip(*cases, strict=False)] for cases in (sample, every)]
    return [i for i, (few, many) in enumerate(zip(*kinds, strict=True)) if few == 1 < many]


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    """Return a Trainer for one epoch on one device, if nothing else is said.

    It saves checkpoints if the test has a callback for them or names a folder: one takes as long as a small fit.
    """
    saves = any(getattr(callback, "role", None) == "checkpoint" for callback in callbacks)
    saves = saves or not arguments.keys().isdisjoint(("default_root_dir", "resume", "fast_dev_run"))
    defaults = {"strategy": "single", "max_epochs": 1, "enable_checkpointing": saves}
    return jl.Trainer(callbacks=[*callbacks], **(defaults | arguments))


def fit(module: Any, train: Any = None, val: Any = None, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    """Train, with arguments of the Trainer and of `fit`, and return the Trainer."""
    of_fit = {key: arguments.pop(key) for key in OF_FIT if key in arguments}
    trainer = make_trainer(*callbacks, **arguments)
    trainer.fit(module, train, val, **of_fit)
    return trainer
