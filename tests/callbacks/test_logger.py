"""A logger of one's own: what it is given, and what it refuses by name."""

from kit.batches import numbered
from kit.inside import stop_clocks
from kit.modules import Mean
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit

from jaxlit.callbacks import Logger, NoLogger
from jaxlit.errors import LoggerError, ModuleError, StateError


class Scaled(Mean):
    def __init__(self, width, api_key="k"):
        super().__init__()


GIVEN = {"width": 3, "api_key": "k"}
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


def test_a_logger_of_ones_own_is_given_the_modules_hyperparameters_before_the_fit_starts():
    class Reads(Mine):  # them itself
        hyperparams_of_module = False

    on_instance, seen = Logger(), []
    on_instance.log_hyperparams = seen.append
    module, loggers = Scaled(3), [Mine(), Mine(), Reads(), on_instance]
    fit(module, numbered(1), logger=loggers)
    assert [x.seen for x in loggers[:2]] == [[("setup", 3, 1), TOLD, "on_fit_start"]] * 2
    assert loggers[2].seen == [("setup", 3, 1), "on_fit_start"]
    assert seen == [TOLD] and module.hparams == GIVEN


def test_its_time_is_told_with_that_of_the_hooks(monkeypatch):
    clock = stop_clocks(monkeypatch)

    class Slow(Logger):
        def log_hyperparams(self, params):
            clock.now += 0.25

    trainer = fit(Scaled(3), numbered(1), logger=Slow())
    found = {(x.owner, x.hook): (x.calls, x.seconds) for x in trainer.explain().hooks}
    assert found["Slow", "log_hyperparams"] == (1, 0.25)


def test_what_it_does_wrong_is_told_by_its_name():
    class Empty(Logger):
        def log_hyperparams(self):
            pass

    class Changes(Logger):
        def setup(self, trainer, module, stage):
            self.module = module

        def log_hyperparams(self, params):
            self.module.more = 3

    words = r"Empty\.log_hyperparams\(\).* is called with \(params\)\. Give it these"
    fit_refuses(ModuleError, words, logger=Empty())
    fit_refuses(StateError, r"Changes\.log_hyperparams changed the structure of Mean", logger=Changes())


def test_a_logger_without_hyperparameters_says_who_takes_them():
    refuses(
        LoggerError, lambda: Logger().log_hyperparams({"rate": 0.1}), "Logger cannot hold hyperparameters.*CSVLogger"
    )
    NoLogger().log_hyperparams({"rate": 0.1})
