"""Two real processes with four devices each: what they do together is what one process does with eight.

What they tell each other is tested with threads: test_team.py, tests/data/test_batch_validator.py.
"""

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path

import grain
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.batches import Stream, sized
from kit.checkpoints import data_of, names, state_of
from kit.inside import key_value_store, position_of
from kit.journal import Batches, Losses, hooks
from kit.modules import Mean, Net
from kit.processes import error_of, launch, say
from kit.scale import Scale
from kit.trainers import BARE, make_trainer, splitting

import jaxlit as jl
from jaxlit.distributed.job import own_rows
from jaxlit.distributed.team import fetch, team

ROWS = 103  # over two processes 52 and 51
# Two local batches of 26 rows do not divide among the devices, two of 24 do, the tails never do; that of 4 rows
# divides among the processes.
STREAMS, MORE = ("fsdp lazy dropout", "shard_map", "hsdp lazy"), ("tensor", "ddp dropout", "zero1")
LISTS = (("shard_map", 24), ("zero1", 26))  # the second one with more streams
TAILS = (("arrays", 1), ("generator", 4))
RESUMED = {"fsdp": "two", "shard_map": "one"}  # and of how many processes two continue


class Slow(Net):
    """Learns so slowly that rounding stays as small as it is."""

    def configure_optimizers(self):
        return optax.sgd(0.001, momentum=0.9)


def rows(count):
    (batch,) = sized(count, seed=count)
    batch["x"][-1] += 10.0  # a tail that is left out, doubled or padded shows
    return batch | {"row": np.arange(count, dtype=np.int32)}


def own_batches(size):
    """Return every second row, in batches of this process's own."""
    mine = {key: x[jax.process_index() :: jax.process_count()] for key, x in rows(ROWS).items()}
    return [{key: x[i : i + size] for key, x in mine.items()} for i in range(0, len(mine["x"]), size)]


def plain(tree):
    return jax.tree.map(lambda x: np.asarray(fetch(x), np.float64).tolist(), tree)


def train_stream(case):
    """Train on one global stream with a tail of 4 rows, and validate with one of 1 row; in any number of processes."""
    strategy, *options = case.split()
    losses, validation = Losses(), jl.ArrayLoader(rows(33), 16)
    columns = {r"inner\.kernel$": P(None, "tp"), r"outer\.kernel$": P("tp", None)}
    # Weights are split over both processes, whose devices hold the same rows.
    tensor = jl.strategies.TensorParallel(columns, tp=jax.device_count(), data=-1)
    split = tensor if strategy == "tensor" else splitting(strategy)
    trainer = make_trainer(losses, strategy=split, max_epochs=2, seed=5, **BARE)
    given = (16, 0, 0.25 if "dropout" in options else 0.0)
    module = jl.lazy(Slow, *given) if "lazy" in options else Slow(*given, rngs=nnx.Rngs(0))
    trainer.fit(module, jl.ArrayLoader(rows(36), 16, shuffle=True, seed=3), validation)
    trained = trainer.module
    return {
        "losses": losses.losses,
        "metrics": plain(dict(trainer.callback_metrics)),
        "predictions": plain(trainer.predict(None, validation)),
        "weights": plain([trained.inner.kernel[...], trained.outer.kernel[...], trained.norm.mean[...]]),
        "sharded": not trained.inner.kernel[...].sharding.is_fully_replicated,
    }


def train_on(loader, **options):
    trainer, module = make_trainer(num_sanity_val_steps=0, **({"strategy": "ddp"} | BARE | options)), Scale()
    trainer.fit(module, loader)
    return {
        "weights": plain(module.w[...]),
        "metrics": plain(dict(trainer.callback_metrics)),
        "validation": plain(trainer.validate(Scale(), loader)),
        "predictions": plain(trainer.predict(Scale(), loader)),
    }


def train_window(strategy, *callbacks, loader=None, **arguments):
    """Train two epochs of five batches, two to a step, with checkpoints, and return the parameters."""
    given = BARE | {"enable_checkpointing": True, "max_epochs": 2, "accumulate_grad_batches": 2}
    trainer = make_trainer(*callbacks, strategy=splitting(strategy), **(given | arguments))
    trainer.fit(Slow(16, 0, 0.2, rngs=nnx.Rngs(0)), loader or shuffled())
    return plain(jax.tree.leaves(trainer.state.params))


def shuffled():
    return jl.ArrayLoader(rows(71), 16, shuffle=True, seed=3)  # with a tail of 7 rows


