"""What state.json may hold: whatever does not fit is one error before the first step, or the one before is taken."""

import copy
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.batches import random
from kit.checkpoints import NEWER, OLDER, bytes_of, data_of, edit, keep_all, names, put, seal, state_of, train
from kit.journal import hooks
from kit.modules import Linear
from kit.refusals import warnings_of
from kit.trainers import BARE, fit, thinned

from jaxlit.errors import CheckpointError, DataError

SECTIONS = "accumulate global_step epoch position loaders arrays optimizer metrics latest"
SECTIONS += " results row log callbacks datamodule module processes"
READ = (
    "position",
    "arrays",
    "epoch",
    "global_step",
    "loaders",
    "callbacks",
    "module",
    "processes",
)  # by all that reads
LEFT_OUT = object()
WRONG = (LEFT_OUT, None, "x", [7], {"x": 7}, 7, -1, 0.5, 10**30, [[["x"]]], ["a", {}])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two epochs; tests work on copies."""
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root, 2, keep_all())
    return root


@pytest.fixture
def newest(trained: Path) -> Path:
    return Path(shutil.copytree(trained, "run")) / "checkpoints" / NEWER


@pytest.fixture
def folder(newest: Path) -> Path:
    """The only checkpoint of its run."""
    shutil.rmtree(newest)
    return newest.with_name(OLDER)


def test_a_state_has_these_sections(trained: Path) -> None:
    assert set(state_of(trained / "checkpoints" / NEWER)) == set(SECTIONS.split())


def paths(value: Any, depth: int = 5) -> Iterator[tuple[Any, ...]]:
    """Return the paths of keys to all that is inside a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inside in members:
        yield (key,)
        yield from [(key, *path) for path in (paths(inside, depth - 1) if depth > 1 else ())]


def changed(state: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a state with another value at a path of keys, or without it."""
    state = copy.deepcopy(state)
    inside: Any = state
    for key in path[:-1]:
        inside = inside[key]
    if value is LEFT_OUT:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return state


def resume(path: Path) -> None:
    began: list[int] = []
    watch = hooks(on_train_batch_start=lambda t, *_: began.append(t.global_step))
    try:
        train("other", 3, watch, resume=path, **BARE)
    except CheckpointError:
        assert began == []
        raise


USES: dict[str, Callable[[Path], Any]] = {
    "resume": resume,
    "load_from_checkpoint": lambda path: Linear.load_from_checkpoint(path),
    "best": lambda path: Linear.load_from_checkpoint(path.parent / "best"),
    "init_from": lambda path: fit(Linear(), random(1), None, init_from=path, **BARE),
}
SHARES = 40
OFTEN = [("resume", "sections"), ("load_from_checkpoint", "sections"), ("best", "sections"), ("init_from", 0)]


@pytest.mark.parametrize(
    ("use", "share"),
    thinned(itertools.product(USES, ("sections", *range(SHARES))), *OFTEN, full=()),
)
def test_what_does_not_fit_is_one_error_before_a_step(use: str, share: Any, newest: Path) -> None:
    """Each member of the state, and what is inside of it, is left out, or of another kind; or it is not used."""
    state, refused = state_of(newest), 0
    every = [x for x in itertools.product(paths(state), WRONG) if x[0][:2] != ("module", "hparams") or len(x[0]) == 2]
    assert len(every) > 1000
    sections = [((name,), wrong) for name in SECTIONS.split() for wrong in WRONG[:3]]
    for path, value in sections if share == "sections" else every[share::SHARES]:
        (data_of(newest) / "state.json").write_text(json.dumps(changed(state, path, value)))
        seal(newest)
        try:
            USES[use](newest)
        except (CheckpointError, DataError):
            refused += 1
        shutil.rmtree("other", ignore_errors=True)
    assert refused > 10 or share != "sections" or use == "best"  # which takes the one before


@pytest.mark.parametrize("section", thinned(READ, *READ[:2], full=READ[2:]))
def test_the_one_before_is_taken_if_it_does_not_fit(section: str, newest: Path, caplog) -> None:
    (data_of(newest) / "state.json").write_text(json.dumps(changed(state_of(newest), (section,), LEFT_OUT)))
    seal(newest)
    whole = bytes_of(train("whole", 3))
    trainer = train("run", 3, keep_all(), resume="auto")
    assert trainer.global_step == 9 and bytes_of(trainer) == whole
    (told,) = warnings_of(caplog)
    assert told.startswith("A newer checkpoint was skipped.") and f"{newest}: its state is" in told


STATES, SAVER = ("loaders", "training", "states"), ("callbacks", "ModelCheckpoint")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (put("optimizer", value="x"), CheckpointError, r"does not fit Linear:(?s:.*)the optimizer +x +\(TraceState"),
        (put(*STATES, 0, "at", value={"x": 1}), DataError, r"position {'x': 1} is not one of this loader's kind"),
        (put("latest", "value", value="!!!"), CheckpointError, r"state\.json is no JSON: No data left in file"),
        (put("latest", value=[[1.0]]), CheckpointError, "its state is not what a checkpoint of this version has"),
        (put(*SAVER, "checkpoints", value=7), CheckpointError, r"ModelCheckpoint\.load_state_dict cannot .*Type"),
        (put(*SAVER, "checkpoints", 0, 0, value=["../out"]), CheckpointError, "cannot load .*TypeError"),
    ],
)
def test_a_lie_of_the_right_kind_is_refused_by_the_resume(change, error, words, folder):
    edit(folder, change)
    with pytest.raises(error, match=words):
        train("run", 2, resume=folder)
    assert names() == [OLDER]


def test_forged_names_in_a_state_delete_nothing_else(folder):
    victim = Path("run/victim").absolute()
    victim.mkdir()
    (victim / "file").write_text("precious")
    forged = ["../victim", str(victim), "step_00000003/../../victim"]
    told = {"checkpoints": [[name, 3, None, True] for name in forged], "replaced": forged, "best_model": forged[0]}
    edit(folder, lambda state: state["callbacks"]["ModelCheckpoint"].update(told))
    train("run", 2, resume="auto")
    # Its newest is not there: it writes the step again that training continues from, which step 6 then replaces.
    assert (victim / "file").read_text() == "precious" and names() == ["step_00000006"]
