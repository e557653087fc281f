"""A checkpoint is written whole or not at all, wherever the file system fails, and by several processes."""

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.checkpoints import OLDER, bytes_of, edit, flip, names, put, seal, state_of, train
from kit.compiles import compiles
from kit.faults import Crash, faults
from kit.journal import hooks, raising
from kit.modules import Net
from kit.refusals import refuses
from kit.threads import as_processes
from kit.trainers import BARE, fit, thinned

from jaxlit.checkpoints import files, writing
from jaxlit.errors import ArgumentError, CheckpointError

# What orbax leaves of a save that a fault has ended, after the error that it raised.
pytestmark = [
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a run with the checkpoint of its first epoch; tests work on copies of it."""
    root = tmp_path_factory.mktemp("half") / "run"
    train(root, 1)
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The state at the end of three epochs that nothing has interrupted."""
    return bytes_of(train(tmp_path_factory.mktemp("whole"), 3))


@pytest.fixture
def state(half):
    """The state of a checkpoint with two arrays, one of them without elements."""
    result = state_of(half / "checkpoints" / OLDER)
    return result | {"arrays": [["module.a", [2, 3], "float32"], ["module.b", [0], "int32"]]}


def save(path, state, value=1.0, order=1):
    draft = writing.prepare(Path(path), lambda: state, order)
    return draft.write({0: jnp.full((2, 3), value), 1: jnp.zeros(0, jnp.int32)})


def value_of(path):
    result = files.read(Path(path)).arrays({0: None, 1: None})
    assert result[0].shape == (2, 3) and result[1].shape == (0,) and result[1].dtype == np.int32
    (value,) = {*np.asarray(result[0]).ravel().tolist()}
    return value


@pytest.mark.parametrize("dtype", thinned(["uint4", "uint2", "int4"], "uint4", full=["uint2", "int4"]))
def test_integers_of_a_few_bits_come_back(state, dtype):
    array = jnp.arange(4, dtype=jnp.int32).astype(dtype)
    saved = state | {"arrays": [["module.a", [4], dtype]]}
    writing.prepare(Path("few"), lambda: saved, 1).write({0: array}).wait()
    for wanted in (None, jax.ShapeDtypeStruct((4,), dtype, sharding=array.sharding)):
        result = files.read(Path("few")).arrays({0: wanted})[0]
        assert result.dtype == dtype
        assert np.asarray(result).astype(int).tolist() == np.asarray(array).astype(int).tolist()


def test_arrays_may_be_deleted_once_write_returns(state):
    array = jnp.arange(6.0).reshape(2, 3)
    expected = np.array(array)
    saving = writing.prepare(Path("deep/er/mine"), lambda: state, 7).write({0: array, 1: jnp.zeros(0, jnp.int32)})
    array.delete()
    saving.wait()
    assert saving.is_done and saving.seconds > 0 and saving.path == Path("deep/er/mine").absolute()
    saving.wait()  # once more is no error
    checkpoint = files.read(Path("deep/er/mine"))
    np.testing.assert_array_equal(checkpoint.arrays({0: None})[0], expected)
    assert checkpoint.state == state and files.order_of(checkpoint.path) == 7
    assert names("deep/er") == ["mine"]


def test_a_saves_operations_are_in_a_crash_safe_order(state):
    save("step_00000002", state).wait()
    with faults(".") as seen:
        save("step_00000002", state, 2.0).wait()
    text = [f"{operation} {os.path.relpath(path)}" for operation, path in seen.operations]
    # Written aside, put onto the disk, sealed, named; and only then is the old one deleted.
    aside = r"\.tmp-step_00000002-\w+"
    stages = [rf"os\.mkdir {aside}", rf"os\.fsync {aside}/state\.json", rf"open {aside}/MANIFEST\.json"]
    stages += [rf"os\.fsync {aside}/MANIFEST\.json", rf"os\.fsync {aside}", r"os\.rename step_00000002"]
    stages += [rf"os\.rename {aside}", r"os\.fsync \.", r"os\.rename step_00000002-replaced_\w+"]
    stages += [r"shutil\.rmtree \.trash-step_00000002-replaced_[\w-]+"]
    result = [next(i for i, line in enumerate(text) if re.fullmatch(stage, line)) for stage in stages]
    assert result == sorted(result)
    # Every file is on the disk before the manifest that vouches for it is written.
    sealed = next(i for i, line in enumerate(text) if "open" in line and "MANIFEST.json" in line)
    files_of = lambda start: {line.split("/")[-1] for line in text[:sealed] if line.startswith(start)}  # noqa: E731
    assert {"state.json"} < files_of("open .tmp-") <= files_of("os.fsync")


def newest_of(folder, where=""):
    """Return the newest checkpoint; none that is newer was passed over."""
    newest, skipped = files.newest(Path(folder))
    assert newest is not None and skipped == [], where
    return newest


def waiting():
    """Return the threads that keep the process from ending; those about to end may do so."""
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in threads:
        thread.join(5)
    return [thread.name for thread in threads if thread.is_alive()]


FAULTS = {"crash": "", "full": "[Errno 28] No space", "denied": "[Errno 13] Perm", "broken": "[Errno 5] Input/output"}


@pytest.mark.parametrize(
    ("kind", "every"),
    thinned(itertools.product(FAULTS, (False, True)), ("crash", False), full=[("full", False)]),
)
def test_a_failing_save_leaves_the_old_or_new_checkpoint(kind, every, state, caplog):
    """And no line of orbax's, which would have hundreds."""
    save("first/step_00000002", state).wait()
    shutil.copytree("first", "counted")
    with faults("counted") as seen:
        save("counted/step_00000002", state, 2.0, order=2).wait()
    text = [f"{what} {os.path.relpath(path, 'counted')}" for what, path in seen.operations]
    named = text.index("os.fsync .") + 1  # after it, it can only be deleted
    kinds = [re.sub(r"arrays.*|[-_][0-9a-f]{8}", "", operation) for operation in text]
    result = []
    for at in [at for at, kind in enumerate(kinds, 1) if every or kind not in kinds[: at - 1]]:
        folder, error = shutil.copytree("first", f"{at}"), None
        with faults(folder, at=at, kind=kind):
            try:
                save(f"{folder}/step_00000002", state, 2.0, order=2).wait()
            except (Crash, CheckpointError) as raised:
                error = raised
        assert waiting() == [], text[at - 1]
        assert [record.name for record in caplog.records if record.name in ("absl", "asyncio")] == [], text[at - 1]
        if kind == "full":
            assert all(not name.startswith(".tmp-") for name in names(folder)), text[at - 1]
        assert error is not None or (kind == "full" and at > named), text[at - 1]
        words = FAULTS[kind] and f"{folder}/step_00000002 could not be written: {FAULTS[kind]}"
        assert error is None or words in str(error), text[at - 1]
        result.append(value_of(newest_of(folder, text[at - 1]).path))
        files.sweep(Path(folder))
        assert {p.name.split("-")[0] for p in Path(folder).iterdir()} == {"step_00000002"}
    # The first until the second has its name, the second from there on.
    assert {*result} == {1.0, 2.0} and result == sorted(result)


def test_messages_of_others_are_shown_during_a_save(state, caplog, monkeypatch):
    def seal(*arguments):
        logging.getLogger("absl").error("of somebody else")
        logging.getLogger("asyncio").error("of another loop")
        sys.unraisablehook(told)
        real(*arguments)

    real, told, heard = files.seal, SimpleNamespace(exc_value=ValueError("mine")), []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)
    monkeypatch.setattr(files, "seal", seal)
    save("kept", state).wait()
    assert heard == [told]
    assert [record.getMessage() for record in caplog.records] == ["of somebody else", "of another loop"]