def save_at(batches, path):
    """Save where so many batches are done, in the middle of a window of the second epoch."""
    return hooks(on_train_batch_end=lambda t, *_: position_of(t).total_batch_idx == batches and t.save_checkpoint(path))


def of_own_rows():
    return Stream([{key: x[:16][own_rows(16)] for key, x in rows(ROWS).items()}] * 5)


def host_keys_of(loader):
    seen, predicted = Batches(), []
    watch = hooks(on_predict_batch_end=lambda t, m, outputs, batch, *_: predicted.append(batch))
    trainer = make_trainer(seen, watch, strategy="ddp", num_sanity_val_steps=0, host_keys=("id",), **BARE)
    trainer.fit(Scale(), loader, loader)
    assert trainer.predict(Scale(), loader, return_predictions=False) is None
    result = [[list(batch["id"]) for batch in x] for x in (seen.train[0], seen.val[0], predicted)]
    return result, error_of(lambda: trainer.predict(Scale(), loader))


class Download(jl.DataModule):
    """Downloads so slowly that a process which did not wait would find nothing."""

    fails = False

    def prepare_data(self):
        if self.fails:
            raise OSError("the disk is full")
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            key_value_store().blocking_key_value_get("set up/1", 500)
        with Path("calls").open("a") as file:
            file.write(str(jax.process_index()))

    def setup(self, stage):
        key_value_store().key_value_set(f"set up/{jax.process_index()}", "")
        say("prepared", Path("calls").read_text())

    def train_dataloader(self):
        return jl.ArrayLoader(rows(8), 8)


def meet():
    jl.distributed.initialize("127.0.0.1:1", 2, 0)  # a second call does nothing
    say("processes", [jax.process_count(), jax.process_index(), jax.device_count()])
    own = {"default_root_dir": Path(f"run{jax.process_index()}").absolute(), "logger": True}
    say("list", train_on(own_batches(26), **own))
    say("spanning", train_on(own_batches(26), strategy=jl.strategies.DDP(mesh={"copies": 2, "data": -1})))
    say("replicas", train_on(own_batches(26), strategy="replicas:16"))
    say("files", sorted(x.name for x in own["default_root_dir"].rglob("[!.]*")))
    for strategy in ("pmap", "single"):
        say(strategy, error_of(lambda: make_trainer(strategy=strategy).strategy))  # noqa: B023
    say("devices", error_of(lambda: make_trainer(strategy="ddp", devices=4).strategy))
    make_trainer(strategy="ddp", **BARE).fit(Scale(), datamodule=Download())
    failing = Download()
    failing.fails = True
    say("failed", error_of(lambda: make_trainer(strategy="ddp", **BARE).fit(Scale(), datamodule=failing)))
    Path("taken").write_text("a file in the folder's place")
    say("taken", error_of(lambda: train_window("ddp", jl.callbacks.ModelCheckpoint("taken"))))
    data, folder = rows(48), Path("together").absolute()
    data["x"][20] = np.nan  # in the second batch
    given = BARE | {"strategy": "ddp", "max_epochs": 1, "enable_checkpointing": True, "default_root_dir": folder}
    words = error_of(lambda: make_trainer(**given).fit(Scale(), jl.ArrayLoader(data, 16)))
    team().agree("it is written", None)
    state = state_of(folder / "checkpoints" / "step_00000001")
    say("bad", [words, state["not_finite"]])
    same = [rows(8), rows(8)]
    make_trainer(strategy="ddp", **BARE).fit(Scale(), same)  # which ends both


def train_streams_of_more():
    for case in MORE:
        say(case, train_stream(case))
    strategy, size = LISTS[1]
    say("list", train_on(own_batches(size), strategy=strategy))


def train_everything():
    for case in STREAMS:
        say(case, train_stream(case))
    strategy, size = LISTS[0]
    say("list", train_on(own_batches(size), strategy=strategy))
    for name, tail in TAILS:
        arrays = jl.ArrayLoader(rows(16 + tail), 16)
        say(f"{name} {tail}", train_on(arrays if name == "arrays" else Stream(arrays), strategy="shard_map"))
    share = grain.MapDataset.source(records())[jax.process_index() :: jax.process_count()]
    say("grain", train_on(share.batch(26), prefetch=2))
    sampler = grain.samplers.IndexSampler(
        ROWS, shard_options=jl.distributed.shard_options(), shuffle=False, num_epochs=1
    )
    batched = [grain.transforms.Batch(16)]
    loader = grain.DataLoader(data_source=records(), sampler=sampler, operations=batched, worker_count=0)
    say("DataLoader", train_on(loader))
    named = {"ArrayLoader": jl.ArrayLoader(rows(36) | {"id": np.arange(36).astype(object)}, 16)}
    named["list"] = [batch | {"id": batch["row"].tolist()} for batch in own_batches(26)]
    for name, loader in named.items():
        say(f"{name} with ids", host_keys_of(loader))


