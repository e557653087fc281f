"""Real trainings whose W&B runs a real server on this computer has received."""

import importlib.metadata
import io
import json
import os
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from kit.journal import hooks, without_rates
from kit.processes import say
from kit.wandb_backend import Backend
from kit.wandb_runs import PIXELS, STEP, Wide, by_hand, data, files_of, lines_of, rows_of, start, trainer_of
from matplotlib.figure import Figure
from PIL import Image

from jaxlit.callbacks import GradientNorm, ModelCheckpoint, WandbLogger


def log_media(trainer, module):
    logger, picture = trainer.loggers[0], PIXELS.copy()
    logger.log_image("image", picture)
    picture[:] = 0
    logger.log_image("two", [Image.fromarray(PIXELS), PIXELS + 1], caption=["first", "second"])
    logger.log_table("table", ["name", "value"], [("one", 1), [2, "two"], [None, 2.5]])
    logger.log_histogram("histogram", np.array([[0.0, 1.0, 1.0], [4.0, np.nan, np.inf]]), bins=4)
    logger.log_text("note", "a text")
    logger.log_text("note", "another", step=7)
    figure = Figure(figsize=(2, 1), dpi=100, facecolor="#ff0000")
    logger.log_figure("figure", figure)
    figure.set_facecolor("#00ff00")
    logger.log_hyperparams({"later": 1, "hf_token": "planted"})


def fit_and_test_with_everything():
    given = {"name": "shown", "group": "group", "job_type": "train", "tags": ["a", "b"], "notes": "why"}
    config = {"extra": {"size": 3, "password": "planted"}, "strategy": "theirs"}
    logger = WandbLogger("project", **given, config=config, log_model="all", watch="all", watch_every_n_steps=2)
    # At the same steps, so with the same names; what they know of themselves is different.
    first = ModelCheckpoint("A", monitor="val/loss", save_top_k=-1)
    second = ModelCheckpoint("B", monitor="val/other", mode="max", save_top_k=-1)  # by which the last is the best
    callbacks = [logger, hooks(on_train_end=log_media), GradientNorm(), first, second]
    trainer = trainer_of(*callbacks, max_epochs=3, default_root_dir="whole")
    trainer.fit(Wide(), data(), data())
    trainer.test(dataloaders=data())
    say("id", logger.id)
    for name, log_model in (("kept", True), ("best", "best"), ("refused", "best")):
        logger = WandbLogger("project", id=name, log_model=log_model)
        trainer = trainer_of(logger, ModelCheckpoint(monitor="val/loss"), max_epochs=3, default_root_dir=name)
        trainer.fit(Wide(), data(), data())


