"""Validation, test and prediction: loaders, names, the sanity check, and what they leave as it was."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import numbered, sized
from kit.by_hand import mean
from kit.journal import Rows, hooks
from kit.modules import Mean, logging, module
from kit.refusals import refuses
from kit.trainers import THREE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import LogError


def by_loader(self: Any, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
    """Log by loader; the loader's index is a plain int in the step."""
    assert type(dataloader_idx) is int
    self.log("val", jnp.mean(batch["x"]) * (1 + dataloader_idx))
    self.log(f"own_{dataloader_idx}", jnp.mean(batch["x"]), add_dataloader_idx=False)
    self.log("index", batch_idx * 1.0, reduce_fx="max")


@pytest.mark.parametrize("strategy", thinned(THREE, "shard_map"))
def test_each_loader_has_its_metrics_under_its_own_name(strategy: str) -> None:
    trainer, model, rows = make_trainer(strategy=strategy), module(validation=by_loader, test=by_loader), Rows()
    loaders = [numbered(3, 1), numbered(2, 10)]
    expected = [
        {"val/dataloader_idx_0": 2.0, "own_0": 2.0, "index/dataloader_idx_0": 2.0},
        {"val/dataloader_idx_1": 21.0, "own_1": 10.5, "index/dataloader_idx_1": 1.0},
    ]
    assert trainer.validate(model, loaders) == trainer.test(model, loaders) == expected
    assert trainer.validate(model, loaders[0]) == [{"val": 2.0, "own_0": 2.0, "index": 2.0}]
    trainer.callbacks, trainer.log_every_n_steps = [rows], 0
    trainer.fit(model, numbered(2), loaders)
    assert {k: v for k, v in trainer.callback_metrics.items() if k != "loss"} == expected[0] | expected[1]
    assert rows.rows == [(1, expected[0] | expected[1] | {"epoch": 0})]


def test_one_name_for_two_loaders_is_refused() -> None:
    model = logging(validation=lambda m, batch, i: m.log("val", 1.0, add_dataloader_idx=False))
    words = (r"self\.log\('val'", "two loaders", "add_dataloader_idx=False")
    refuses(LogError, lambda: make_trainer().validate(model, [numbered(1), numbered(1)]), *words)


def test_batch_hooks_log_by_loader_other_hooks_for_all() -> None:
    logs = hooks(
        on_validation_batch_end=lambda t, m, outputs, batch, i, loader: m.log("rows", float(batch["x"][0, 0])),
        on_validation_epoch_end=lambda t, m: m.log("all", 7.0),
    )
    model = module(validation=lambda self, batch: None)
    result = make_trainer(logs).validate(model, [numbered(3), numbered(2, 10)])
    assert result == [{"rows/dataloader_idx_0": 2.0, "all": 7.0}, {"rows/dataloader_idx_1": 10.5, "all": 7.0}]


def test_the_means_of_an_evaluation_weigh_batches_by_their_rows() -> None:
    batches, log = sized(8, 16, 3), lambda m, batch, i: m.log("v", batch["x"].mean())
    expected = float(np.concatenate([batch["x"] for batch in batches]).mean())
    for strategy in THREE:
        (result,) = make_trainer(strategy=strategy).test(logging(validation=log), batches)
        assert result == {"v": pytest.approx(expected, rel=1e-5)}


def test_the_sanity_check_leaves_no_metric_row_or_count_behind() -> None:
    seen: list[dict[str, float]] = []
    look = hooks(on_train_start=lambda trainer, module: seen.append(dict(trainer.callback_metrics)))
    model, rows = Mean(), Rows()
    arguments = {"num_sanity_val_steps": -1, "check_val_every_n_epoch": 2, "log_every_n_steps": 0}
    trainer = fit(model, numbered(3), numbered(2), rows, look, **arguments)
    assert seen == [{}] and rows.rows == []
    assert (float(model.w[...][0]), trainer.global_step) == (mean([[1], [2], [3]]), 3)


@pytest.mark.parametrize("is_lazy", [False, True])
def test_evaluation_uses_the_weights_before_and_after_fit(is_lazy: bool) -> None:
    model: Any = jl.lazy(Mean) if is_lazy else Mean()
    trainer, batches = make_trainer(), numbered(2, 11)
    w = mean([[1], [2], [3]])
    for weight, given in ((0.0, (model,)), (w, (model,)), (w, ())):
        assert trainer.validate(*given, dataloaders=batches) == [{"val": pytest.approx(11.5 - weight, rel=1e-6)}]
        assert trainer.test(*given, dataloaders=batches) == [{"test": pytest.approx(11.5 - weight, rel=1e-6)}]
        predictions = trainer.predict(*given, dataloaders=batches)
        assert [x.shape for x in predictions] == [(8, 1)] * 2 and all(type(x) is np.ndarray for x in predictions)
        assert [float(x[3, 0]) for x in predictions] == pytest.approx([11 - weight, 12 - weight], rel=1e-6)
        if weight == 0.0:
            assert (trainer.current_epoch, trainer.global_step) == (0, 0)
            trainer.fit(model, numbered(3))
        assert (trainer.current_epoch, trainer.global_step) == (1, 3)
    assert float(trainer.module.w[...][0]) == pytest.approx(w, rel=1e-6)