def work():
    train_everything()
    for strategy in RESUMED:
        folder = Path("..") / "of_two" / strategy
        saves = [jl.callbacks.ModelCheckpoint(folder / "auto")] if strategy == "fsdp" else []
        say(f"{strategy} whole", train_window(strategy, save_at(8, folder / "window"), *saves))
        resume = Path("..") / f"of_{RESUMED[strategy]}" / strategy / "window"
        say(f"{strategy} resumed", train_window(strategy, resume=resume))
    # Only one process sees the damage; both pass over it.
    root = Path("..") / "of_two" / "fsdp" / "auto"
    (newest,) = [path for path in root.iterdir() if path.name.startswith("step_")]
    team().agree("it is there", None)
    if jax.process_index() == 0:
        shutil.copytree(newest, root / "step_00000099")
        state = data_of(root / "step_00000099") / "state.json"
        state.write_bytes(state.read_bytes().replace(b"8", b"9", 1))
    team().agree("it is damaged", None)
    trainer = make_trainer(strategy=splitting("fsdp"), max_epochs=2, accumulate_grad_batches=2, **BARE)
    trainer.fit(Slow(16, 0, 0.2, rngs=nnx.Rngs(0)), shuffled(), ckpt_path=root)
    say("step", [trainer.global_step, state_of(newest)["global_step"]])
    say("refused", error_of(lambda: train_window("ddp", resume=Path("..") / "of_one" / "own", loader=of_own_rows())))


def be_taken():
    """Train until the machine of process 1 is taken, and continue."""

    def tell(trainer, *_):
        if trainer.global_step == 3 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    given = BARE | {"enable_checkpointing": True, "default_root_dir": Path("run").absolute(), "resume": "auto"}
    trainer = make_trainer(hooks(on_train_batch_end=tell), strategy="ddp", max_steps=20_000, max_epochs=None, **given)
    try:
        trainer.fit(Mean(), [{"x": np.full((4, 1), jax.process_index(), np.float32)}] * 20_000)
    finally:
        say("ended", [trainer.global_step, trainer.interrupted])


class Rated(Mean):
    """Logs another score in each process, and has a rate that can be set."""

    def on_train_epoch_end(self):
        self.log("score", [5.0, 2.0, 4.0][(jax.process_index() + self.trainer.current_epoch) % 3])
        self.log("same", 3.0 - self.trainer.current_epoch)

    def configure_optimizers(self):
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.05)


def set_weights(trainer, module):
    module.w[...] = module.w[...] + jax.process_index()


def set_local_weights(trainer, module):
    if jax.process_index() == 1 and trainer.current_epoch == 1:
        module.w[...] = np.full(1, 7.0, np.float32)


def set_rate(trainer, *_):
    if jax.process_index() == 1 and trainer.global_step == 5:
        trainer.hyperparams["learning_rate"] = 0.5


def set_equally(trainer, module):
    module.w[...] = module.w[...] + 1
    trainer.hyperparams["learning_rate"] *= 0.5


MONITORS = {
    "checkpoint": lambda: jl.callbacks.ModelCheckpoint("checkpoint", monitor="score"),
    "plateau": lambda: jl.callbacks.ReduceLROnPlateau("score", patience=1, check_on_train_epoch_end=True),
}
WRITES = {
    "global": (set_weights, "on_train_epoch_end"),
    "local": (set_local_weights, "on_train_epoch_end"),
    "last": (set_weights, "on_train_end"),
    "rate": (set_rate, "on_train_batch_end"),
}
SAVED = {"global": 2, "local": 5, "last": 9, "rate": 4}  # before the hook wrote: a checkpoint comes with each step


