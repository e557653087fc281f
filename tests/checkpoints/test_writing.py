"""A checkpoint is written whole or not at all, wherever the file system fails, and by several processes."""

import contextlib
import errno
import itertools
import json
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.checkpoints import OLDER, bytes_of, data_of, edit, entry_of, flip, names, put, seal, state_of, train
from kit.compiles import compiles
from kit.faults import Crash, faults
from kit.journal import hooks, raising
from kit.modules import Net
from kit.refusals import refuses, warnings_of
from kit.threads import as_processes
from kit.trainers import BARE, fit, thinned

from jaxlit.checkpoints import files, places
from jaxlit.checkpoints.safetensors import write_arrays
from jaxlit.errors import ArgumentError, CheckpointError, NonFiniteError


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
    saving = files.Saving(Path(path), lambda: state, order)
    return saving.begin([jnp.full((2, 3), value), jnp.zeros(0, jnp.int32)])


def value_of(path):
    result = files.read(Path(path)).arrays({0: None, 1: None})
    assert result[0].shape == (2, 3) and result[1].shape == (0,) and result[1].dtype == np.int32
    (value,) = {*np.asarray(result[0]).ravel().tolist()}
    return value


@pytest.mark.parametrize("dtype", thinned(["uint4", "uint2", "int4"], "uint4", full=["uint2", "int4"]))
def test_integers_of_a_few_bits_come_back(state, dtype):
    array = jnp.arange(4, dtype=jnp.int32).astype(dtype)
    saved = state | {"arrays": [["module.a", [4], dtype]]}
    files.Saving(Path("few"), lambda: saved, 1).begin([array]).wait()
    for wanted in (None, jax.ShapeDtypeStruct((4,), dtype, sharding=array.sharding)):
        result = files.read(Path("few")).arrays({0: wanted})[0]
        assert result.dtype == dtype
        assert np.asarray(result).astype(int).tolist() == np.asarray(array).astype(int).tolist()


def test_arrays_may_be_deleted_once_write_returns(state):
    array = jnp.arange(6.0).reshape(2, 3)
    expected = np.array(array)
    saving = files.Saving(Path("deep/er/mine"), lambda: state, 7).begin([array, jnp.zeros(0, jnp.int32)])
    array.delete()
    saving.wait()
    assert saving.is_done and saving.seconds > 0 and saving.path == Path("deep/er/mine").absolute()
    saving.wait()  # once more is no error
    checkpoint = files.read(Path("deep/er/mine"))
    np.testing.assert_array_equal(checkpoint.arrays({0: None})[0], expected)
    assert state_of(checkpoint.path) == state and files.order_of(checkpoint.path) == 7
    assert names("deep/er") == ["mine"]


def test_a_saves_operations_are_in_a_crash_safe_order(state):
    save("step_00000002", state).wait()
    old = data_of("step_00000002").name
    with faults(".") as seen:
        save("step_00000002", state, 2.0).wait()
    text = [f"{operation} {os.path.relpath(path)}" for operation, path in seen.operations]
    # Written next to the old one, put onto the disk, vouched for; and only then is the old one deleted.
    step, new = "step_00000002", f"step_00000002/{data_of('step_00000002').name}"
    stages = [rf"os\.mkdir {new}", rf"open {new}/0\.safetensors", rf"os\.fsync {new}/0\.safetensors"]
    stages += [rf"open {new}/\.state\.json.*", rf"os\.fsync {new}/\.state\.json.*", rf"os\.rename {new}/\.state.*"]
    stages += [rf"os\.fsync {new}", rf"os\.fsync {step}", rf"open {step}/\.MANIFEST.*", rf"os\.fsync {step}/\.MANIF.*"]
    stages += [
        rf"os\.rename {step}/\.MANIFEST.*",
        rf"os\.fsync {step}",
        r"os\.fsync \.",
        rf"shutil\.rmtree {step}/{old}",
    ]
    left = iter(text)
    assert [stage for stage in stages if not any(re.fullmatch(stage, line) for line in left)] == []


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
    thinned(itertools.product(FAULTS, (False, True)), ("crash", False), ("full", True), full=[("broken", True)]),
)
def test_a_failing_save_leaves_the_old_or_new_checkpoint(kind, every, state):
    save("first/step_00000002", state).wait()
    shutil.copytree("first", "counted")
    with faults("counted") as seen:
        save("counted/step_00000002", state, 2.0, order=2).wait()
    text = [f"{what} {os.path.relpath(path, 'counted')}" for what, path in seen.operations]
    named = text.index("os.fsync .")  # after it, the old one can only be deleted
    kinds = [re.sub("[0-9a-f]{8}", "", operation) for operation in text]
    result = []
    for at in [at for at, kind in enumerate(kinds, 1) if every or kind not in kinds[: at - 1]]:
        folder, error = shutil.copytree("first", f"{at}"), None
        with faults(folder, at=at, kind=kind):
            try:
                save(f"{folder}/step_00000002", state, 2.0, order=2).wait()
            except (Crash, CheckpointError) as raised:
                error = raised
        assert waiting() == [], text[at - 1]
        assert error is not None or at > named, text[at - 1]
        words = FAULTS[kind] and f"{folder}/step_00000002 could not be written: {FAULTS[kind]}"
        assert error is None or words in str(error), text[at - 1]
        result.append(value_of(newest_of(folder, text[at - 1]).path))
        if kind == "full" and result[-1] == 1.0:
            assert len(names(f"{folder}/step_00000002")) == 2, text[at - 1]  # nothing of the new one is left
        save(f"{folder}/step_00000002", state, 3.0, order=3).wait()
        assert value_of(newest_of(folder).path) == 3.0
        assert data_of(f"{folder}/step_00000002").is_dir(), "what was left of the second went with the first"
    # The first until the second has its name, the second from there on.
    assert {*result} == {1.0, 2.0} and result == sorted(result)


