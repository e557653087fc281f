"""The closing lines of ProgressBar."""

from pathlib import Path

import pytest

from jaxlit.callbacks import Logger, ModelCheckpoint, ProgressBar


def fit(trainer, bar, *, epochs=2):
    trainer.start(bar)
    for epoch in range(epochs):
        trainer.train_epoch(bar, val={"val/loss": 0.5 / (epoch + 1)})
    trainer.end(bar)


def monitoring(trainer):
    """Give a Trainer a ModelCheckpoint that has written nothing yet."""
    checkpoint = ModelCheckpoint(monitor="val/loss")
    trainer.checkpoint_callbacks = trainer.callbacks = [checkpoint]
    return checkpoint


def written(checkpoint, folder, *, best=None, last):
    """Make a ModelCheckpoint one that has written checkpoints of these steps."""
    place = lambda step: str(folder / "checkpoints" / f"step_{step:08d}")  # noqa: E731
    if best is not None:
        checkpoint.best_k_models = {place(best[0]): best[1]}
    checkpoint.last_model_path = place(last)


def closing(text):
    """Return the closing lines by their first word."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(("done", "ended", "interrupted")))
    return {line.split()[0]: " ".join(line.split()) for line in lines[start:]}


def test_the_closing_lines_come_when_the_last_checkpoint_is_written(make_trainer, capsys):
    trainer, bar = make_trainer(), ProgressBar()
    checkpoint = monitoring(trainer)
    trainer.start(bar)
    trainer.train_epoch(bar, val={"val/loss": 0.5})
    bar.on_train_end(trainer, trainer.module)
    assert "done" not in capsys.readouterr().out
    written(checkpoint, trainer.run_dir, best=(4, 0.5), last=4)
    bar.on_fit_end(trainer, trainer.module)
    bar.teardown(trainer, trainer.module, "fit")
    said = closing(capsys.readouterr().out)
    assert said["done"].startswith("done 1 epoch · 4 steps · ") and said["done"].endswith("best val/loss 0.5 at step 4")
    assert said["checkpoint"] == "checkpoint run/checkpoints/step_00000004 (best, last)"


def test_the_closing_lines_say_why_training_was_stopped(make_trainer, capsys):
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    trainer.train_epoch(bar)
    trainer.stop("the loss is flat")
    trainer.end(bar)
    assert closing(capsys.readouterr().out)["done"].endswith(" · the loss is flat")


def test_the_closing_lines_name_a_better_checkpoint_from_within_an_epoch(make_trainer, capsys):
    trainer, bar = make_trainer(), ProgressBar()
    checkpoint = monitoring(trainer)
    trainer.start(bar)
    trainer.train_epoch(bar, val={"val/loss": 0.5})
    written(checkpoint, trainer.run_dir, best=(2, 0.4), last=4)
    trainer.end(bar)
    assert closing(capsys.readouterr().out)["done"].endswith("best val/loss 0.4 at step 2")


@pytest.mark.parametrize("how", ["error", "interrupt"])
def test_a_training_that_was_ended_says_how_to_go_on(make_trainer, capsys, how):
    trainer, bar = make_trainer(run_dir=Path("run")), ProgressBar()
    checkpoint = monitoring(trainer)
    trainer.start(bar)
    trainer.train_epoch(bar, val={"val/loss": 0.5})
    bar.on_train_epoch_start(trainer, trainer.module)
    trainer.global_step += 1
    if how == "error":
        bar.on_exception(trainer, trainer.module, KeyError("x"))
        assert "ended" not in capsys.readouterr().out  # ModelCheckpoint may still write one
    else:
        trainer.interrupted = True
        bar.on_train_epoch_end(trainer, trainer.module)
        trainer.current_epoch += 1  # the Trainer's epoch after one that was cut
        bar.on_train_end(trainer, trainer.module)
    written(checkpoint, trainer.run_dir.absolute(), best=(4, 0.5), last=5)
    if how == "interrupt":
        bar.on_fit_end(trainer, trainer.module)
    bar.teardown(trainer, trainer.module, "fit")
    text = capsys.readouterr().out
    assert f"{'ended by KeyError' if how == 'error' else 'interrupted'} in epoch 2 · 5 steps · " in text
    assert text.count("run/checkpoints/step_00000005 (last)") == 1
    assert closing(text)["resume"] == "resume Trainer(resume='run')"


def test_an_error_before_the_first_step_has_no_closing_lines(make_trainer, capsys):
    trainer, bar = make_trainer(), ProgressBar()
    trainer.start(bar)
    capsys.readouterr()
    bar.on_exception(trainer, trainer.module, KeyError("x"))
    bar.teardown(trainer, trainer.module, "fit")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"max_epochs": 2}, "Trainer(resume='run', max_epochs=...)"),
        ({"max_epochs": None, "max_steps": 8}, "Trainer(resume='run', max_steps=...)"),
        ({"max_epochs": None}, "Trainer(resume='run')"),
        ({"max_epochs": 2, "resume": "auto"}, "run the same command with a larger max_epochs"),
        ({"max_epochs": 2, "resume": "auto", "interrupted": True}, "run the same command again"),
    ],
)
def test_how_to_resume_is_what_would_train_on(make_trainer, capsys, attributes, said):
    trainer = make_trainer(run_dir=Path("run"), **attributes)
    written(monitoring(trainer), Path("run").absolute(), last=8)
    fit(trainer, ProgressBar())
    assert closing(capsys.readouterr().out)["resume"] == f"resume {said}"


def test_checkpoints_elsewhere_are_resumed_from_there(make_trainer, capsys):
    trainer = make_trainer(run_dir=Path("run"), max_epochs=5)
    checkpoint = ModelCheckpoint(dirpath="kept")
    trainer.checkpoint_callbacks, checkpoint.last_model_path = [checkpoint], str(Path("kept/step_00000008").absolute())
    fit(trainer, ProgressBar())
    assert closing(capsys.readouterr().out)["resume"] == "resume Trainer(resume='kept/step_00000008')"


def test_without_checkpoints_nothing_can_be_resumed(make_trainer, capsys):
    fit(make_trainer(), ProgressBar())
    assert list(closing(capsys.readouterr().out)) == ["done"]


def test_the_time_of_compiling_is_told_apart(make_trainer, capsys):
    trainer = make_trainer(compile_seconds={"train_step": 60.0, "eval_step": 90.0})
    fit(trainer, ProgressBar())
    assert "s (0:02:30 compiling)" in closing(capsys.readouterr().out)["done"]


def test_a_report_is_where_each_logger_says(make_trainer, capsys):
    class Somewhere(Logger):
        def __init__(self, location):
            self.place = location

        @property
        def location(self):
            return self.place

    places = ["https://example.org/run/1", str(Path("run/metrics.csv").absolute()), None]
    trainer = make_trainer(loggers=[Somewhere(place) for place in places])
    fit(trainer, ProgressBar())
    assert closing(capsys.readouterr().out)["report"] == "report https://example.org/run/1 · run/metrics.csv"