def differ():
    """Log and write what differs between the processes, and what does not."""

    def fit(*callbacks, module=None):
        given = BARE | {"strategy": "ddp", "max_epochs": 3, "enable_checkpointing": True}
        trainer = make_trainer(*callbacks, **given)
        trainer.fit(module or Rated(), jl.ArrayLoader(rows(16 * 3), 16))
        return trainer

    for name, monitor in MONITORS.items():
        say(name, error_of(lambda: fit(monitor())))  # noqa: B023
    for name, (write, hook) in WRITES.items():
        saves = jl.callbacks.ModelCheckpoint(name, every_n_train_steps=1, save_on_exception=False)
        say(name, error_of(lambda: fit(hooks(**{hook: write}), saves)))  # noqa: B023
        team().agree("all is written", None)
        say(f"{name} saved", names(name) if Path(name).exists() else [])
    monitors = [jl.callbacks.ModelCheckpoint("same", monitor="same"), jl.callbacks.EarlyStopping("same")]
    module = Rated()
    trainer = fit(*monitors, hooks(on_train_epoch_end=set_equally), module=module)
    say("equal", [plain(module.w[...]), trainer.hyperparams["learning_rate"], names("same")])
    trainer.validate(module, batches := [{"x": np.ones((8, 1), np.float32)}])
    if jax.process_index() == 1:
        module.w[...] = np.full(1, 7.0, np.float32)
    say("validate", error_of(lambda: trainer.validate(module, batches)))


def records():
    data = rows(ROWS)
    return [{key: x[i] for key, x in data.items()} for i in range(ROWS)]


def close(result, expected, rtol=1e-6):
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def check_against_numpy(result, global_batches, count):
    """Compare what `train_on` found with formulas, given the numbers of the rows of each batch of all processes."""
    x = rows(count)["x"].astype(np.float64)
    seen = x[np.concatenate(global_batches)]
    metrics = {"mean": seen.mean(), "sum": seen.sum(), "min": seen.min(), "max": seen.max()}
    assert result["metrics"] == pytest.approx(metrics, rel=1e-6)
    assert result["validation"] == [pytest.approx(metrics, rel=1e-6)]
    gradients = sum(x[batch].mean(0) / 3 for batch in global_batches)
    np.testing.assert_allclose(result["weights"], np.arange(1.0, 4.0) - gradients, rtol=1e-6, atol=1e-6)
    for batch, prediction in zip(global_batches, result["predictions"], strict=True):
        assert prediction["row"] == batch.tolist()
        np.testing.assert_allclose(prediction["y"], np.arange(1.0, 4.0) * x[batch], rtol=1e-6)


def interleaved(size):
    """Return the rows of the global batches where each process has every second row."""
    own = [np.arange(ROWS)[process::2] for process in range(2)]
    return [np.concatenate([x[i : i + size] for x in own]) for i in range(0, len(own[0]), size)]


@pytest.mark.full
def test_two_processes_train_on_their_own_rows(tmp_path):
    for index, process in enumerate(launch(meet, tmp_path / "run")):
        said, errors = process.said, process.errors
        assert process.code == 1 and "fit(train_dataloaders=...): every process reads the same rows" in errors, errors
        assert said["processes"] == [2, index, 8]
        check_against_numpy(said["list"], interleaved(26), ROWS)
        check_against_numpy(said["spanning"], interleaved(26), ROWS)
        check_against_numpy(said["replicas"], interleaved(26), ROWS)
        assert said["files"] == (["metrics.csv"] if index == 0 else []), "only process 0 writes"
        for strategy in ("pmap", "single", "devices"):
            assert said[strategy].startswith("ArgumentError")
            assert ("2 processes" if strategy == "devices" else "there are 2") in said[strategy]
        assert said["prepared"] == "0", "one has downloaded while the other waited"
        failed = "OSError: the disk is full" if index == 0 else "process 0: OSError('the disk is full')"
        assert said["failed"].endswith(failed)
        assert "No checkpoint can be written" in said["taken"]
        words, note = said["bad"]
        assert "at optimizer step 1 " in words and "run again" not in words
        assert (note["step"], note["batches"]) == (1, [1, 2])


@pytest.mark.full
def test_a_sigterm_to_one_process_ends_all_at_one_step(tmp_path):
    first, second = launch(be_taken, tmp_path, devices=1, grace=60.0)
    assert [first.code, second.code] == [143, 143], first.errors + second.errors
    (step, interrupted), other = first.said["ended"], second.said["ended"]
    assert other == [step, interrupted] and interrupted and 3 <= step < 20_000
    assert names(tmp_path / "run" / "checkpoints") == [f"step_{step:08d}"]