def test_what_is_no_checkpoint_is_not_overwritten(state):
    Path("file").write_text("years")
    for folder, name in (("mine", "thesis.txt"), ("run", "step_00000001")):
        Path(folder).mkdir()
        Path(folder, name).write_text("years")
    for path in ("file", "mine", "run"):
        with pytest.raises(ArgumentError, match=f"{path} is no checkpoint, and would be overwritten"):
            save(path, state)
    Path("empty").mkdir()
    Path("step_00000003").mkdir()
    Path("step_00000003", "MANIFEST").write_text("damaged")
    for path in ("empty", "step_00000003"):
        save(path, state).wait()
        assert value_of(path) == 1.0
    assert names(".") == ["empty", "file", "mine", "run", "step_00000003"]


def test_what_could_not_be_read_again_is_not_written(state, monkeypatch):
    with pytest.raises(ArgumentError, match=r"a\\b has a backslash in its name"):
        save("a\\b", state)
    monkeypatch.setattr(files, "MOST_JSON", 30_000)
    save("small", state).wait()
    with pytest.raises(CheckpointError, match=r"has 3\d{4} bytes as JSON, and only 30000 are read.*state_dict"):
        save("large", state | {"mine": "a" * 30_000})
    assert names(".") == ["small"]


def test_a_failure_is_raised_at_every_wait_with_its_cause(state, monkeypatch):
    Path("file").write_text("in the way")
    words = "file/mine could not be written: .*Earlier ones are as they were"
    assert isinstance(refuses(CheckpointError, lambda: save("file/mine", state), words).__cause__, OSError)
    cause = OSError("the disk is gone")
    monkeypatch.setattr(files, "write", raising(cause))
    saving = save("mine", state)
    for _ in range(2):
        assert refuses(CheckpointError, saving.wait, "mine could not be written: the disk is gone").__cause__ is cause


