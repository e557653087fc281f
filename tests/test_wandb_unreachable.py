"""Processes whose runs cannot be online: what is on the disk, and what the lines say of it."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from kit.processes import Ended, launch, say
from wandb_model import Line, data

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint, WandbLogger

QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}


class Checked(Line):
    def test_step(self, batch: Any) -> None:
        self.log("test/mean", batch["x"].mean())


class SaysItsRun(jl.Callback):
    def __init__(self, logger: WandbLogger) -> None:
        self.logger, self.runs = logger, list[Any]()

    def _note(self) -> None:
        run = self.logger.experiment
        self.runs.append(run and (run.id, run.group, run.offline))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._note()

    def on_test_end(self, trainer: Any, module: Any) -> None:
        self._note()


def train_and_test() -> None:
    logger = WandbLogger("project", init_timeout=1.0, finish_timeout=5.0, processes="shared")
    saw, several = SaysItsRun(logger), jax.process_count() > 1
    callbacks = [logger, saw, *([] if several else [ModelCheckpoint()])]
    kind = {"strategy": "ddp" if several else "single", "enable_checkpointing": not several}
    trainer = jl.Trainer(max_epochs=1, callbacks=callbacks, default_root_dir=Path("..") / "run", **kind, **QUIET)
    trainer.fit(Checked(rngs=nnx.Rngs(0)), data(), data())
    trainer.test(dataloaders=data())
    say("id", logger.id)
    say("runs", saw.runs)


def start(folder: Path, count: int, **environment: str) -> list[Ended]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(folder))
        for name in ("WANDB_SILENT", "WANDB_DIR"):
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        ended = launch(train_and_test, folder / "here", count=count, devices=4 // count, join=count > 1)
    assert [x.code for x in ended] == [0] * count, "".join(x.output + x.errors for x in ended)
    return ended


def lines(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if "W&B" in line]


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("unreachable")
    (ended,) = start(folder, 1, WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    return folder, ended


def test_what_could_not_be_opened_online_is_one_offline_run(unreachable: tuple[Path, Ended]) -> None:
    folder, ended = unreachable
    (fitted, tested), name = ended.said["runs"], ended.said["id"]
    assert fitted == tested == [fitted[0], "", True] and fitted[0] != name
    files = sorted(path.name for path in folder.glob("run/wandb/offline-run-*/*.wandb"))
    assert files == [f"run-{fitted[0]}.wandb"] * 2


def test_its_lines_say_how_each_part_gets_to_the_run_of_the_training(unreachable: tuple[Path, Ended]) -> None:
    folder, ended = unreachable
    fitted, tested = lines(ended)  # nothing of an id that is in use
    assert fitted.startswith("W&B offline (") and tested.startswith("W&B offline \N{MIDDLE DOT} ")
    told = [line.partition("wandb sync ")[2].split() for line in (fitted, tested)]
    assert [words[:2] for words in told] == [["--id", ended.said["id"]]] * 2
    found = {(folder / "here" / words[2]).resolve() for words in told}
    assert found == {path.resolve() for path in folder.glob("run/wandb/offline-run-*")} and len(found) == 2


def test_its_checkpoints_keep_the_id_of_the_training(unreachable: tuple[Path, Ended]) -> None:
    folder, ended = unreachable
    (state,) = folder.glob("run/checkpoints/step_*/state.json")
    assert json.loads(state.read_text())["callbacks"]["WandbLogger"] == {"id": ended.said["id"]}


def test_processes_that_cannot_share_a_run_have_one_each_in_a_group(tmp_path: Path) -> None:
    first, second = start(tmp_path, 2)
    name = first.said["id"]
    assert second.said["id"] == name
    for index, (ended, run) in enumerate(zip((first, second), (name, f"{name}-1"), strict=True)):
        assert ended.said["runs"] == [[run, name, True]] * 2, index
        told = lines(ended)
        assert len(told) == 2 and all("--id" not in line for line in told) and "No API key" in told[0]
    files = {path.name for path in tmp_path.glob("run/wandb/offline-run-*/*.wandb")}
    assert files == {f"run-{name}.wandb", f"run-{name}-1.wandb"}