def test_one_that_cannot_be_deleted_is_a_warning(state, caplog):
    save("step_00000002", state).wait()
    old = data_of("step_00000002").absolute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places.shutil, "rmtree", raising(OSError("busy")))
        save("step_00000002", state, 2.0).wait()
    (told,) = warnings_of(caplog)
    assert told == f"The old checkpoint {old} could not be deleted: busy"
    assert value_of("step_00000002") == 2.0 and old.is_dir()


def test_what_is_no_checkpoint_is_not_overwritten(state):
    Path("file").write_text("years")
    for folder, name in (("mine", "thesis.txt"), ("run", "step_00000001")):
        Path(folder).mkdir()
        Path(folder, name).write_text("years")
    Path("diary/20261127").mkdir(parents=True)  # a date has the digits of a hash
    Path("web").mkdir()
    Path("web/MANIFEST.json").write_text('{"name": "a page"}')  # of another program
    for path in ("file", "mine", "run", "diary", "web"):
        with pytest.raises(ArgumentError, match=f"{path} is no checkpoint, and would be overwritten"):
            save(path, state)
    for name in ("empty", "step_00000003", "cut/data-0123abcd"):
        Path(name).mkdir(parents=True)
    Path("cut/.MANIFEST.json-data-0123abcd").write_text("cut")
    Path("step_00000003", "notes").write_text("years")
    for path in ("empty", "step_00000003", "cut"):
        save(path, state).wait()
        assert value_of(path) == 1.0
    assert names(".") == ["cut", "diary", "empty", "file", "mine", "run", "step_00000003", "web"]
    assert names("diary") == ["20261127"] and names("web") == ["MANIFEST.json"]
    assert Path("step_00000003", "notes").read_text() == "years" and len(names("cut")) == 2


def test_what_could_not_be_read_again_is_not_written(state, monkeypatch):
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
    monkeypatch.setattr(places, "write", raising(cause))
    saving = save("mine", state)
    for _ in range(2):
        assert refuses(CheckpointError, saving.wait, "mine could not be written: the disk is gone").__cause__ is cause
    assert names(".") == ["file"]