def test_a_network_file_system_that_asks_for_patience_gets_it(state, monkeypatch):
    left, rename = [OSError(errno.ESTALE, "the file system is busy")] * 2, os.rename

    def flaky(source, target):
        if Path(target).name == "kept" and left:
            raise left.pop()
        rename(source, target)

    monkeypatch.setattr(os, "rename", flaky)
    monkeypatch.setattr(files, "_WAITS_S", (0.0, 0.0, 0.0))
    save("kept", state).wait()
    assert value_of("kept") == 1.0 and left == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_small_replicated_arrays_compile_no_slices(strategy):
    trainer = fit(Net(rngs=nnx.Rngs(0)), random(2), strategy=strategy, **BARE)
    jax.clear_caches()
    with compiles() as made:
        trainer.save_checkpoint("saved")
    assert {*made} == {"jit(call)"}  # which looks at the parameters


def crash(root, at):
    """Continue to the second epoch, whose save replaces that of the first, on a file system that fails."""
    crashes = contextlib.nullcontext() if at is None else pytest.raises((Crash, CheckpointError))
    with faults(root / "checkpoints", at=at) as seen, crashes:
        train(root, 2, resume="auto")
    return seen


@pytest.fixture(scope="module")
def operations(half, tmp_path_factory):
    """What the second fit and its save do to the folder of checkpoints."""
    root = Path(shutil.copytree(half, tmp_path_factory.mktemp("counted") / "run"))
    return [f"{what} {os.path.relpath(path, root)}" for what, path in crash(root, None).operations]


def crash_at(at, half, operations, whole, folder):
    """Crash at an operation and continue; returns the step of the checkpoint that was left."""
    root = Path(shutil.copytree(half, folder / str(at)))
    assert len(crash(root, at).operations) >= at, f"the crash at {at} did not happen"
    newest = newest_of(root / "checkpoints", operations[at - 1])
    assert bytes_of(train(root, 3, resume="auto")) == whole, operations[at - 1]
    assert names(root / "checkpoints") == ["step_00000009"], operations[at - 1]  # no rubbish, and no old one
    return newest.state["global_step"]


@pytest.mark.parametrize("every", thinned([False, True], False, full=()))
def test_a_crash_at_any_operation_loses_no_checkpoint(every, half, operations, whole, tmp_path):
    """By default where names change, else at every third: `every` operation of one save is above."""
    few = [k for k, line in enumerate(operations, 1) if re.search("rename|MANIFEST", line)]
    assert 30 < len(operations) < 80 and len(few) > 3
    chosen = range(1, len(operations) + 1, 3) if every else few
    result = [crash_at(at, half, operations, whole, tmp_path) for at in chosen]
    assert {*result} == {3, 6} and result == sorted(result)


def test_a_full_disk_is_an_error_and_the_older_one_loads(half, operations, tmp_path):
    begun = next(i for i, line in enumerate(operations, 1) if ".tmp-" in line)
    named = next(i for i, line in enumerate(operations, 1) if line.startswith("os.rename checkpoints/.tmp-"))
    for at in (1, begun, (begun + named) // 2, named):
        root, steps = Path(shutil.copytree(half, tmp_path / str(at))), list[int]()

        def join(*_):  # a step begins when what is being saved is there, or has failed
            for thread in threading.enumerate():
                if thread.name == "jaxlit-checkpoint":
                    thread.join(120)

        watch = hooks(on_train_batch_start=join, on_train_batch_end=lambda t, *_: steps.append(t.global_step))  # noqa: B023
        with faults(root / "checkpoints", at=at, kind="full"), pytest.raises(CheckpointError) as raised:
            train(root, 3, watch, resume="auto")
        assert str(root / "checkpoints") in str(raised.value) and "No space left" in str(raised.value)
        # The second epoch's checkpoint fails, and no third step of the third is taken.
        assert len(steps) <= (0 if at < begun else 5) and waiting() == [], operations[at - 1]
        assert names(root / "checkpoints") == [OLDER]
        assert files.newest(root / "checkpoints")[1] == []


SIZES = {"state.json": 10, "arrays/a": 4000, "arrays/b": 3900, "arrays/c": 2000, "arrays/d": 2000, "arrays/e": 0}


@pytest.fixture
def folder(tmp_path):
    for name, size in SIZES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    files.seal(tmp_path, 1)
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_file_is_verified_in_one_share(count, folder):
    for name, size in SIZES.items():
        (folder / name).write_bytes(b"y" + b"x" * max(size - 1, 0))
        refusals = []
        for index in range(count):
            try:
                files.verify(folder, index=index, count=count)
            except CheckpointError as error:
                refusals.append(str(error))
        assert len(refusals) == 1 and name in refusals[0]
        (folder / name).write_bytes(b"x" * size)
    (folder / "arrays/more").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="arrays/more is not in its manifest"):
        files.verify(folder, index=0, count=count)


