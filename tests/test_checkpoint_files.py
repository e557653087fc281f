"""Damage on the disk: every file of a checkpoint, in every way, is noticed, named and gone around."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.checkpoints import files as checkpoint
from jaxlit.checkpoints import manifest
from jaxlit.errors import CheckpointError

OLDER, NEWER = "step_00000003", "step_00000006"


class Mean(jl.TrainModule):
    """Learns the mean of its data."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(3))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.25)


def fit(root: Path, max_epochs: int = 3, *, ckpt_path: Any = None, max_steps: int = -1, **arguments: Any) -> jl.Trainer:
    """Train three steps an epoch, with a checkpoint after each that is never deleted."""
    rows = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    arguments = {"default_root_dir": root, "max_epochs": max_epochs, "max_steps": max_steps} | arguments
    quiet = {"strategy": "single", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = jl.Trainer(callbacks=jl.callbacks.ModelCheckpoint(save_top_k=-1), **quiet, **arguments)
    trainer.fit(Mean(), jl.ArrayLoader({"x": rows}, 8, shuffle=True), ckpt_path=ckpt_path)
    return trainer


def state_of(trainer: jl.Trainer) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(trainer.state)]


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[bytes]]:
    """The states of trainings that nothing has interrupted, by their number of epochs."""
    return {n: state_of(fit(tmp_path_factory.mktemp("whole"), n)) for n in (1, 2, 3)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints; tests work on copies of it."""
    root = tmp_path_factory.mktemp("trained") / "run"
    fit(root, 2)
    assert sorted(p.name for p in (root / "checkpoints").iterdir() if p.is_dir()) == [OLDER, NEWER]
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def files_of(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# The damages: a function of the file's bytes, or of its path ------------------------------------------


def flip(data: bytes, at: int, bits: int = 1) -> bytes:
    return data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :] if data else data


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def into_link(path: Path) -> None:
    """Put a link to the same bytes, outside of the checkpoint, in the place of a file."""
    away = path.parents[len(path.parts) - path.parts.index("checkpoints") - 1] / "away"
    path.rename(away)
    path.symlink_to(away)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda x: b"",
    "one byte less": lambda x: x[:-1],
    "half": lambda x: x[: len(x) // 2],
    "one byte more": lambda x: x + b"\0",
    "first byte": lambda x: flip(x, 0),
    "middle byte": lambda x: flip(x, len(x) // 2),
    "last byte": lambda x: flip(x, len(x) - 1),
}
PATHS: dict[str, Callable[[Path], None]] = {"deleted": Path.unlink, "a folder": into_folder, "a link": into_link}


def damage(path: Path, how: str) -> bool:
    """Damage a file; tells whether that changed it: orbax writes an empty one too."""
    if how in PATHS:
        PATHS[how](path)
        return True
    data = path.read_bytes()
    path.write_bytes(BYTES[how](data))
    return BYTES[how](data) != data


@pytest.mark.parametrize("how", [*BYTES, *PATHS])
def test_damage_of_any_file_of_the_newest_is_noticed_named_and_gone_around(
    how: str, trained: Path, tmp_path: Path, states: dict[int, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    names, damaged = files_of(trained / "checkpoints" / NEWER), 0
    assert {"MANIFEST.json", "state.json"} < set(names) and len(names) > 5
    for i, name in enumerate(names):
        root = Path(shutil.copytree(trained, tmp_path / str(i)))
        newest = root / "checkpoints" / NEWER
        if not damage(newest / name, how):
            continue
        damaged += 1
        with pytest.raises(CheckpointError) as raised:
            checkpoint.read(newest)
        assert name in str(raised.value) and str(newest) in str(raised.value), f"{how}: {name}"
        caplog.clear()
        # Were the newest one taken, its two epochs would be more than the one asked for.
        trainer = fit(root, 1, resume="auto")
        assert (trainer.current_epoch, trainer.global_step) == (1, 3)
        assert state_of(trainer) == states[1]
        (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
        assert str(raised.value) in warning.getMessage()
    assert damaged >= len(names) - 1


@pytest.mark.parametrize("kept", ["in the checkpoint", "outside"])
def test_a_folder_of_a_checkpoint_that_became_a_link_is_noticed(root: Path, kept: str) -> None:
    newest = root / "checkpoints" / NEWER
    away = (newest if kept == "in the checkpoint" else root) / "moved"
    (newest / "arrays").rename(away)
    (newest / "arrays").symlink_to(away)
    with pytest.raises(CheckpointError, match="arrays"):
        checkpoint.read(newest)


def test_flipped_bytes_all_over_the_manifest_are_noticed(root: Path) -> None:
    newest = root / "checkpoints" / NEWER
    path = newest / "MANIFEST.json"
    data = path.read_bytes()
    for at in range(0, len(data), 5):  # each one of a small manifest is below
        # A letter of a hash in the other case is the same number, and still other bytes.
        path.write_bytes(flip(data, at, 0x20 if data[at : at + 1].isalpha() else 1 << at % 8))
        with pytest.raises(CheckpointError, match=r"MANIFEST\.json|newer jaxlit"):
            checkpoint.read(newest)
    path.write_bytes(data)
    checkpoint.read(newest)


def test_every_flipped_bit_cut_or_space_in_a_small_manifest_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    manifest.seal(tmp_path, 7)
    path = tmp_path / "MANIFEST.json"
    data = path.read_bytes()
    manifest.verify(tmp_path)
    assert len(data) < 300
    for at in range(len(data)):
        for changed in (*(flip(data, at, 1 << bit) for bit in range(8)), data[:at], data[:at] + b" " + data[at:]):
            path.write_bytes(changed)
            with pytest.raises(CheckpointError):
                manifest.verify(tmp_path)


# What is begun with -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json", "arrays/state/manifest.ocdbt"])
@pytest.mark.parametrize("how", ["deleted", "half", "middle byte"])
def test_training_behind_a_damaged_checkpoint_ends_as_if_it_had_been_whole_and_replaces_it(
    name: str, how: str, root: Path, states: dict[int, list[bytes]]
) -> None:
    newest = root / "checkpoints" / NEWER
    damage(newest / name, how)
    trainer = fit(root, resume="auto")
    assert trainer.global_step == 9 and state_of(trainer) == states[3]
    assert checkpoint.read(newest).state["global_step"] == 6
    again = fit(root, resume="auto")
    assert again.global_step == 9 and state_of(again) == states[3]


@pytest.mark.parametrize("how", [*BYTES, *PATHS])
@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
def test_a_named_checkpoint_that_is_damaged_is_an_error_though_an_older_one_is_whole(
    argument: str, how: str, root: Path
) -> None:
    newest = root / "checkpoints" / NEWER
    damage(newest / "state.json", how)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        fit(root, **{argument: newest})


def test_when_no_checkpoint_verifies_training_is_refused_and_does_not_start(root: Path) -> None:
    began: list[str] = []

    class Watch(jl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            began.append("training")

    damage(root / "checkpoints" / OLDER / "state.json", "half")
    damage(root / "checkpoints" / NEWER / "MANIFEST.json", "deleted")
    before = files_of(root)
    for arguments in ({"resume": "auto"}, {"resume": root}, {"ckpt_path": "last", "max_epochs": 3}):
        with pytest.raises(CheckpointError) as raised:
            fit(root, **arguments)
        for part in (OLDER, NEWER, "state.json", "MANIFEST.json is missing"):
            assert part in str(raised.value)
    assert began == [] and files_of(root) == before


@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_an_explicit_run_folder_is_tried_from_the_newest_to_the_oldest(
    inside: str, argument: str, root: Path, states: dict[int, list[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(root.parent / "other", 2, **{argument: root / inside})
    assert trainer.global_step == 6 and state_of(trainer) == states[2] and not caplog.records
    damage(root / "checkpoints" / NEWER / "state.json", "middle byte")
    trainer = fit(root.parent / "third", 1, **{argument: root / inside})
    assert trainer.global_step == 3 and state_of(trainer) == states[1]
    assert NEWER in caplog.text and "state.json" in caplog.text


@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("run/checkpoints/step_00000007", NEWER),
        ("run/checkpoints/step_3", OLDER),
        ("rum", "run"),
        ("run/chekpoints", "Did you mean 'checkpoints'"),
    ],
)
def test_a_path_that_is_not_there_is_an_error_that_lists_what_is_near(
    typo: str, near: str, argument: str, root: Path
) -> None:
    with pytest.raises(CheckpointError) as raised:
        fit(root.parent / "other", **{argument: root.parent / typo})
    said = str(raised.value).replace(str(root.parent / typo), "")
    assert argument in said and (near or "checkpoints") in said


def test_auto_in_an_empty_folder_begins_anew_and_says_so(
    tmp_path: Path, states: dict[int, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert state_of(fit(tmp_path / "new", 1, resume="auto")) == states[1]
    said = capsys.readouterr()
    assert "no checkpoint" in said.out + said.err and "anew" in said.out + said.err


# Which is the newest ----------------------------------------------------------------------------------


def test_the_newest_is_what_was_written_last_whatever_the_clock_has_noted(
    root: Path, states: dict[int, list[bytes]]
) -> None:
    for path in [root / "checkpoints" / OLDER, *(root / "checkpoints" / OLDER).rglob("*")]:
        os.utime(path, (4e9, 4e9))
    for path in [root / "checkpoints" / NEWER, *(root / "checkpoints" / NEWER).rglob("*")]:
        os.utime(path, (1, 1))
    trainer = fit(root, 2, resume="auto")
    assert trainer.global_step == 6 and state_of(trainer) == states[2]


@pytest.mark.parametrize("argument", ["resume", "ckpt_path"])
def test_a_shorter_history_that_was_written_later_is_the_newest(
    argument: str, root: Path, states: dict[int, list[bytes]]
) -> None:
    fit(root, max_steps=4, **{argument: root / "checkpoints" / OLDER})
    names = sorted(p.name for p in (root / "checkpoints").iterdir() if p.is_dir())
    assert names == [OLDER, "step_00000004", NEWER]
    found, skipped = checkpoint.newest(root / "checkpoints")
    assert found is not None and found.path.name == "step_00000004" and skipped == []
    trainer = fit(root, resume="auto")
    assert trainer.global_step == 9 and state_of(trainer) == states[3]


def test_a_copied_run_goes_on_from_the_same_checkpoint_under_another_name(
    root: Path, states: dict[int, list[bytes]]
) -> None:
    moved = root.rename(root.with_name("elsewhere"))
    trainer = fit(moved, resume="auto")
    assert state_of(trainer) == states[3]
    best = trainer.checkpoint_callback
    assert best is not None and Path(best.last_model_path).parent == moved / "checkpoints"