def joined(rows):
    """Return rows as the file has them: one for each step and epoch, with six digits."""
    result = []
    for exact in rows:
        row = {name: x if x % 1 == 0 else float(f"{x:.6g}") for name, x in exact.items()}
        same = result and all(result[-1].get(name) == row.get(name) for name in ("step", "epoch"))
        result[-1:] = [result[-1] | row] if same else [*result[-1:], row]
    return result


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What a server has of these trainings, and what they left and printed."""
    folder = tmp_path_factory.mktemp("served")
    with Backend() as backend:
        backend.refused = "refused"
        (ended,) = start(fit_and_test_with_everything, folder, log_to=backend)
        assert (ended.code, ended.errors) == (0, ""), ended.output + ended.errors
    run, lines = backend.runs[ended.said["id"]], lines_of(folder / "whole")
    losses = [row["val/loss"] for row in rows_of(run) if "val/loss" in row]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    return SimpleNamespace(folder=folder, backend=backend, ended=ended, run=run, lines=lines, losses=losses)


@pytest.mark.full
def test_every_row_arrives_and_a_test_after_the_fit_adds_its_own(served):
    (expected, grads, _), rows, run = by_hand(3), rows_of(served.run), served.run
    assert joined(rows) == served.lines
    norms = [row.pop("grad_norm") for row in rows if "grad_norm" in row]
    assert norms == pytest.approx([float(np.linalg.norm(grad)) for grad in grads], rel=1e-4)
    expected.append({"step": 5, "epoch": 3, "test/loss": served.losses[-1]})
    for row, wanted in zip(rows, expected, strict=True):
        assert without_rates(row) == pytest.approx(wanted, rel=1e-4)
    assert (run.sessions, run.resumed, run.exit_code) == (2, True, 0)


@pytest.mark.full
def test_the_run_has_its_description_config_and_best_values(served):
    run, config = served.run, dict(served.run.config)
    given = {"project": "project", "display_name": "shown", "group": "group", "job_type": "train", "notes": "why"}
    assert {name: getattr(run, name) for name in given} == given and sorted(run.tags) == ["a", "b"]
    assert not [name for name in run.files if "meta" in name], "the command line was sent"
    trainer, versions = config.pop("trainer"), config.pop("versions")
    assert (trainer["max_epochs"], trainer["strategy"], trainer["resume"]) == (3, "single", None)
    assert trainer["callbacks"][:2] == ["WandbLogger", "Made"]
    assert versions == {name: importlib.metadata.version(name) for name in ("jax", "flax", "optax", "jaxlit")}
    # The user's own names stay theirs.
    assert config.pop("strategy") == "theirs" and config.pop("jaxlit/strategy").startswith("SingleDevice")
    mesh = {"mesh": {"data": 1}, "devices": {"kind": "cpu", "count": 1, "processes": 1}, "num_params": 120}
    secrets = {"api_key": "<redacted>", "extra": {"size": 3, "password": "<redacted>"}, "hf_token": "<redacted>"}
    assert config == mesh | secrets | {"width": 3, "later": 1}
    worst, best = served.losses[-1], served.losses[0]
    expected = {"val/loss": {"min": best, "last": worst}, "val/other": {"max": worst, "last": worst}}
    expected |= {"val/score": -worst, "best/val/loss": best, "best/val/other": worst, "test/loss": worst}
    expected["best/checkpoint"] = "step_00000002"
    assert {name: run.summary[name] for name in expected} == expected


@pytest.mark.full
def test_media_arrive_as_they_were_when_logged(served):
    def pixels(path):
        with Image.open(io.BytesIO(served.run.files[path])) as image:
            return np.asarray(image)

    result = {key: value for row in served.run.history for key, value in row.items()}
    for name, expected in (("image", [PIXELS]), ("two", [PIXELS, PIXELS + 1])):
        for path, picture in zip(result[name]["filenames"], expected, strict=True):
            np.testing.assert_array_equal(pixels(path), picture, err_msg=name)
    assert result["two"]["captions"] == ["first", "second"]
    figure = pixels(result["figure"]["filenames"][0])
    assert figure.shape[:2] == (100, 200) and (figure[..., :3] == [255, 0, 0]).all()
    table = json.loads(served.run.files[result["table"]["path"]])
    assert (table["columns"], table["data"]) == (["name", "value"], [["one", 1], [2, "two"], [None, 2.5]])
    assert (result["histogram"]["values"], result["histogram"]["bins"]) == ([1, 2, 0, 1], [0.0, 1.0, 2.0, 3.0, 4.0])
    assert [(row["note"], row[STEP]) for row in served.run.history if "note" in row] == [("a text", 5), ("another", 7)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_watched_histograms_are_those_of_numpy(served, kind):
    rows = [row for row in served.run.history if f"{kind}/kernel" in row]
    assert [row[STEP] for row in rows] == [1, 3, 5]
    _, grads, params = by_hand(3)
    for row in rows:
        entry, values = row[f"{kind}/kernel"], (grads if kind == "gradients" else params)[row[STEP]]
        counts, edges = np.histogram(values, 64)
        # No entry is so near to an edge that rounding could count it elsewhere.
        assert np.sort(np.abs(values.reshape(-1, 1) - edges[1:-1]).ravel())[0] > 1e-5 * (edges[-1] - edges[0])
        np.testing.assert_allclose(entry["bins"], edges, rtol=1e-4, atol=1e-5 * np.abs(edges).max())
        assert entry["values"] == counts.tolist()


@pytest.mark.full
def test_every_checkpoint_arrives_byte_for_byte(served):
    artifacts = served.backend.models_of(served.run.id)
    for writer, (name, monitor, best) in {"A": ("", "val/loss", 1), "B": ("-1", "val/other", 3)}.items():
        mine = [artifact for artifact in artifacts if artifact.name == f"model-{served.run.id}{name}"]
        for epoch, (artifact, score) in enumerate(zip(mine, served.losses, strict=True), start=1):
            name = f"step_{2 * epoch:08}"
            assert artifact.committed and artifact.files == files_of(served.folder / writer / name)
            # By which the last is the best, each is the best when it is written.
            assert {*artifact.aliases} == {name, "latest", *(["best"] if best == 3 or epoch == 1 else [])}
            assert artifact.metadata == {"step": 2 * epoch, "epoch": epoch, "monitor": monitor, "score": score}
    assert len(artifacts) == 6


@pytest.mark.full
def test_log_model_chooses_the_checkpoints(served):
    both = {"step_00000002": ["best"], "step_00000006": []}
    for name, expected in (("kept", both), ("best", {"step_00000002": ["best"]})):
        artifacts = served.backend.models_of(name)
        # The SDK itself makes the last that is sent the latest.
        assert [{*a.aliases} for a in artifacts] == [{step, "latest", *marks} for step, marks in expected.items()]
        for artifact, step in zip(artifacts, expected, strict=True):
            assert artifact.files == files_of(served.folder / name / "checkpoints" / step) and artifact.committed
    (artifact,) = served.backend.models_of("refused")
    assert not artifact.committed and served.backend.runs["refused"].exit_code == 0
    (told,) = [line for line in served.ended.output.splitlines() if "W&B" in line and not line.startswith("W&B http")]
    assert told.startswith("W&B: step_00000002 was not sent (") and "CommitArtifact fails on request" in told


def fit_or_go_on():
    def die(trainer, *rest):
        if not begun[0] and trainer.global_step == 5:
            trainer.checkpoint_callback.finish(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    begun = []
    kills = hooks(on_train_start=lambda trainer, module: begun.append(trainer.global_step), on_train_batch_end=die)
    saves = ModelCheckpoint(every_n_train_steps=2)
    trainer = trainer_of(WandbLogger("project"), saves, kills, max_epochs=4, resume="auto")
    trainer.fit(Wide(), data(), data())


@pytest.mark.full
def test_a_killed_training_goes_on_in_its_run(tmp_path):
    with Backend() as backend:
        (killed,) = start(fit_or_go_on, tmp_path, log_to=backend)
        assert killed.code == -signal.SIGKILL, killed.output + killed.errors
        (again,) = start(fit_or_go_on, tmp_path, log_to=backend)
        assert (again.code, again.errors) == (0, ""), again.output + again.errors
    ((name, run),) = backend.runs.items()
    (state, *_) = tmp_path.glob("run/checkpoints/step_*/*/state.json")
    assert json.loads(state.read_text())["callbacks"]["WandbLogger"] == {"id": name}
    assert (run.sessions, run.resumed, run.exit_code) == (2, True, 0)
    lines, rows = lines_of(tmp_path / "run"), joined(rows_of(run))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6, 7]
    # It continues at step 4; what the killed process had not sent is in the files only.
    tail = [line for line in lines if line["step"] >= 4]
    assert rows[-len(tail) :] == tail
    for row, line in zip([row for row in rows[: -len(tail)] if row["step"] < 4], lines, strict=False):
        assert row.items() <= line.items()
