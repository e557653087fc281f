"""A logger of one's own: what it is given, and what it refuses by name."""

from pathlib import Path

import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer

from jaxlit import DataModule
from jaxlit.callbacks import CSVLogger, Logger
from jaxlit.errors import LoggerError, ModuleError, StateError


class Scaled(Mean):
    def __init__(self, width, api_key="k"):
        super().__init__()


TOLD = {"width": 3, "api_key": "<redacted>"}


class Mine(Logger):
    """A logger written from what `Logger` says alone."""

    def __init__(self):
        self.seen = []

    def setup(self, trainer, module, stage):
        self.seen.append(("setup", module.hparams["width"], trainer.config["max_epochs"]))

    def log_hyperparams(self, params):
        self.seen.append(dict(params))
        params["added"] = 1  # which nobody else sees

    def on_fit_start(self, trainer, module):
        self.seen.append("on_fit_start")


def test_a_users_logger_gets_hyperparameters_before_the_fit():
    class Reads(Mine):  # them itself
        hyperparams_of_module = False

    on_instance, seen = Logger(), []
    on_instance.log_hyperparams = seen.append
    module, loggers = Scaled(3), [Mine(), Mine(), Reads(), on_instance]
    fit(module, numbered(1), logger=loggers)
    assert [x.seen for x in loggers[:2]] == [[("setup", 3, 1), TOLD, "on_fit_start"]] * 2
    assert loggers[2].seen == [("setup", 3, 1), "on_fit_start"]
    assert seen == [TOLD] and module.hparams == {"width": 3, "api_key": "k"}


def test_hyperparameters_of_the_datamodule_come_first():
    class Data(DataModule):
        def __init__(self, size=8, width=7):
            pass

        def train_dataloader(self):
            return numbered(1)

    logger = Mine()
    make_trainer(logger=logger).fit(Scaled(3), datamodule=Data())
    assert {"size": 8, **TOLD} in logger.seen


def test_what_it_does_wrong_is_told_by_its_name():
    class Empty(Logger):
        def log_hyperparams(self):
            pass

    class Changes(Logger):
        def setup(self, trainer, module, stage):
            self.module = module

        def log_hyperparams(self, params):
            self.module.more = 3

    fit_refuses(ModuleError, r"Empty\.log_hyperparams\(\).* is called with \(params\)\. Give it these", logger=Empty())
    fit_refuses(StateError, r"Changes\.log_hyperparams changed the structure of Mean", logger=Changes())


def test_what_it_does_to_a_row_stays_with_it():
    empties = Logger()
    empties.log_metrics = lambda metrics, step=None: metrics.clear()
    fit(Scaled(3), numbered(2), logger=[empties, CSVLogger()], default_root_dir="run", log_every_n_steps=1)
    lines = Path("run/metrics.csv").read_text().splitlines()
    assert len(lines) == 3 and lines[0].startswith("step,epoch,") and lines[1].startswith("0,0,")


def test_lightnings_methods_are_called_as_by_lightning():
    logger, calls = Logger(), []
    logger.log_hyperparams = lambda params: calls.append(("hyperparams", params))
    logger.log_metrics = lambda metrics, step=None: calls.append((step, metrics))
    logger.save, logger.finalize = lambda: calls.append("save"), calls.append
    fit(Scaled(3), numbered(2), logger=logger, log_every_n_steps=1)
    losses = [1.0, (2 - mean([[1]])) ** 2]
    rows = [call for k, loss in enumerate(losses) for call in ((k, {"loss": loss, "lr": 0.25, "epoch": 0.0}), "save")]
    assert calls == [("hyperparams", TOLD), *rows, "success"]
    fails = hooks(on_train_end=lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(Scaled(3), numbered(1), None, fails, logger=logger)
    assert calls[-1] == "failed"
    fit(Scaled(3), numbered(1), None, logger=logger)
    assert calls[-1] == "success"


def test_a_row_of_ones_own_goes_the_way_of_every_row():
    logger = CSVLogger()
    refuses(LoggerError, lambda: logger.log_metrics({"mine": 1.0}), "CSVLogger has no run yet")
    assert [logger.log_dir, logger.name, logger.version] == [None] * 3

    def log(trainer, module):
        trainer.logger.log_metrics({"mine": 0.25})
        trainer.logger.log_metrics({"mine": 0.5}, step=0)

    arguments = {"logger": logger, "default_root_dir": "of/run", "log_every_n_steps": 0}
    fit(Mean(), numbered(3), None, hooks(on_train_end=log), **arguments)
    assert Path("of/run/metrics.csv").read_text().splitlines() == ["step,epoch,mine", "2,1,0.25", "0,1,0.5"]
    assert [logger.log_dir, logger.name, logger.version] == [Path("of/run").absolute(), "of", "run"]
    fit(Mean(), numbered(1), None, hooks(on_train_end=lambda t, m: t.logger.log_metrics({"a": 1})), logger=False)
