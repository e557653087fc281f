"""What a Trainer keeps between its runs, and its callbacks in each of them."""

from typing import Any

from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError


def named(name: str, called: list[str]) -> jl.Callback:
    return hooks(on_train_start=lambda trainer, module: called.append(name))


def test_configure_callbacks_adds_after_the_users_for_one_run() -> None:
    called: list[str] = []
    brings = module(configure_callbacks=lambda self: [named("module 1", called), named("module 2", called)])
    one = module(configure_callbacks=lambda self: named("alone", called))
    mine = [named("user 1", called), named("user 2", called)]
    trainer = make_trainer(*mine)
    trainer.fit(brings, numbered(1))
    assert called == ["user 1", "user 2", "module 1", "module 2"]
    assert [c for c in trainer.callbacks if c in mine] == mine
    trainer.fit(brings, numbered(1))  # those of the first fit are gone
    trainer.callbacks.append(named("user 3", called))
    trainer.fit(one, numbered(1))
    assert called[4:] == ["user 1", "user 2", "module 1", "module 2", "user 1", "user 2", "user 3", "alone"]


def test_a_trainer_is_refused_in_its_own_hook() -> None:
    counts: list[Any] = []

    def again(trainer: jl.Trainer, model: Any) -> None:
        for verb in ("fit", "validate", "test", "predict"):
            call = lambda verb=verb: getattr(trainer, verb)(model, numbered(1))  # noqa: E731
            refuses(ArgumentError, call, rf"Trainer\.{verb} is called from a hook", "Use a second Trainer")
        counts.append((trainer.global_step, trainer.current_epoch, model.trainer is trainer))

    model = Mean()
    trainer = fit(model, numbered(2), None, hooks(on_train_epoch_end=again), max_epochs=2)
    assert counts == [(2, 0, True), (4, 1, True)]
    assert (trainer.global_step, trainer.current_epoch) == (4, 2)
    assert float(model.w[...][0]) == mean([[1], [2], [1], [2]])