def test_known_hashes_make_the_same_manifest(folder):
    expected = (folder / "MANIFEST.json").read_bytes()
    (folder / "MANIFEST.json").unlink()
    known = files.on_disk(folder, [folder / "arrays/a", folder / "arrays/e"])
    assert known.keys() == {"arrays/a", "arrays/e"}
    files.seal(folder, 1, known)
    assert (folder / "MANIFEST.json").read_bytes() == expected


def loaders(process):
    state = {"epoch": 1, "at": {"rows": process}, "fingerprint": None}
    return {"training": {"idx": 0, "states": [state]}}


def of_three(half, separate):
    """Return the checkpoint as if three processes had written it, with the loaders in files or all in state.json."""
    path = Path(shutil.copytree(half / "checkpoints" / OLDER, OLDER))
    states = [loaders(process)["training"]["states"][0] for process in range(3)]
    if separate:
        (path / "loaders").mkdir()
        for process in (1, 2):
            (path / "loaders" / f"process_{process}.json").write_text(json.dumps(loaders(process)))
    edit(path, put("processes", value=3))
    states = states[:1] if separate else states
    edit(path, put("loaders", value={"training": {"idx": 0, "states": states}}))
    return path.absolute()


@pytest.fixture(params=[True, False], ids=["files", "state.json"])
def either(request, half):
    return of_three(half, request.param)


@pytest.fixture
def path(half):
    return of_three(half, separate=True)


def places(path):
    """Return what the loaders' states of this process, or of all, say of their places."""
    read = files.read(path).state["loaders"]
    assert read["training"]["idx"] == 0
    return [state["at"]["rows"] for state in read["training"]["states"]]


def test_each_process_gets_its_own_loaders_back(either, monkeypatch):
    assert as_processes(monkeypatch, lambda index: places(either), 3) == [[0], [1], [2]]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_numbers_of_processes_get_the_loaders_of_all(count, either, monkeypatch):
    assert as_processes(monkeypatch, lambda index: places(either), count) == [[0, 1, 2]] * count


def all_refuse(path, words, monkeypatch):
    errors = as_processes(monkeypatch, lambda index: places(path), 3)
    assert {type(error) for error in errors} == {CheckpointError}
    assert len({str(error) for error in errors}) == 1 and words in str(errors[0])


def test_loaders_of_a_process_that_are_not_there_are_refused(either, monkeypatch):
    shutil.rmtree(either / "loaders", ignore_errors=True)
    edit(either, lambda state: state["loaders"]["training"].update(states=state["loaders"]["training"]["states"][:2]))
    all_refuse(either, "no state of the training loader of process", monkeypatch)


@pytest.mark.parametrize("text", ["x", "{}", json.dumps(loaders(2) | {"training": {"idx": 0, "states": []}})])
def test_loaders_that_no_process_saves_are_refused(text, path, monkeypatch):
    (path / "loaders" / "process_2.json").write_text(text)
    seal(path)
    all_refuse(path, "process_2.json", monkeypatch)


def test_damage_that_one_process_finds_is_an_error_in_all(path, monkeypatch):
    damaged = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size]
    assert len(damaged) > 8
    for file in damaged:
        data = file.read_bytes()
        file.write_bytes(flip(data, 0))
        all_refuse(path, file.name, monkeypatch)
        file.write_bytes(data)
    assert as_processes(monkeypatch, lambda index: places(path), 3) == [[0], [1], [2]]


def test_a_file_that_one_process_cannot_look_at_is_an_error_in_all(path, monkeypatch):
    def verify(folder, *, index, count):
        if index == 1:
            raise OSError(116, "Stale file handle")
        return real(folder, index=index, count=count)

    real = files.verify
    monkeypatch.setattr(files, "verify", verify)
    all_refuse(path, "cannot be read: [Errno 116] Stale file handle.", monkeypatch)
