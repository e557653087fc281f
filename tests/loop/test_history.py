"""What a Trainer keeps of its rows, against a loop by hand; bounded, without a host read, and drawn."""

import numpy as np
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer

from jaxlit.errors import ArgumentError, LoggerError
from jaxlit.loop.results import MOST, History


def test_it_has_every_row_of_the_newest_fit_and_fit_returns_none():
    trainer = make_trainer(**BARE, log_every_n_steps=1, max_epochs=2)
    assert len(trainer.history) == 0
    assert trainer.fit(Mean(), numbered(2), numbered(1)) is None
    assert {name: [*steps] for name, (steps, _) in trainer.history.items()} == {
        "loss": [0, 1, 2, 3],
        "lr": [0, 1, 2, 3],
        "val": [1, 3],
    }
    losses = [(n - mean([[k] for k in (1, 2, 1, 2)[:i]])) ** 2 for i, n in enumerate((1, 2, 1, 2))]
    assert trainer.history["loss"][1].tolist() == losses
    weights = [mean([[1], [2]] * epochs) for epochs in (1, 2)]
    assert trainer.history["val"][1].tolist() == [1 - w for w in weights]
    trainer.validate(Mean(), numbered(1))  # of another module, after the fit
    assert trainer.history["val"][1].tolist() == [1 - w for w in weights]
    trainer.max_epochs = 1
    trainer.fit(Mean(), numbered(1))
    assert [*trainer.history] == ["loss", "lr"] and trainer.history["loss"][0].tolist() == [0]
    with pytest.raises(KeyError, match="Did you mean 'loss'"):
        trainer.history["los"]


def test_history_thins_out_when_it_has_too_many_rows():
    history = History()
    for step in range(4 * MOST):
        history.add({"x": -step}, step)
    steps, values = history["x"]
    assert MOST / 2 < len(steps) <= MOST and {*np.diff(steps)} == {4} and steps[0] == 0
    assert (values == -steps).all() and steps[-1] >= 4 * MOST - 4


def test_what_is_undone_is_forgotten():
    history = History()
    for step in range(5):
        history.add({"x": step}, step)
    history.add({"y": 9}, 4)
    history.clear(3)
    assert [*history] == ["x"] and history["x"][0].tolist() == [0, 1, 2]
    history.add({"x": 7}, 3)
    assert history["x"][1].tolist() == [0, 1, 2, 7]
    for step in range(4, MOST + 1):  # from now on every second is kept
        history.add({"x": step}, step)
    history.clear(6)
    for step in range(6, 11):
        history.add({"x": step}, step)
    assert history["x"][0].tolist() == [0, 2, 4, 6, 8, 10]


def test_curves_whose_names_end_alike_share_a_picture(monkeypatch):
    history = History()
    refuses(ArgumentError, history.plot, "There is none: call self.log in a step")
    for step in range(3):
        history.add({"train/loss": 2.0 * step, "val/loss": 5.0, "accuracy": 0.5}, step)
    figure = history.plot()
    drawn = [[(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] for axes in figure.axes]
    curve = [[[k, y(k)] for k in range(3)] for y in (lambda k: 2.0 * k, lambda k: 5.0, lambda k: 0.5)]
    assert drawn == [[("train/loss", curve[0]), ("val/loss", curve[1])], [("accuracy", curve[2])]]
    assert len(history.plot(["accuracy"]).axes) == 1
    refuses(KeyError, lambda: history.plot(["gone"]), "No row has 'gone'")
    assert history._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert history._repr_png_() is None
    refuses(LoggerError, history.plot, r"pip install matplotlib")


@pytest.mark.parametrize(
    ("batches", "arguments", "steps"),
    [
        (16, {}, [1, 3, 5, 7, 9, 11, 13, 15]),
        (16, {"accumulate_grad_batches": 2}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, {}, [0, 1, 2]),
        (450, {"max_steps": 120}, [49, 99]),
        (450, {}, [49, 99, 149, 199, 249, 299, 349, 399, 449]),
    ],
)
def test_by_default_an_epoch_has_eight_rows_or_more(batches, arguments, steps):
    assert fit(Mean(), numbered(batches), **BARE, **arguments).history["loss"][0].tolist() == steps
