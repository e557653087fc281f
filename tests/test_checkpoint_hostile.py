"""A stranger's checkpoint supplies numbers and names, nothing else: what it asks for beyond is refused."""

import ast
import base64
import contextlib
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import fields
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
from jaxlit.checkpoints.position import Position
from jaxlit.errors import CheckpointError, JaxlitError

NAME = "step_00000003"


class Mean(jl.TrainModule):
    """Learns the mean of its data."""

    def __init__(self, size: int = 3, scale: Any = 1.0) -> None:
        self.w = nnx.Param(jnp.zeros(size))
        self.scale = scale if isinstance(scale, float) else 1.0

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.w[...] - self.scale * batch["x"]) ** 2)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.25)


def make_data() -> jl.ArrayLoader:
    return jl.ArrayLoader({"x": np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)}, 8, shuffle=True)


class Bounded(jl.Callback):
    """Ends a training that a hostile checkpoint has made endless."""

    def __init__(self) -> None:
        self.count = 0

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.count += 1
        assert self.count < 20, "training goes on and on"

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.on_train_epoch_end(trainer, module)


def fit(root: Path, max_epochs: int = 2, **arguments: Any) -> jl.Trainer:
    quiet = {"strategy": "single", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"default_root_dir": root, "max_epochs": max_epochs, "callbacks": [Bounded()]} | arguments
    trainer = jl.Trainer(enable_checkpointing=True, **quiet, **arguments)
    trainer.fit(Mean(), make_data())
    return trainer


def state_of(trainer: jl.Trainer) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(trainer.state)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The state at the end of a training that nothing has interrupted."""
    return state_of(fit(tmp_path_factory.mktemp("whole")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("trained") / "run"
    fit(root, 1)
    return root / "checkpoints" / NAME


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy of a good checkpoint, the only one of its run."""
    return Path(shutil.copytree(trained.parents[1], tmp_path / "run")) / "checkpoints" / NAME


def resume(folder: Path) -> jl.Trainer:
    return fit(folder.parents[1], resume=folder)


# A manifest as documented, made here, so that only the hostile thing about a checkpoint is wrong -------


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def seal(folder: Path, entries: dict[str, Any] | None = None, **changed: Any) -> None:
    """Write a manifest that fits the files, with some entries and members as told."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "MANIFEST.json":
            data = path.read_bytes()
            files[path.relative_to(folder).as_posix()] = [len(data), hashlib.sha256(data).hexdigest()]
    body = {"format": "jaxlit", "format_version": 1, "order": 1, "files": {**files, **(entries or {})}} | changed
    body["digest"] = hashlib.sha256(canonical(body)).hexdigest()
    (folder / "MANIFEST.json").write_bytes(canonical(body))


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what state.json says, and seal the checkpoint again."""
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    seal(folder)