def test_a_network_file_system_that_asks_for_patience_gets_it(state, monkeypatch):
    left, plain = [OSError(errno.ESTALE, "the file system is busy")] * 3, Path.open

    def flaky(path, *arguments, **named):
        if path.name == "0.safetensors" and left:
            raise left.pop()
        return plain(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", flaky)
    monkeypatch.setattr(places, "_WAITS_S", (0.0, 0.0, 0.0))
    save("kept", state).wait()
    assert value_of("kept") == 1.0 and left == []


@pytest.mark.parametrize("dtype", ["float32", "complex64", "bfloat16", "float8_e4m3", "int8"])
def test_what_is_not_finite_is_counted_before_it_is_a_checkpoint(state, dtype):
    values = np.array([[1, np.inf, -np.inf], [np.inf, np.inf, 2]]) if dtype != "int8" else np.ones((2, 3))
    saved = state | {"arrays": [[f"module.{x}", [2, 3], dtype] for x in ("mask", "nan", "fine", "free")]}
    arrays = [jnp.asarray(values.astype(dtype)), jnp.full((2, 3), np.nan).astype(dtype), jnp.ones((2, 3), dtype)]
    seen = []

    def judge(found):
        seen.append({**found})
        assert not (Path("mine") / files.MANIFEST).exists()
        if len(seen) == 1:
            raise NonFiniteError("mask is infinite")

    for refused in (pytest.raises(NonFiniteError, match="^mask is infinite$"), contextlib.nullcontext()):
        saving = files.Saving(Path("mine"), lambda: saved, 1)
        names = ["module.mask", "module.nan", "module.fine"]
        with refused:
            saving.begin([*arrays, arrays[1]], before=judge, judged=names).wait()
        assert (Path("mine") / files.MANIFEST).exists() == (len(seen) == 2)
    if dtype == "int8":
        assert seen == [{}, {}]
    else:
        assert [x.pop("module.nan") != 0 for x in seen] == [True, True]
        assert seen == [{"module.mask": 4}] * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_save_compiles_nothing(strategy):
    trainer = fit(Net(rngs=nnx.Rngs(0)), random(2), strategy=strategy, **BARE)
    jax.clear_caches()
    with compiles() as made:
        trainer.save_checkpoint("saved")
    assert {*made} == set()


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
    assert 15 < len(operations) < 40 and len(few) > 3
    chosen = range(1, len(operations) + 1, 3) if every else few
    result = [crash_at(at, half, operations, whole, tmp_path) for at in chosen]
    assert {*result} == {3, 6} and result == sorted(result)


def test_a_full_disk_is_an_error_and_the_older_one_loads(half, operations, tmp_path):
    begun = next(i for i, line in enumerate(operations, 1) if "step_00000006" in line)
    named = next(i for i, line in enumerate(operations, 1) if re.match(r"os\.rename .*MANIFEST", line))
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


SIZES = {"state.json": 10, "0.safetensors": 4000, "1.safetensors": 3900, "2.safetensors": 2000, "3.safetensors": 0}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_each_file_is_verified_in_one_share(count, tmp_path):
    folder = tmp_path / "data-0123abcd"
    folder.mkdir()
    for name, size in SIZES.items():
        (folder / name).write_bytes(b"x" * size)
    files.seal(tmp_path, 1, {f"data-0123abcd/{name}": entry_of(b"x" * size) for name, size in SIZES.items()})
    for name, size in SIZES.items():
        (folder / name).write_bytes(b"y" + b"x" * max(size - 1, 0))
        refusals = []
        for index in range(count):
            try:
                files.verify(tmp_path, index=index, count=count)
            except CheckpointError as error:
                refusals.append(str(error))
        assert len(refusals) == 1 and name in refusals[0]
        (folder / name).write_bytes(b"x" * size)


def loaders(process):
    state = {"epoch": 1, "at": {"rows": process}, "fingerprint": None}
    return {"training": {"idx": 0, "states": [state]}}


@pytest.fixture
def path(half):
    """The checkpoint as if three processes had written it."""
    path = Path(shutil.copytree(half / "checkpoints" / OLDER, OLDER))
    for process in (1, 2):
        write_loaders(path, process, json.dumps(loaders(process)))
    edit(path, put("processes", value=3))
    edit(path, put("loaders", value=loaders(0)))
    return path.absolute()


def write_loaders(path, process, text):
    """Write the file of a process other than 0, which has no part of an array."""
    with (data_of(path) / f"{process}.safetensors").open("wb") as file:
        write_arrays(file, [], [], {"loaders": text})


def rows_of(path):
    """Return what the loaders' states of this process, or of all, say of their places."""
    read = files.read(path).state["loaders"]
    assert read["training"]["idx"] == 0
    return [state["at"]["rows"] for state in read["training"]["states"]]


def test_each_process_gets_its_own_loaders_back(path, monkeypatch):
    assert as_processes(monkeypatch, lambda index: rows_of(path), 3) == [[0], [1], [2]]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_numbers_of_processes_get_the_loaders_of_all(count, path, monkeypatch):
    assert as_processes(monkeypatch, lambda index: rows_of(path), count) == [[0, 1, 2]] * count


def all_refuse(path, words, monkeypatch):
    errors = as_processes(monkeypatch, lambda index: rows_of(path), 3)
    assert {type(error) for error in errors} == {CheckpointError}
    assert len({str(error) for error in errors}) == 1 and words in str(errors[0])


def test_loaders_of_a_process_that_are_not_there_are_refused(path, monkeypatch):
    (data_of(path) / "2.safetensors").unlink()
    seal(path)
    all_refuse(path, "of 2 processes, not of 3", monkeypatch)


LIES = ["x", "{}", "[]", '{"training": 7}', json.dumps({"training": {"idx": 0, "states": 7}})]


@pytest.mark.parametrize("text", LIES)
def test_loaders_that_no_process_saves_are_refused(text, path, monkeypatch):
    write_loaders(path, 2, text)
    seal(path)
    all_refuse(path, OLDER, monkeypatch)


def test_damage_that_one_process_finds_is_an_error_in_all(path, monkeypatch):
    damaged = [file for file in path.rglob("*") if file.is_file()]
    assert len(damaged) == 5
    for file in damaged:
        data = file.read_bytes()
        file.write_bytes(flip(data, 0))
        all_refuse(path, file.name, monkeypatch)
        file.write_bytes(data)
    assert as_processes(monkeypatch, lambda index: rows_of(path), 3) == [[0], [1], [2]]


def test_a_file_that_one_process_cannot_look_at_is_an_error_in_all(path, monkeypatch):
    def verify(folder, *, index, count):
        if index == 1:
            raise OSError(116, "Stale file handle")
        return real(folder, index=index, count=count)

    real = files.verify
    monkeypatch.setattr(files, "verify", verify)
    all_refuse(path, "cannot be read: [Errno 116] Stale file handle.", monkeypatch)