def test_what_hooks_log_and_write_is_the_same_in_all_processes(tmp_path):
    processes = launch(differ, tmp_path, devices=1, grace=60.0)
    assert [process.code for process in processes] == [0, 0], processes[0].errors + processes[1].errors
    for process in processes:
        said = process.said
        for name, owner in (("checkpoint", "ModelCheckpoint"), ("plateau", "ReduceLROnPlateau")):
            assert said[name].startswith("ProcessError: ") and f"{owner}(monitor='score')" in said[name]
            assert re.search(r"self\.log\('score', \.\.\.\): 5\.0 in process 0 .*; 2\.0 in process 1", said[name])
        for name in WRITES:
            written = "trainer.hyperparams" if name == "rate" else "w, written in Made.on_train_"
            assert said[name].startswith("ProcessError: ") and written in said[name], said[name]
            assert said[f"{name} saved"] == [f"step_{SAVED[name]:08d}"], "what was saved before"
        weight, rate = 0.0, 0.05
        x = rows(48)["x"].astype(np.float64)
        for _ in range(3):
            for batch in range(3):
                weight += 2 * rate * (x[16 * batch :][:16] - weight).mean()
            weight, rate = weight + 1, rate / 2
        assert said["equal"] == [pytest.approx([weight]), pytest.approx(rate), ["step_00000009"]]
        assert said["validate"].startswith("ProcessError: ") and "module.w: nothing in process 0" in said["validate"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder of what one process saves, and the weights with which it ends, by strategy."""
    folder = tmp_path_factory.mktemp("processes")
    where = lambda strategy: folder / "of_one" / strategy / "window"  # noqa: E731
    weights = {strategy: train_window(strategy, save_at(8, where(strategy))) for strategy in RESUMED}
    train_window("ddp", save_at(3, folder / "of_one" / "own"), loader=of_own_rows())
    return folder, weights


@pytest.fixture(scope="module")
def two(alone):
    processes = launch(work, alone[0] / "run")
    assert [process.code for process in processes] == [0, 0], processes[0].errors + processes[1].errors
    return processes


@pytest.mark.full
def test_two_processes_train_as_one_does(two):
    own = ROWS // 2  # the last record does not divide, and is left out
    shared = [np.arange(i, min(i + 16, own)) for i in range(0, own, 16)]
    check_streams(STREAMS, two)
    for index, process in enumerate(two):
        said = process.said
        check_against_numpy(said["list"], interleaved(LISTS[0][1]), ROWS)
        for name, tail in TAILS:
            check_against_numpy(said[f"{name} {tail}"], [np.arange(16), np.arange(16, 16 + tail)], 16 + tail)
        check_against_numpy(said["grain"], interleaved(26), ROWS)
        check_against_numpy(said["DataLoader"], [np.concatenate([x, own + x]) for x in shared], ROWS)
        check_host_keys(said, index)


@pytest.mark.sweep
def test_two_processes_train_as_one_does_by_more_strategies(tmp_path):
    check_streams(MORE, processes := launch(train_streams_of_more, tmp_path))
    for process in processes:
        check_against_numpy(process.said["list"], interleaved(LISTS[1][1]), ROWS)


def check_streams(cases, processes):
    for case in cases:
        expected = train_stream(case)
        assert len(expected["losses"]) == 6
        for process in processes:
            said = process.said[case]
            for part in expected:
                close(said[part], expected[part])
            assert said["sharded"] == (case.split()[0] not in ("ddp", "zero1", "shard_map"))


def check_host_keys(said, process):
    """Hooks see what this process drew, and predictions with host keys are refused."""
    mine, half, tail = np.arange(ROWS)[process::2].tolist(), 8 * process, 32 + 2 * process
    drawn = {"list": [mine[:26], mine[26:]]}
    drawn["ArrayLoader"] = [[*range(half, half + 8)], [*range(16 + half, 24 + half)], [*range(tail, tail + 2)]]
    for name, expected in drawn.items():
        result, refusal = said[f"{name} with ids"]
        assert result == [expected] * 3
        assert refusal.startswith("ArgumentError") and "host_keys" in refusal and "return_predictions=False" in refusal


@pytest.mark.full
def test_processes_continue_where_others_stopped(alone, two):
    folder, weights = alone
    for process in two:
        said, errors = process.said, process.errors
        for strategy, expected in weights.items():
            if RESUMED[strategy] == "two":
                assert said[f"{strategy} resumed"] == said[f"{strategy} whole"], "as many continue bit by bit"
            close(said[f"{strategy} resumed"], expected)
        assert said["step"][0] == said["step"][1] and "step_00000099" in errors and "state.json is damaged" in errors
        assert "as many processes as before: 1, not 2" in said["refused"] and "ArrayLoader" in said["refused"]
    for strategy, expected in weights.items():
        result = train_window(strategy, resume=folder / "of_two" / strategy / "window")
        close(result, two[0].said[f"{strategy} whole"])
        close(result, expected, rtol=1e-5)
