"""Two real processes with four devices each save and read a checkpoint together."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import counted, rows_of
from kit.by_hand import mean
from kit.checkpoints import data_of, flip, loader, state_of
from kit.inside import files, hashes, key_value_store
from kit.journal import at_batch, hooks, raising
from kit.modules import Linear, Mean
from kit.processes import error_of, launch, say
from kit.trainers import BARE, make_trainer

import jaxlit as jl
from jaxlit.checkpoints import files as files_of_checkpoints
from jaxlit.checkpoints.safetensors import read_header
from jaxlit.distributed.team import _MultiProcess, team
from jaxlit.errors import DataError

SPLIT = 2**21  # bytes of the parameters of `Wide`


class Wide(Mean):
    """`Mean` with parameters of which each process holds a half under fsdp."""

    def __init__(self):
        super().__init__()
        self.wide = nnx.Param(jnp.ones((8, SPLIT // 32)))

    def error(self, batch):
        return super().error(batch) + 0.0 * self.wide[...].sum()


class Own:
    """A loader that each process keeps at a place of its own: process i draws the numbers from 10 * i on."""

    def __init__(self):
        self.next, self.given = 0, None

    def __iter__(self):
        for k in range(self.next, 4):
            self.next = k + 1
            yield {"x": np.full((4, 1), 10 * jax.process_index() + k, np.float32)}
        self.next = 0

    def state_dict(self):
        return {"process": jax.process_index(), "next": self.next}

    def load_state_dict(self, state):
        self.next, self.given = state["next"], state


def shuffled():
    """Return four batches of eight rows, in the same order in any number of processes."""
    (rows,) = counted(32)
    return jl.ArrayLoader(rows, 8, shuffle=True, seed=3)


def train(loader, *callbacks, **arguments):
    """Train an epoch; return the final weight, and the numbers of the rows that this process drew."""
    drawn = []
    seen = hooks(on_train_batch_end=lambda t, m, outputs, batch, i: drawn.append(batch))
    trainer = make_trainer(seen, *callbacks, **({"strategy": "ddp"} | BARE | arguments))
    trainer.fit(Mean(), loader)
    return float(trainer.module.w[...][0]), rows_of(drawn)


def save_after(batches, path):
    return at_batch(batches - 1, lambda trainer, module: trainer.save_checkpoint(Path(path).absolute()))


def save_together():
    topics, agree = [], _MultiProcess.agree

    def counting(self, topic, *args, **named):
        topics.append(topic)
        return agree(self, topic, *args, **named)

    _MultiProcess.agree = counting
    trainer = make_trainer(strategy="fsdp", max_steps=1, **BARE)
    trainer.fit(Wide(), shuffled())
    topics.clear()
    with hashes() as hashed:
        saving = trainer.saver.begin("kept")
        saving.wait()
        say("in all", [*topics, len(hashed)])
    sizes = [(path, path.stat().st_size) for path in Path("kept").glob(f"*/{jax.process_index()}.safetensors")]
    say("written at the save", relative(sizes))
    with hashes() as hashed:
        files.read(Path("kept"))
    say("read at the read", relative(hashed))
    say("left in the store", key_value_store().key_value_dir_get("jaxlit/saved/"))
    names = sorted(path.relative_to("kept").as_posix() for path in Path("kept").rglob("*") if path.stat().st_size)
    names = [name for name in names if Path("kept", name).is_file()]
    say("damage", {name: error_with_damage(Path("kept", name)) for name in names})
    # Process 0 makes the folder before it hears of the other's problem.
    mine = object() if jax.process_index() == 1 else 1
    bad = hooks(on_save_checkpoint=lambda t, m, state: state.update(mine=mine))
    say("refused", error_of(lambda: train(shuffled(), save_after(1, "refused"), bad)))
    with pytest.MonkeyPatch.context() as patch:
        if jax.process_index() == 1:
            patch.setattr(files_of_checkpoints, "write_arrays", raising(OSError(28, "No space left on device")))
        say("unwritten", error_of(lambda: trainer.save_checkpoint("refused")))
    team().agree("it was refused", None)
    wide = trainer.module.wide
    wide[...] = wide[...].at[-1, -1].set(jnp.nan)  # which process 1 stores
    say("not finite", error_of(lambda: trainer.save_checkpoint("refused")))
    say("left", [path.name for path in Path().iterdir() if "refused" in path.name])


def relative(hashed):
    """Return the sizes of files by their names in the folder of their checkpoint, which is in this one."""
    here = len(Path().absolute().parts)
    return [["/".join(Path(path).absolute().parts[here + 1 :]), size] for path, size in hashed]


def error_with_damage(path):
    """Return the error of reading a checkpoint while one byte of a file is another."""
    data, errors = path.read_bytes(), []
    for text in (flip(data, len(data) // 2), data):
        team().agree("the file is read", None)
        if jax.process_index() == 0:
            path.write_bytes(text)
        team().agree("the file is written", None)
        errors.append(error_of(lambda: files.read(Path("kept"))))
    return errors


def continue_two():
    """Save in the middle of an epoch, and continue as many, and what one process saved."""
    for name, make in (("own", Own), ("shared", shuffled)):
        say(f"{name} whole", train(make(), save_after(2, Path("..") / f"{name} of two")))
        again = make()
        say(f"{name} resumed", train(again, resume=Path("..") / f"{name} of two"))
        say(f"{name} given", again.given if name == "own" else None)
    say("shared of one", train(shuffled(), resume=Path("..") / "shared of one"))
    train(Own(), resume=Path("..") / "own of one")  # which ends both


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    processes = launch(save_together, tmp_path_factory.mktemp("saved"))
    assert [process.code for process in processes] == [0, 0], processes[0].errors + processes[1].errors
    return [process.said for process in processes]


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """A folder with checkpoints of one process and of two, and what the two have done."""
    folder = tmp_path_factory.mktemp("continued")
    for name, make in (("own", Own), ("shared", shuffled)):
        train(make(), save_after(2, folder / f"{name} of one"))
    processes = launch(continue_two, folder / "run")
    for process in processes:
        assert process.code == 1, process.errors
        assert "as many processes as before: 1, not 2" in process.errors
    return folder, [process.said for process in processes]


@pytest.mark.full
def test_a_save_takes_two_agreements_and_reads_nothing(saved):
    for said in saved:
        assert said["in all"] == ["a checkpoint begins", "kept is written", 0]
        assert said["left in the store"] == []


@pytest.mark.full
@pytest.mark.parametrize("what", ["written at the save", "read at the read"])
def test_each_process_hashes_half_of_the_bytes(what, saved):
    first, second = (said[what] for said in saved)
    every = sorted(name for name, _ in first + second)
    assert every == sorted({*every}), "each file is read once"
    assert {"MANIFEST.json", *every} >= saved[0]["damage"].keys() or what == "written at the save"
    for hashed in (first, second):
        assert SPLIT / 2 <= sum(size for _, size in hashed) < SPLIT / 2 + 2**16


@pytest.mark.full
def test_damage_of_any_file_is_the_same_error_in_both(saved):
    first, second = (said["damage"] for said in saved)
    assert first == second
    assert {Path(name).name for name in first} == {"MANIFEST.json", "state.json", "0.safetensors", "1.safetensors"}
    for name, (damaged, sound) in first.items():
        assert damaged.startswith("CheckpointError") and name in damaged
        assert sound == "nothing was raised"


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refused", "^CheckpointError.*'mine'"),
        ("not finite", r"^NonFiniteError.*Parameters hold NaN or infinity since optimizer step 1: wide\. "),
        ("unwritten", r"refused could not be written: process 1: \[Errno 28\] No space left on device\. Earlier ones"),
    ],
)
def test_what_one_process_cannot_save_is_an_error_in_both(name, words, saved):
    first, second = (said[name] for said in saved)
    assert first == second and re.search(words, first, re.DOTALL)
    assert saved[0]["left"] == [], "no temporary folder"


@pytest.mark.full
def test_each_process_continues_with_its_own_loader(continued):
    folder, both = continued
    for index, said in enumerate(both):
        assert said["own whole"] == [mean([[5], [6], [7], [8]]), rows_of_own(index, range(4))]
        assert said["own resumed"] == [said["own whole"][0], rows_of_own(index, range(2, 4))]
        assert said["own given"] == {"process": index, "next": 2}
    text = read_header(data_of(folder / "own of two") / "1.safetensors")[1]["loaders"]
    at = json.loads(text)["training"]["states"][0]["at"]
    assert at["state"]["process"] == 1
    assert [x["at"]["state"]["process"] for x in state_of(folder / "own of two")["loaders"]["training"]["states"]] == [
        0
    ]


def rows_of_own(index, batches):
    return [10 * index + k for k in batches for _ in range(4)]


@pytest.mark.full
def test_rows_that_all_share_continue_in_more_and_fewer_processes(continued):
    folder, both = continued
    weight, rows = train(shuffled())
    halves = [[row for k in range(4) for row in rows[8 * k + 4 * i :][:4]] for i in range(2)]
    for index, said in enumerate(both):
        assert said["shared whole"] == [weight, halves[index]]
        for resumed in ("shared resumed", "shared of one"):
            assert said[resumed] == [weight, halves[index][8:]], resumed
    assert train(shuffled(), resume=folder / "shared of two") == (weight, rows[16:])
    with pytest.raises(DataError, match="as many processes as before: 2, not 1"):
        train(Own(), resume=folder / "own of two")


def unlike() -> None:
    """One process has no memory for one save, and later sees no checkpoints in the folder."""
    real, saves, mine = files_of_checkpoints.own_parts, [], jax.process_index()

    def own_parts(arrays):
        saves.append(len(saves))
        if mine and len(saves) == 2:
            raise RuntimeError("no page-locked memory is left")
        return real(arrays)

    files_of_checkpoints.own_parts = own_parts
    for epochs in (1, 2):
        kept = jl.callbacks.ModelCheckpoint(every_n_train_steps=1, on_save_error="warn", save_top_k=-1)
        trainer = make_trainer(kept, strategy="fsdp", max_epochs=epochs, default_root_dir="run", resume="auto")
        trainer.fit(Linear(), loader())
        say(f"{epochs}", [trainer.global_step, Path(kept.last_model_path).name])
        listed = files_of_checkpoints.candidates
        files_of_checkpoints.candidates = lambda folder, listed=listed: [] if mine else listed(folder)


@pytest.mark.full
def test_what_one_process_lacks_or_does_not_see_leads_none_astray(tmp_path):
    both = launch(unlike, tmp_path / "job", timeout=120.0)
    for child in both:
        assert child.code == 0, child.errors
        assert child.said == {"1": [3, "step_00000003"], "2": [6, "step_00000006"]}
    assert sorted(x.name for x in (tmp_path / "job/run/checkpoints").glob("step_*")) == [
        f"step_{k:08d}" for k in (1, 3, 4, 5, 6)
    ]
    assert "process 1: no page-locked memory is left" in both[0].errors