def test_the_seal_made_here_is_the_one_that_is_verified(folder: Path, whole: list[bytes]) -> None:
    edit(folder, lambda state: None)
    with (Path(shutil.copytree(folder, folder.parent / "copy")) / "state.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.read(folder.parent / "copy")
    shutil.rmtree(folder.parent / "copy")
    assert state_of(resume(folder)) == whole


# The manifest -----------------------------------------------------------------------------------------

OUTSIDE = ["/etc/passwd", "../outside", "arrays/../../outside", "a//b", "/", "", ".", "./state.json", "arrays/.."]
OUTSIDE += ["..\\outside", "arrays\\x", "C:\\outside", "C:/outside", "a\0b", "arrays/", "state.json/", "file:///x"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_that_is_not_plainly_inside_is_refused_though_such_a_file_exists(name: str, folder: Path) -> None:
    data = b"outside"
    (folder.parent / "outside").write_bytes(data)
    seal(folder, {name: [len(data), hashlib.sha256(data).hexdigest()]})
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json names"):
        checkpoint.read(folder)


def test_an_absolute_name_of_a_file_inside_is_refused(folder: Path) -> None:
    data = (folder / "state.json").read_bytes()
    seal(folder, {str(folder / "state.json"): [len(data), hashlib.sha256(data).hexdigest()]})
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json names"):
        checkpoint.read(folder)


@pytest.mark.parametrize("name", ["state.json", "arrays", "arrays/state/manifest.ocdbt"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_link_is_refused_wherever_it_leads(name: str, inside: bool, folder: Path) -> None:
    target = (folder if inside else folder.parent) / "target"
    (folder / name).rename(target)
    seal(folder)  # as if there had never been another file; the names behind the link come next
    manifest = json.loads((folder / "MANIFEST.json").read_text())["files"]
    (folder / name).symlink_to(target)
    found = [p for p in (target.rglob("*") if target.is_dir() else [target]) if p.is_file()]
    for path in found:
        data, relative = path.read_bytes(), path.relative_to(target).as_posix()
        manifest[name if relative == "." else f"{name}/{relative}"] = [len(data), hashlib.sha256(data).hexdigest()]
    seal(folder, manifest)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        checkpoint.read(folder)


@pytest.mark.parametrize(
    "entry",
    [
        *([size, "x"] for size in (-1, 1e3, True, None, "3", 10**30, [3], float("nan"), float("inf"))),
        *([3], [3, "x", 1], [3, 7], [3, None], None, 7, "x", {}, {"0": 3, "1": "x"}),
    ],
    ids=repr,
)
def test_an_entry_with_no_size_and_hash_is_refused(entry: Any, folder: Path) -> None:
    seal(folder, {"state.json": entry})
    with pytest.raises(CheckpointError, match=r"state\.json"):
        checkpoint.read(folder)


@pytest.mark.parametrize(
    "changed",
    [{"format_version": v} for v in ("1", 1.0, True, None, [1], float("nan"))]
    + [{"format": v} for v in (None, "orbax", 7)]
    + [{"files": v} for v in (None, [], "x", 7)]
    + [{"digest": None}],
    ids=repr,
)
def test_a_manifest_with_a_member_of_the_wrong_kind_is_refused(changed: dict[str, Any], folder: Path) -> None:
    seal(folder, **changed)
    if "digest" in changed:
        body = json.loads((folder / "MANIFEST.json").read_text()) | changed
        (folder / "MANIFEST.json").write_bytes(canonical(body))
    with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
        checkpoint.read(folder)


@pytest.mark.parametrize("version", [2, 3, 10**30])
def test_a_newer_format_is_refused_with_the_way_out(version: int, folder: Path) -> None:
    seal(folder, format_version=version)
    with pytest.raises(CheckpointError, match=rf"newer jaxlit, in format {version}.*Update jaxlit"):
        resume(folder)


@pytest.mark.parametrize("version", [0, -1])
def test_a_format_that_never_was_is_refused(version: int, folder: Path) -> None:
    seal(folder, format_version=version)
    with pytest.raises(CheckpointError):
        checkpoint.read(folder)


@pytest.mark.parametrize("order", [None, "1", 1.5, True, [], float("nan"), 10**30, -5])
def test_a_strange_order_neither_raises_from_inside_nor_hides_the_checkpoint(order: Any, folder: Path) -> None:
    seal(folder, order=order)
    assert [path.name for path in checkpoint.candidates(folder.parent)] == [NAME]
    try:
        found, _ = checkpoint.newest(folder.parent)
        assert found is not None and found.path == folder
        fit(folder.parents[1], resume="auto")  # writes one of a larger order, if it can
    except JaxlitError:
        return
    assert checkpoint.newest(folder.parent)[0].state["epoch"] == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["state.json", "arrays/state/manifest.ocdbt", "arrays/_CHECKPOINT_METADATA"])
def test_a_file_that_the_manifest_does_not_vouch_for_is_not_read(name: str, folder: Path) -> None:
    files = json.loads((folder / "MANIFEST.json").read_text())["files"]
    del files[name]
    seal(folder, files=files)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        checkpoint.read(folder)


# JSON -------------------------------------------------------------------------------------------------

DEEP = b"[" * 200_000 + b"]" * 200_000
TEXTS: dict[str, bytes] = {
    "a list": b"[]",
    "null": b"null",
    "a number": b"1",
    "nothing": b"",
    "no JSON": b"{'a': 1}",
    "no text": b"\xff\xfe\x00",
    "nested deeply": b'{"a":' + DEEP + b"}",
    "a number of 10000 digits": b'{"a":' + b"9" * 10_000 + b"}",
    "a pickle": pickle.dumps({"a": 1}),
    "two objects": b"{}{}",
}


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_what_is_no_json_object_is_refused_by_name(text: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(text)
    if name == "state.json":
        seal(folder)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        checkpoint.read(folder)


@pytest.mark.parametrize("name", ["MANIFEST.json", "state.json"])
def test_json_of_100_mb_is_refused_before_it_is_read(name: str, folder: Path) -> None:
    size = 100 * 2**20
    with (folder / name).open("wb") as file:
        file.truncate(size)  # takes no room
    if name == "state.json":
        digest = hashlib.sha256()
        for _ in range(100):
            digest.update(bytes(2**20))
        (folder / name).rename(folder.parent / "large")
        seal(folder, {name: [size, digest.hexdigest()]})
        (folder.parent / "large").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"{size} bytes, more than"):
        checkpoint.read(folder)


@pytest.mark.parametrize("member", ['"order":1', '"format_version":1', '"files":{}', '"format":"jaxlit"'])
def test_a_manifest_that_says_a_thing_twice_is_refused(member: str, folder: Path) -> None:
    text = (folder / "MANIFEST.json").read_text()
    for changed in ("{" + member + "," + text[1:], text[:-1] + "," + member + "}"):
        (folder / "MANIFEST.json").write_text(changed)
        with pytest.raises(CheckpointError, match=r"MANIFEST\.json"):
            checkpoint.read(folder)


# The state --------------------------------------------------------------------------------------------

SECTIONS = "format accumulate global_step epoch position loaders evaluation arrays optimizer metrics latest pending"
SECTIONS += " results log callbacks datamodule module strategy window_replicas processes"
WRONG: dict[str, Any] = {"none": None, "list": [7], "text": "x", "number": 7, "object": {"x": 7}}


def test_the_sections_below_are_all_that_there_are(trained: Path) -> None:
    assert set(json.loads((trained / "state.json").read_text())) == set(SECTIONS.split())


def refused_or_harmless(folder: Path, whole: list[bytes]) -> None:
    """Resume: either jaxlit refuses, or training ends as it would have from the true checkpoint."""
    try:
        trainer = resume(folder)
    except JaxlitError as error:
        assert str(error)
        return
    assert state_of(trainer) == whole
    assert (trainer.global_step, trainer.current_epoch) == (6, 2)
    assert set(os.listdir(folder.parent)) - {".lock", NAME} == {"step_00000006"}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("section", SECTIONS.split())
def test_a_section_of_the_wrong_type_is_refused_or_harmless(
    section: str, wrong: Any, folder: Path, whole: list[bytes]
) -> None:
    edit(folder, lambda state: state.update({section: wrong}))
    refused_or_harmless(folder, whole)


@pytest.mark.parametrize("section", SECTIONS.split())
def test_a_section_that_is_missing_is_refused_or_harmless(section: str, folder: Path, whole: list[bytes]) -> None:
    edit(folder, lambda state: state.pop(section))
    refused_or_harmless(folder, whole)


def test_a_checkpoint_of_another_format_is_refused_by_its_number(folder: Path) -> None:
    old = {"begun": True, "starting": False, "left": 0, "ended": 0, "cut": False}
    edit(folder, lambda state: (state.pop("format"), state["position"].update(old)))
    with pytest.raises(
        CheckpointError, match=r"state\.json.* is of format 1, .* reads format 2\. Go on from it with the"
    ):
        resume(folder)


# A batch behind the end of its epoch is a position too: training must not wait for it for ever.
POSITION = [f.name for f in fields(Position) if f.name not in ("data",)]


@pytest.mark.parametrize("wrong", [None, "x", [], -1, 0.5, 7, 10**30, float("nan")], ids=repr)
@pytest.mark.parametrize("member", POSITION)
def test_a_position_that_cannot_be_is_refused_or_harmless(
    member: str, wrong: Any, folder: Path, whole: list[bytes]
) -> None:
    edit(folder, lambda state: state["position"].update({member: wrong}))
    refused_or_harmless(folder, whole)


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        inside: Any = state
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = value

    return change


INSIDE = {
    "an unknown position": put("position", "surprise", value=1),
    "no loader state": put("loaders", value={}),
    "a loader's states": put("loaders", "training", "states", value=[]),
    "a loader's state": put("loaders", "training", "states", 0, value=7),
    "a loader's epoch": put("loaders", "training", "states", 0, "epoch", value="x"),
    "a loader's fingerprint": put("loaders", "training", "states", 0, "fingerprint", value=7),
    "a loader's place": put("loaders", "training", "states", 0, "at", value={"x": 1}),
    "base64 garbage": put("latest", "data", value="!!!"),
    "base64 of another length": put("latest", "data", value=base64.b64encode(b"123").decode()),
    "a giant shape": put("latest", "shape", value=[2**40, 2**40]),
    "a negative shape": put("latest", "shape", value=[-2, -3]),
    "a shape of text": put("latest", "shape", value=["a", "b"]),
    "a pending row": put("pending", value=[{"shape": [1], "data": "AAAA"}, {"a": "b"}, "c"]),
    "a metric": put("metrics", 0, value={"name": 7, "surprise": 1}),
    "a result": put("results", 0, value=["a", {}, "b", None]),
    "a log": put("log", "window", value=[["a", {"metric": {}}]]),
    "an evaluation": put("evaluation", value={"loader": "x"}),
    "a callback's state": put("callbacks", "ModelCheckpoint", value=7),
    "a callback's best": put("callbacks", "ModelCheckpoint", "best_k_models", value=7),
    "a callback's last": put("callbacks", "ModelCheckpoint", "last_model", value=["../../outside"]),
    "a callback's seen": put("callbacks", "ModelCheckpoint", "seen", value=[]),
    "a callback's step": put("callbacks", "ModelCheckpoint", "step", value="x"),
}


@pytest.mark.parametrize("change", INSIDE.values(), ids=INSIDE)
def test_what_is_wrong_inside_a_section_is_refused_or_harmless(
    change: Callable[[dict[str, Any]], None], folder: Path, whole: list[bytes]
) -> None:
    edit(folder, change)
    refused_or_harmless(folder, whole)


@pytest.mark.parametrize("key", ["last_model", "newest_finite", "best_model"])
def test_the_names_of_checkpoints_in_a_callbacks_state_delete_nothing_else(key: str, folder: Path) -> None:
    victim = folder.parents[1] / "victim"
    victim.mkdir()
    (victim / "file").write_text("precious")
    for name in ("../victim", str(victim), "step_00000003/../../victim"):
        edit(folder, put("callbacks", "ModelCheckpoint", key, value=name))
        copy = Path(shutil.copytree(folder.parents[1], folder.parents[2] / "copy"))
        with contextlib.suppress(JaxlitError):
            fit(copy, resume="auto")
        assert (victim / "file").read_text() == (copy / "victim" / "file").read_text() == "precious"
        shutil.rmtree(copy)


# Arrays -----------------------------------------------------------------------------------------------


def spec(name: str, at: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        (found,) = [x for x in state["arrays"] if x[0] == name]
        found[at] = value

    return change


LIES = {
    f"{name} {what}": spec(name, at, value)
    for name in ("module.w", "opt_state[0].mu.w", "counters", "sums")
    for what, at, value in [
        ("a giant shape", 1, [2**40]),
        ("a giant table", 1, [4, 2**50]),
        ("a negative shape", 1, [-3]),
        ("another rank", 1, [3, 1]),
        ("a float", 1, [4.5]),
        ("text", 1, "333"),
        ("no shape", 1, None),
        ("another dtype", 2, "float64"),
        ("an object dtype", 2, "object"),
        ("no dtype", 2, "nonsense"),
        ("another name", 0, "surprise"),
        ("a name that is none", 0, None),
    ]
}
LIES |= {
    "one more": lambda state: state["arrays"].append(["window.surprise", [2**45], "float32"]),
    "one less": lambda state: state["arrays"].pop(),
    "a name twice": lambda state: state["arrays"].append(state["arrays"][1]),
    "another order": lambda state: state["arrays"].reverse(),
    "an entry of two": lambda state: state["arrays"].__setitem__(1, ["module.w", [3]]),
}


@pytest.mark.parametrize("change", LIES.values(), ids=LIES)
def test_specs_that_lie_are_refused_before_anything_is_allocated_or_harmless(
    change: Callable[[dict[str, Any]], None], folder: Path, whole: list[bytes]
) -> None:
    edit(folder, change)
    refused_or_harmless(folder, whole)


@pytest.mark.parametrize("change", [LIES["module.w a giant shape"], LIES["module.w another rank"], LIES["one less"]])
def test_specs_that_lie_are_refused_by_load_from_checkpoint(
    change: Callable[[dict[str, Any]], None], folder: Path
) -> None:
    if change is LIES["one less"]:
        edit(folder, lambda state: state["arrays"].pop(1))
    else:
        edit(folder, change)
    with pytest.raises(CheckpointError):
        Mean.load_from_checkpoint(folder)


def test_arrays_of_another_checkpoint_are_noticed(folder: Path, tmp_path: Path) -> None:
    fit(tmp_path / "other", 2)
    (other,) = (tmp_path / "other" / "checkpoints").glob("step_*")
    shutil.rmtree(folder / "arrays")
    shutil.copytree(other / "arrays", folder / "arrays")
    with pytest.raises(CheckpointError, match="arrays/"):
        checkpoint.read(folder)


# Code -------------------------------------------------------------------------------------------------

_watching: list[list[str]] = []


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event in ("pickle.find_class", "os.system", "subprocess.Popen"):
        _watching[-1].append(event)


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a checkpoint made Python do: an importable module that notes its import, and unpickled classes."""
    if not getattr(sys, "_jaxlit_hears", False):
        sys._jaxlit_hears = True  # type: ignore[attr-defined]
        sys.addaudithook(_hear)
    found: list[str] = []
    sys.modules.pop("hostile_code", None)
    (tmp_path / "hostile_code.py").write_text("def run(*a, **k):\n    raise SystemExit('ran')\nclass A:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    _watching.append(found)
    try:
        yield lambda: found + (["import"] if "hostile_code" in sys.modules else [])
    finally:
        _watching.pop()


class Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("touch pwned",))


TARGETS = [
    {"scale": {"_target_": "hostile_code.run", "_args_": []}},
    {"scale": {"__class__": "hostile_code.A"}},
    {"scale": {"class_path": "hostile_code.A", "init_args": {}}},
    {"scale": "hostile_code.run"},
    {"scale": "!!python/object/apply:hostile_code.run []"},
    {"scale": base64.b64encode(pickle.dumps(Evil())).decode()},
]


@pytest.mark.parametrize("hparams", TARGETS, ids=range(len(TARGETS)))
def test_a_hyperparameter_is_a_value_and_never_code(
    hparams: dict[str, Any], folder: Path, executed: Callable[[], list[str]]
) -> None:
    edit(folder, put("module", value={"class": "hostile_code.A", "hparams": hparams}))
    module = Mean.load_from_checkpoint(folder)
    assert type(module) is Mean and executed() == [] and not Path("pwned").exists()


@pytest.mark.parametrize("name", ["_target_", "_instantiator", "__class__", "lr", "self", "rngs", "cls", "sizes"])
def test_a_hyperparameter_that_the_class_does_not_have_is_refused_by_name(
    name: str, folder: Path, executed: Callable[[], list[str]]
) -> None:
    edit(folder, put("module", "hparams", value={"size": 3, name: "hostile_code.run"}))
    with pytest.raises(CheckpointError, match=name):
        Mean.load_from_checkpoint(folder)
    assert executed() == []


@pytest.mark.parametrize(
    "module", [None, 7, "x", [], {}, {"hparams": 7}, {"hparams": [["size", 3]]}, {"hparams": None}]
)
def test_hyperparameters_of_the_wrong_type_are_refused_or_none(module: Any, folder: Path) -> None:
    edit(folder, put("module", value=module))
    try:
        loaded = Mean.load_from_checkpoint(folder)
    except CheckpointError:
        return
    assert loaded.w[...].shape == (3,)


@pytest.mark.parametrize("where", ["arrays/arrays.pkl", "arrays/state/0.npy", "arrays/state/0", "state.pkl"])
def test_a_pickle_in_a_checkpoint_is_never_loaded(
    where: str, folder: Path, whole: list[bytes], executed: Callable[[], list[str]]
) -> None:
    if where.endswith("npy"):
        np.save(folder / where, np.array([Evil()], object), allow_pickle=True)
    else:
        (folder / where).write_bytes(pickle.dumps(Evil()))
    seal(folder)
    refused_or_harmless(folder, whole)
    assert executed() == [] and not Path("pwned").exists()


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "state/_METADATA", "state/_sharding", "commit_success.txt"])
def test_what_orbax_keeps_beside_the_arrays_imports_nothing_and_trains_nothing_else(
    name: str, folder: Path, whole: list[bytes], executed: Callable[[], list[str]]
) -> None:
    path = folder / "arrays" / name
    for hostile in (
        re.sub(r'"([\w.]*(?:Handler|Array|Tree|orbax)[\w.]*)"', '"hostile_code.A"', path.read_text()).encode(),
        b"{}",
        b"[]",
        b"\xff",
        b'{"a":' + DEEP + b"}",
        pickle.dumps(Evil()),
    ):
        path.write_bytes(hostile)
        seal(folder)
        copy = Path(shutil.copytree(folder.parents[1], folder.parents[2] / "copy")) / "checkpoints" / NAME
        refused_or_harmless(copy, whole)
        assert executed() == [] and not Path("pwned").exists()
        shutil.rmtree(copy.parents[1])


FORBIDDEN = {"pickle", "cPickle", "_pickle", "marshal", "dill", "cloudpickle", "shelve", "joblib", "torch", "yaml"}


def forbidden(source: str) -> list[str]:
    """Return what in a source file could turn data into code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if node.module and node.module.split(".")[0] in FORBIDDEN else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found += (
                [node.func.id] if node.func.id in ("eval", "exec", "compile", "__import__", "import_module") else []
            )
        elif isinstance(node, ast.Attribute):
            found += [node.attr] if node.attr in ("import_module", "full_load", "unsafe_load") else []
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += ["allow_pickle"] if getattr(node.value, "value", True) is not False else []
    return found


def test_no_source_file_of_the_package_can_turn_data_into_code() -> None:
    folders = [Path(jl.__file__).parent, Path(jl.callbacks.__file__).parent, Path(jl.strategies.__file__).parent]
    files = {path.resolve() for folder in folders for path in folder.rglob("*.py")}
    assert len(files) > 60
    assert {path.name: found for path in files if (found := forbidden(path.read_text()))} == {}


@pytest.mark.parametrize(
    "source", ["import pickle", "from torch import load", "x = eval(t)", "np.load(f, allow_pickle=True)", "import yaml"]
)
def test_the_search_for_such_code_finds_it(source: str) -> None:
    assert forbidden(source)
