"""Writing and reading checkpoints: single cases, each with its own way to go wrong."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_checkpoint_cases import Line, Rising, data, fit, names, state_of, trainer_of

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.checkpoints import files as checkpoint
from jaxlit.checkpoints import manifest
from jaxlit.checkpoints.folder_lock import FolderLock
from jaxlit.errors import CheckpointError, NonFiniteError

# What is written --------------------------------------------------------------------------------------


class Keeps(jl.Callback):
    """Has a state of some size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def state_dict(self) -> dict[str, Any]:
        return {"text": "a" * self.size}


def test_a_state_that_could_not_be_read_again_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_JSON", 30_000)
    fit(root="small", callbacks=Keeps(10))
    assert names("small/checkpoints") == ["step_00000016"]
    with pytest.raises(CheckpointError, match="bytes as JSON, and only 30000 are read"):
        fit(callbacks=Keeps(30_000))
    assert names() == []


def test_a_hook_may_put_a_metric_of_the_validation_into_the_checkpoint() -> None:
    class Put(jl.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = trainer.callback_metrics["val/loss"]

    trainer = fit(Rising(), callbacks=Put())
    assert state_of(trainer.checkpoint_callback.last_model_path)["mine"] == 16.0


def test_hyperparameters_with_numbers_as_keys_do_not_stop_training() -> None:
    class Named(Line):
        def __init__(self, classes: dict[int, str], width: int = 2) -> None:
            super().__init__(width)

    path = fit(Named({0: "cat", 1: "dog"}, 3)).checkpoint_callback.last_model_path
    loaded = Named.load_from_checkpoint(path, classes={})
    assert loaded.w[...].shape == (3,)


def test_a_checkpoint_of_a_sanity_check_holds_no_validation() -> None:
    class Save(jl.Callback):
        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if trainer.sanity_checking:
                trainer.save_checkpoint("sanity")

    class Ends(jl.Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.steps.append(trainer.global_step)

    fit(root="whole", callbacks=Save())
    ends = Ends()
    fit(callbacks=ends, ckpt_path="sanity")
    assert ends.steps == [8, 16]


def test_a_step_that_was_not_finite_leaves_no_name_of_a_checkpoint() -> None:
    callback = ModelCheckpoint(every_n_train_steps=4)
    with pytest.raises(NonFiniteError):
        fit(Line(bad_step=3), callbacks=callback)
    assert callback.last_model_path == "" and names() == []


@pytest.mark.parametrize(("good", "expected"), [(1, ""), (2, "step_00000008")])  # the first is before training
def test_a_state_dict_that_raises_leaves_the_name_of_what_was_written(good: int, expected: str) -> None:
    class Raises(jl.Callback):
        count = 0

        def state_dict(self) -> dict[str, Any]:
            self.count += 1
            if self.count > good:
                raise ValueError("mine")
            return {}

    callback = ModelCheckpoint(on_save_error="warn", every_n_epochs=1)
    with pytest.raises(ValueError, match="mine"):
        fit(callbacks=[Raises(), callback])
    assert Path(callback.last_model_path).name == expected
    assert names() == [expected] * bool(expected)


def test_after_a_second_fit_that_failed_in_its_setup_the_state_of_the_first_can_be_saved() -> None:
    class Bad(jl.DataModule):
        def setup(self, stage: str) -> None:
            raise ValueError("no data")

    module = Line()
    trainer = fit(module)
    with pytest.raises(ValueError, match="no data"):
        trainer.fit(Line(), datamodule=Bad())
    trainer.save_checkpoint("kept")
    assert state_of("kept")["global_step"] == 16
    assert np.array_equal(Line.load_from_checkpoint("kept").w[...], module.w[...])


@pytest.mark.parametrize("on_save_error", ["raise", "warn"])
def test_a_name_that_is_too_long_for_the_disk(on_save_error: str, caplog: pytest.LogCaptureFixture) -> None:
    callback = ModelCheckpoint(filename="x" * 260, on_save_error=on_save_error)
    if on_save_error == "raise":
        with pytest.raises(CheckpointError, match="(?i)too long"):
            fit(callbacks=callback)
    else:
        assert fit(callbacks=callback).global_step == 16
        assert "too long" in caplog.text
    assert callback.last_model_path == "" and names() == []


def test_a_module_that_brings_a_model_checkpoint_has_no_other_one_beside_it() -> None:
    mine = ModelCheckpoint(monitor="val/loss")

    class Brings(Rising):
        def configure_callbacks(self) -> list[Any]:
            return [mine]

    trainer = fit(Brings())
    assert [c for c in trainer.callbacks if isinstance(c, ModelCheckpoint)] == [mine]
    assert Path(mine.best_model_path).name == "step_00000008"


# What is deleted --------------------------------------------------------------------------------------


def test_an_old_checkpoint_that_cannot_be_deleted_is_only_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError("busy")

    monkeypatch.setattr(checkpoint, "remove", refuse)
    assert fit(callbacks=ModelCheckpoint(every_n_epochs=1)).global_step == 16
    assert "step_00000008 could not be deleted: busy" in caplog.text
    assert names() == ["step_00000008", "step_00000016"]


def test_only_what_checkpoints_have_left_is_swept() -> None:
    mine = [".tmp-step_00000004-9bf84c46", ".trash-step_00000004-9bf84c46"]
    others = [".tmp-precious", ".trash-1000"]
    for name in (*mine, *others):
        Path("shared", name).mkdir(parents=True)
        Path("shared", name, "file").write_text("x")
    fit(callbacks=ModelCheckpoint(dirpath="shared"))
    left = [path.name for path in Path("shared").iterdir()]
    assert {*others} <= {*left} and not {*mine} & {*left}
    assert all(Path("shared", name, "file").read_text() == "x" for name in others)


@pytest.mark.parametrize("epochs", [2, 3])  # nothing is left to do, or an epoch
def test_an_old_checkpoint_that_a_crash_has_kept_is_deleted_after_the_resume(epochs: int) -> None:
    with jl.testing.faults("counted") as seen:
        fit(root="counted")
    ended = [i for i, (what, path) in enumerate(seen.operations, 1) if what == "os.rename" and "/step_" in path]
    with pytest.raises(jl.testing.Crash, match="os.rename .*step_00000008"), jl.testing.faults("run", at=ended[0]):
        fit()
    assert names() == ["step_00000008", "step_00000016"]
    fit(resume="auto", max_epochs=epochs)
    assert names() == [f"step_{8 * epochs:08d}"]


# What is read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_training_in_bfloat16_can_be_loaded_and_validated(precision: str) -> None:
    trained = fit(precision="bf16-true")
    path = trained.checkpoint_callback.last_model_path
    weights = np.asarray(trained.module.w[...]).astype(np.float32)
    assert not np.array_equal(weights, np.ones(2))
    loaded = Line.load_from_checkpoint(path)
    assert np.array_equal(np.asarray(loaded.w[...]).astype(np.float32), weights)
    (found,) = trainer_of("other", precision=precision).validate(Line(), data(2), ckpt_path=path)
    # bfloat16 has 8 bits.
    expected = np.mean(np.arange(8, dtype=np.float32) / 10) + weights[0]
    assert found["val/loss"] == pytest.approx(expected, rel=1e-6 if precision == "32-true" else 2**-7)


def test_a_list_that_is_read_while_training_replaces_what_is_on_it_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fit(callbacks=ModelCheckpoint(every_n_epochs=1, save_top_k=-1))
    folder = Path("run/checkpoints")
    (folder / "step_00000016").rename("later")
    read = checkpoint.read

    def racing(path: Path) -> Any:
        if Path("later").exists():
            Path("later").rename(folder / "step_00000016")
            shutil.rmtree(folder / "step_00000008")
        return read(path)

    monkeypatch.setattr(checkpoint, "read", racing)
    found, _ = checkpoint.newest(folder)
    assert found is not None and found.path.name == "step_00000016"


def test_keys_with_dots_are_not_those_of_a_dict_inside_a_dict() -> None:
    class Dicts(Line):
        def __init__(self, outer: float, inner: float) -> None:
            super().__init__()
            below = nnx.Dict({"b": nnx.Param(jnp.full(2, inner))})
            self.d = nnx.Dict({"a.b": nnx.Param(jnp.full(2, outer)), "a": below})

    path = fit(Dicts(1.0, 0.0)).checkpoint_callback.last_model_path
    loaded, resumed = Dicts.load_from_checkpoint(path, outer=5.0, inner=7.0), Dicts(5.0, 7.0)
    fit(resumed, max_epochs=3, resume="auto")
    for module in (loaded, resumed):
        assert np.array_equal(module.d["a.b"][...], [1, 1]) and np.array_equal(module.d["a"]["b"][...], [0, 0])


def test_a_constructor_that_takes_any_number_of_arguments_is_called_with_all_of_them() -> None:
    class Sizes(Line):
        def __init__(self, first: int, *sizes: int, last: int = 0) -> None:
            super().__init__(first + sum(sizes) + last)
            self.made = (first, sizes, last)

    path = fit(Sizes(1, 2, 3, last=4)).checkpoint_callback.last_model_path
    assert Sizes.load_from_checkpoint(path).made == (1, (2, 3), 4)


def _seal(folder: Path, files: dict[str, Any]) -> None:
    canonical: Callable[[Any], bytes] = lambda x: json.dumps(x, sort_keys=True, separators=(",", ":")).encode()  # noqa: E731
    body = {"format": "jaxlit", "format_version": 1, "order": 1, "files": files}
    body["digest"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / "MANIFEST.json").write_bytes(canonical(body))


@pytest.mark.parametrize("listed", [[], ["state.json"]])
def test_a_link_to_arrays_elsewhere_that_the_manifest_does_not_name_is_refused(listed: list[str]) -> None:
    path = Path(fit().checkpoint_callback.last_model_path)
    forged = Path("forged/step_00000016")
    forged.mkdir(parents=True)
    (forged / "arrays").symlink_to(path / "arrays")
    state = (path / "state.json").read_bytes()
    (forged / "state.json").write_bytes(state)
    _seal(forged, {name: [len(state), hashlib.sha256(state).hexdigest()] for name in listed})
    with pytest.raises(CheckpointError, match="arrays is not in its manifest|state.json is not in its manifest"):
        Line.load_from_checkpoint(forged)


# Who writes -------------------------------------------------------------------------------------------

HOLDER = """
import os, signal, sys
from pathlib import Path
from jaxlit.checkpoints.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    os.read(0, 1)  # until the test closes it
    os._exit(0)
print(child, flush=True)
signal.pause()
"""


def test_a_child_that_a_killed_training_has_forked_does_not_keep_its_folder(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    folder = tmp_path / "held"
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], env=environment, text=True, **pipes) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        try:
            child = int(holder.stdout.readline())
            with pytest.raises(CheckpointError, match=f"in use by process {holder.pid}"):
                FolderLock(folder)
            holder.kill()
            holder.wait(30)
            os.kill(child, 0)  # it lives
            FolderLock(folder).close()
        finally:
            holder.kill()
            holder.stdin.close()


@pytest.mark.parametrize(
    ("count", "code", "fails"), [(2, errno.ESTALE, False), (9, errno.ESTALE, True), (1, errno.EIO, True)]
)
def test_an_error_that_passes_is_waited_for_and_no_other(
    count: int,
    code: int,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left, rename = [OSError(code, "the file system is busy")] * count, os.rename

    def flaky(source: Any, target: Any) -> None:
        if Path(target).name == "kept" and left:
            raise left.pop()
        rename(source, target)

    trainer = trainer_of(max_steps=1, enable_checkpointing=False)
    trainer.fit(Line(), data())
    monkeypatch.setattr(os, "rename", flaky)
    monkeypatch.setattr(manifest, "_WAITS_S", (0.0, 0.0, 0.0))
    if fails:
        with pytest.raises(CheckpointError, match="the file system is busy"):
            trainer.save_checkpoint(tmp_path / "kept")
        assert not (tmp_path / "kept").exists()
    else:
        trainer.save_checkpoint(tmp_path / "kept")
        assert checkpoint.read(tmp_path / "kept").state["global_step"] == 1
    assert caplog.text.count("trying again") == {2: 2, 9: 3, 1: 0}[count]
