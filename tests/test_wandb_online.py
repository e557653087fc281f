"""Real trainings whose W&B runs a real server on this computer has received."""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.processes import Ended, say
from PIL import Image
from wandb_backend import Backend, ReceivedArtifact, ReceivedRun
from wandb_model import Line, data
from wandb_runs import QUIET, STEP, files_of, lines_of, rows_of, start

import jaxlit as jl
from jaxlit.callbacks import GradientNorm, ModelCheckpoint, WandbLogger

PIXELS = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)
NOISE = np.random.default_rng(3)
INPUTS, START = NOISE.normal(size=(32, 40)).astype(np.float32), NOISE.normal(size=(40, 3)).astype(np.float32)
LR = 20.0  # too much: losses grow, and the best one is the first


class Wide(jl.TrainModule):
    """A product whose gradients have many entries."""

    def __init__(self, width: int = 3, api_key: str = "planted", *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jnp.asarray(START))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.kernel[...]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch: Any) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(LR)


# What the processes do ---------------------------------------------------------------------------------


class Media(jl.Callback):
    """Logs one of everything at the end of training."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        from matplotlib.figure import Figure

        (logger,) = (c for c in trainer.callbacks if isinstance(c, WandbLogger))
        logger.log_image("image", PIXELS)
        logger.log_table("table", ["name", "value"], [["one", 1], ["two", 2]])
        logger.log_figure("figure", Figure(figsize=(2, 1), dpi=100, facecolor="#ff0000"))
        logger.log_histogram("histogram", [0.0, 1.0, 1.0, 2.0], bins=2)
        logger.log_text("text", "some words")


def train_whole_and_others() -> None:
    """Train with everything and test; then some short trainings with other artifacts."""
    logger = WandbLogger(
        "project",
        name="shown",
        group="group",
        job_type="train",
        tags=["a", "b"],
        notes="why",
        config={"extra": {"size": 3, "password": "planted"}},
        log_model="all",
        watch="all",
        watch_every_n_steps=2,
    )
    callbacks = [logger, Media(), GradientNorm(), ModelCheckpoint(monitor="val/loss", save_top_k=-1)]
    trainer = jl.Trainer(strategy="single", max_epochs=3, callbacks=callbacks, default_root_dir="whole", **QUIET)
    loader = lambda: jl.ArrayLoader({"x": INPUTS}, 16)  # noqa: E731
    trainer.fit(Wide(rngs=nnx.Rngs(0)), loader(), loader())
    trainer.test(dataloaders=loader())
    say("id", logger.id)
    for name, log_model in (("kept", True), ("best", "best"), ("refused", "best")):
        trainer = jl.Trainer(
            strategy="single",
            max_epochs=3,
            callbacks=[WandbLogger("project", id=name, log_model=log_model), ModelCheckpoint(monitor="val/loss")],
            default_root_dir=name,
            **QUIET,
        )
        trainer.fit(Line(rngs=nnx.Rngs(0)), data(), data())
        say(name, trainer.global_step)


# What the server has -----------------------------------------------------------------------------------


class Refusing(Backend):
    """A server that refuses the artifacts of the run "refused"."""

    def _operate(self, request: dict[str, Any], client: str) -> dict[str, Any]:
        owner = (request.get("variables") or {}).get("artifactID")
        refused = owner is not None and self.artifacts[int(owner)].run_id == "refused"
        self.fail_operations = {"CommitArtifact"} if refused else set()
        return super()._operate(request, client)


@dataclass(frozen=True)
class Served:
    folder: Path
    backend: Backend
    ended: Ended

    @property
    def run(self) -> ReceivedRun:
        return self.backend.runs[self.ended.said["id"]]

    def artifacts(self, run_id: str) -> list[ReceivedArtifact]:
        return [a for a in self.backend.artifacts if a.run_id == run_id and a.type == "model"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with Refusing() as backend:
        (ended,) = start(train_whole_and_others, folder, backend)
        assert (ended.code, ended.errors) == (0, ""), ended.output + ended.errors
        yield Served(folder, backend, ended)


def by_hand() -> tuple[list[float], list[float], list[np.ndarray], list[np.ndarray]]:
    """Return the losses of training and of validation, and the gradients and parameters of each step."""
    x, kernel = INPUTS.astype(np.float64), START.astype(np.float64)
    losses, validations, grads, params = [], [], [], []
    for step in range(6):
        batch = x[16 * (step % 2) :][:16]
        losses.append(float(np.mean((batch @ kernel) ** 2)))
        params.append(kernel)
        grads.append(2 * batch.T @ (batch @ kernel) / (16 * 3))
        kernel = kernel - LR * grads[-1]
        if step % 2:
            validations.append(float(np.mean((x @ kernel) ** 2)))
    return losses, validations, grads, params


def test_every_row_arrives(served: Served) -> None:
    rows, (losses, validations, grads, _) = rows_of(served.run), by_hand()
    assert rows == lines_of(served.folder / "whole")
    steps = [0, 1, 1, 2, 3, 3, 4, 5, 5]
    assert [(row["step"], row["epoch"]) for row in rows] == [*((step, step // 2) for step in steps), (5, 3)]
    norms = [float(np.linalg.norm(grad)) for grad in grads]
    expected = {"train/loss": losses, "val/loss": validations, "grad_norm": norms, "test/loss": validations[-1:]}
    for name, values in expected.items():
        assert [row[name] for row in rows if name in row] == pytest.approx(values, rel=1e-4)


def test_a_test_after_the_fit_adds_its_row_to_the_run(served: Served) -> None:
    assert ["test/loss" in row for row in rows_of(served.run)] == [False] * 9 + [True]
    assert (served.run.sessions, served.run.resumed, served.run.exit_code) == (2, True, 0)
    assert served.run.summary["test/loss"] == lines_of(served.folder / "whole")[-1]["test/loss"]


def test_the_run_holds_its_description_and_config(served: Served) -> None:
    run = served.run
    named = (run.project, run.display_name, run.group, run.job_type, run.notes, sorted(run.tags))
    assert named == ("project", "shown", "group", "train", "why", ["a", "b"])
    config = run.config
    assert (config["width"], config["api_key"]) == (3, "<redacted>")
    assert config["extra"] == {"size": 3, "password": "<redacted>"}
    assert (config["mesh"], config["num_params"], config["versions"]["jax"]) == ({"data": 1}, 120, jax.__version__)
    assert (config["trainer"]["max_epochs"], config["trainer"]["strategy"]) == (3, "single")


def test_the_summary_holds_the_best_values(served: Served) -> None:
    losses = [row["val/loss"] for row in lines_of(served.folder / "whole") if "val/loss" in row]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    summary = served.run.summary
    assert summary["val/loss"] == {"min": losses[0], "last": losses[-1]}
    assert (summary["best/val/loss"], summary["best/checkpoint"]) == (losses[0], "step_00000002")


def test_images_figures_tables_histograms_and_texts_arrive(served: Served) -> None:
    found = {key: value for row in served.run.history for key, value in row.items()}
    with Image.open(io.BytesIO(served.run.files[found["image"]["filenames"][0]])) as image:
        np.testing.assert_array_equal(np.asarray(image), PIXELS)
    with Image.open(io.BytesIO(served.run.files[found["figure"]["path"]])) as figure:
        pixels = np.asarray(figure)
    assert pixels.shape[:2] == (100, 200) and (pixels[..., :3] == [255, 0, 0]).all()
    table = json.loads(served.run.files[found["table"]["path"]])
    assert (table["columns"], table["data"]) == (["name", "value"], [["one", 1], ["two", 2]])
    assert (found["histogram"]["values"], found["histogram"]["bins"]) == ([1, 3], [0.0, 1.0, 2.0])
    assert found["text"] == "some words"


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_watched_histograms_are_those_of_numpy(served: Served, kind: str, step: int) -> None:
    rows = [row for row in served.run.history if f"{kind}/kernel" in row]
    assert [row[STEP] for row in rows] == [1, 3, 5]
    (entry,) = [row[f"{kind}/kernel"] for row in rows if row[STEP] == step]
    _, _, grads, params = by_hand()
    values = (grads if kind == "gradients" else params)[step]
    counts, edges = np.histogram(values, 64)
    # No entry is so near to an edge that rounding could count it elsewhere.
    assert np.sort(np.abs(values.reshape(-1, 1) - edges[1:-1]).ravel())[0] > 1e-5 * (edges[-1] - edges[0])
    np.testing.assert_allclose(entry["bins"], edges, rtol=1e-4, atol=1e-5 * np.abs(edges).max())
    assert entry["values"] == counts.tolist()


def test_every_checkpoint_arrives_byte_for_byte(served: Served) -> None:
    losses = [row["val/loss"] for row in lines_of(served.folder / "whole") if "val/loss" in row]
    artifacts = served.artifacts(served.run.id)
    for epoch, artifact in enumerate(artifacts, start=1):
        name = f"step_{2 * epoch:08}"
        assert artifact.files == files_of(served.folder / "whole" / "checkpoints" / name)
        assert set(artifact.aliases) == {name, "latest", *(["best"] if epoch == 1 else [])}
        score = losses[epoch - 1]
        assert artifact.metadata == {"step": 2 * epoch, "epoch": epoch, "monitor": "val/loss", "score": score}
        assert artifact.name == f"model-{served.run.id}" and artifact.committed
    assert len(artifacts) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kept", {"step_00000002": ["best"], "step_00000006": []}), ("best", {"step_00000002": ["best"]})],
)
def test_log_model_chooses_the_checkpoints(served: Served, name: str, expected: dict[str, list[str]]) -> None:
    artifacts = served.artifacts(name)
    # The SDK itself makes the last that is sent the latest.
    assert [set(a.aliases) for a in artifacts] == [{step, "latest", *marks} for step, marks in expected.items()]
    for artifact, step in zip(artifacts, expected, strict=True):
        assert artifact.files == files_of(served.folder / name / "checkpoints" / step) and artifact.committed


def test_a_refused_artifact_is_said_in_one_line_and_training_succeeds(served: Served) -> None:
    assert served.ended.said["refused"] == 6 and served.backend.runs["refused"].exit_code == 0
    (artifact,) = served.artifacts("refused")
    assert not artifact.committed
    told = [line for line in served.ended.output.splitlines() if "W&B" in line and not line.startswith("W&B http")]
    assert len(told) == 1 and told[0].startswith("W&B: step_00000002 was not sent (")
    assert "CommitArtifact fails on request" in told[0]


def test_nothing_of_what_was_copied_for_an_upload_is_left(served: Served) -> None:
    for name in ("whole", "kept", "best"):
        folder = served.folder / name / "checkpoints"
        assert [path.name for path in folder.iterdir() if not path.name.startswith(("step_", ".lock"))] == []
