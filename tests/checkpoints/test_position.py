"""What state.json may hold: numbers and names of the right kind, or it is refused by the place."""

import copy
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from kit.checkpoints import OLDER, edit, names, put, state_of, train

from jaxlit.checkpoints.position import Position, check_state
from jaxlit.errors import CheckpointError, DataError

SECTIONS = "format accumulate global_step epoch position loaders arrays optimizer metrics latest"
SECTIONS += " results log callbacks datamodule module strategy window_replicas processes"
# Of the kinds above, those that a section may be.
RIGHT = {f"{section} none" for section in ("latest", "window_replicas")}
RIGHT |= {f"{section} text" for section in ("optimizer", "strategy")} | {"datamodule object"}
RIGHT |= {f"{section} number" for section in ("accumulate", "window_replicas", "processes")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint after the first epoch; tests work on copies."""
    root = tmp_path_factory.mktemp("trained") / "run"
    train(root, 1)
    return root / "checkpoints" / OLDER


@pytest.fixture
def folder(trained):
    """A copy of the checkpoint, the only one of its run."""
    return Path(shutil.copytree(trained.parents[1], "run")) / "checkpoints" / OLDER


def refused(state, where):
    with pytest.raises(CheckpointError, match=f"^here{where}"):
        check_state(state, "here")


@pytest.fixture
def state(trained):
    return state_of(trained)


def test_the_schema_has_all_sections_and_allows_others(state):
    assert set(state) == set(SECTIONS.split())
    check_state(state | {"mine": object()}, "here")


def test_a_missing_or_wrong_section_is_refused_by_name(state):
    for section in SECTIONS.split():
        for kind, wrong in {"none": None, "list": [7], "text": "x", "number": 7, "object": {"x": 7}}.items():
            if f"{section} {kind}" in RIGHT:
                check_state(state | {section: wrong}, "here")
            elif section == "format":
                refused(state | {section: wrong}, " is of format")
            elif section in ("global_step", "epoch") and kind == "number":
                refused(state | {section: wrong}, f" has two values of '{section}', 7 and")
            else:
                refused(state | {section: wrong}, rf"\['{section}'\].* is .*which no checkpoint has there")
        less = {key: value for key, value in state.items() if key != section}
        refused(less, " is of format 1" if section == "format" else f" has no '{section}'")


def test_a_position_that_cannot_be_is_refused(state):
    for member in [f.name for f in fields(Position) if f.name not in ("data", "cut")]:
        right = state["position"].pop(member)
        refused(state, r"\['position'\] is ")
        for wrong in (None, "x", [], -1, 0.5, 10**30, float("nan"), True if member not in ("over", "validated") else 1):
            state["position"][member] = wrong
            refused(state, rf"\['position'\]\['{member}'\] is ")
        state["position"][member] = right


STATES, NOTE = ("loaders", "training", "states"), {"step": 1, "epoch": 0, "batches": [1, 2], "optimizer": []}
INSIDE = [
    (put("loaders", value={}), r"\['loaders'\] is {}"),
    (put(*STATES, value=[]), r"\['loaders'\] is "),
    (put(*STATES, 0, value=7), r"\['loaders'\]\['training'\]\['states'\]\[0\] is 7"),
    (put(*STATES, 0, "epoch", value="x"), r".*\['epoch'\] is 'x'"),
    (put(*STATES, 0, "fingerprint", value=7), r".*\['fingerprint'\] is 7"),
    (put("latest", "shape", value=[-2, -3]), r"\['latest'\]\['shape'\]\[0\] is -2"),
    (put("latest", "data", value=7), r"\['latest'\]\['data'\] is 7"),
    (put("metrics", 0, value={"name": 7}), r"\['metrics'\]\[0\] is "),
    (put("metrics", 0, "reduce_fx", value="median"), r"\['metrics'\]\[0\]\['reduce_fx'\] is 'median'"),
    (put("metrics", 0, "on_epoch", value=1), r"\['metrics'\]\[0\]\['on_epoch'\] is 1"),
    (put("results", 0, value=["a", {}, "b", None]), r"\['results'\]\[0\] is "),
    (put("log", "window", value=[["a", {"metric": {}}]]), r"\['log'\]\['window'\]\[0\]\[1\] is "),
    (put("callbacks", "ModelCheckpoint", value=7), r"\['callbacks'\]\['ModelCheckpoint'\] is 7"),
    (put("module", value={"hparams": {}}), r"\['module'\] is "),
    (put("hyperparams", value={"learning_rate": "0.1"}), r"\['hyperparams'\]\['learning_rate'\] is "),
    (put("arrays", 1, value=["module.bias", [1]]), r"\['arrays'\]\[1\] is "),
    (put("arrays", 1, 0, value=None), r"\['arrays'\]\[1\]\[0\] is None"),
    *[(put("arrays", 1, 1, value=x), r"\['arrays'\]\[1\]\[1\]") for x in ([-3], [4.5], "333", None, [2**53])],
    (lambda state: state["arrays"].append(state["arrays"][1]), r"\['arrays'\] is .*no checkpoint"),
    *[(put("not_finite", value=NOTE | x), r"\['not_finite'\]") for x in ({"step": -1}, {"batches": [1]}, {"more": 1})],
]


def test_what_is_wrong_inside_a_section_is_refused_by_its_place(state):
    for change, where in INSIDE:
        changed = copy.deepcopy(state)
        change(changed)
        refused(changed, where)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(folder):
    edit(folder, lambda state: state.pop("format"))
    words = r"state\.json.* is of format 1, .* reads format 3\. Continue from it with"
    with pytest.raises(CheckpointError, match=words):
        train("run", 2, resume=folder)


SAVER = ("callbacks", "ModelCheckpoint")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (put("optimizer", value="x"), CheckpointError, r"does not fit Linear:(?s:.*)the optimizer +x +\(TraceState"),
        (put("position", "over", value=True), CheckpointError, r"\[3, 1, 0\], but its arrays are at \[3, 0, 3\]"),
        (put(*STATES, 0, "at", value={"x": 1}), DataError, r"position {'x': 1} is not one of this loader's kind"),
        (put("latest", "data", value="!!!"), CheckpointError, r"0 bytes for an array of shape \(2, 4\)"),
        (put("latest", "shape", value=[2**40, 2**40]), CheckpointError, r"32 bytes for an array of shape \(1099511"),
        (put(*SAVER, "best_k_models", value=7), CheckpointError, r"ModelCheckpoint\.load_state_dict cannot .*Type"),
        (put(*SAVER, "last_model", value=["../out"]), CheckpointError, "cannot load .*TypeError"),
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
    told = {"last_model": "../victim", "newest_finite": str(victim), "best_model": "step_00000003/../../victim"}
    told |= {"replaced": [*told.values()]}
    edit(folder, lambda state: state["callbacks"]["ModelCheckpoint"].update(told))
    train("run", 2, resume="auto")
    assert (victim / "file").read_text() == "precious" and names() == [OLDER, "step_00000006"]
