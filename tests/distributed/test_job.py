"""How a job starts, which rows are whose, and what only process 0 does; trainings that differ are refused in all.

tests/distributed/test_processes.py starts real processes.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.distributed import global_state
from kit.batches import random, sized
from kit.journal import hooks
from kit.modules import Linear
from kit.modules import module as made
from kit.processes import error_of, launch, say
from kit.refusals import refuses
from kit.stages import Layered
from kit.threads import as_processes
from kit.trainers import BARE, THREE, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.distributed import job
from jaxlit.distributed.job import environment, job_size, same_job, same_program
from jaxlit.distributed.team import _MultiProcess, fetch
from jaxlit.errors import ArgumentError, ProcessError
from jaxlit.strategies import Pipeline

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "here", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}
JOBS = {
    "slurm": (SLURM | {"SLURM_LOCALID": "0"}, 4),
    "a shell of slurm": (SLURM, 1),
    "mpi": ({"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:3", "OMPI_COMM_WORLD_SIZE": "3"}, 3),
    "a pod": ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),
    "variables": ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2"}, 2),
    "alone on purpose": (SLURM | {"SLURM_LOCALID": "0", "JAX_NUM_PROCESSES": "1"}, 1),
    "nothing": ({}, 1),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_size_of_a_job_is_read_from_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, size = JOBS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    assert job_size() == size


def test_a_trainer_that_would_train_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    with pytest.raises(ProcessError, match=r"a job of 3 processes, but jax runs .* jl\.distributed\.initialize\(\)"):
        make_trainer(**BARE)


def test_a_trainer_joins_the_job_before_jax_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = list[dict[str, Any]]()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "0")
    monkeypatch.setattr(job, "jax_runs", lambda: False)
    monkeypatch.setattr(job, "fate", lambda *args: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **named: joined.append(named))
    with pytest.raises(ProcessError, match="a job of 3 processes, and jax has found 1"):
        make_trainer(**BARE)
    monkeypatch.setattr(global_state, "num_processes", 3)
    make_trainer(**BARE)
    assert [named["heartbeat_timeout_seconds"] for named in joined] == [100, 100]


def test_rank_zero_only_runs_in_process_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    @jl.rank_zero_only
    def written(text: str) -> int:
        return len(text)

    assert written("done") == 4
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert written("done") is None


class Reader(jl.Callback):
    """Reads weights that both processes hold parts of, in one of them."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and batch_idx == 1:
            fetch(module.kernel[...])


def read_alone() -> None:
    (rows,) = random(1, rows=32)
    say("global", jax.process_count())
    arguments = BARE | {"debug": True, "max_epochs": 1, "strategy": jl.strategies.FSDP(min_size=0)}
    fit(Linear(4), jl.ArrayLoader(rows | {"x": np.ones((32, 4), np.float32)}, 8), None, Reader(), **arguments)


@pytest.mark.full
def test_debug_names_the_callback_that_reads_in_one_process(tmp_path: Path) -> None:
    ended = launch(read_alone, tmp_path, devices=2, grace=60.0)
    assert [one.code for one in ended] == [1, 1]
    for one in ended:
        assert "at 'Reader.on_train_batch_end reads an array that all processes hold parts of'" in one.errors
        assert "at 'the end of step 2'" in one.errors


def test_own_rows_are_parts_that_differ_by_one_row_at_most(monkeypatch):
    assert [job.own_rows(n) for n in (64, 7)] == [slice(0, 64), slice(0, 7)], "alone all are one's own"
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    for rows in (9, 7, 2):
        parts = [[*range(rows)][job.own_rows(rows, process)] for process in range(3)]
        assert [row for part in parts for row in part] == [*range(rows)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("given", [("a:1", None, 0), ("a", 2, 0), ("a:1", 2, 2), ("a:1", 2, -1)])
def test_initialize_refuses_arguments_that_do_not_fit(given):
    assert jax.devices()  # so that what is not refused here is refused later
    words = ("'host:port'", "counts from 0", re.escape(", ".join(map(repr, given))), "all three, or none")
    refuses(ArgumentError, lambda: jl.distributed.initialize(*given), *words)


@pytest.mark.parametrize("given", [("a:1", "2", "2"), ("a", "2", "0"), ("a:1", "2", ""), ("a:1", "two", "0")])
def test_a_job_that_the_environment_names_wrongly_is_refused(given, monkeypatch):
    for name, value in zip(("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), given, strict=True):
        monkeypatch.setenv(f"JAX_{name}", value)
    refuses(ArgumentError, jl.distributed.initialize, f"got {given[0]!r}, ", "JAX_NUM_PROCESSES and JAX_PROCESS_ID")


def test_initialize_takes_the_job_that_the_environment_names(monkeypatch):
    calls = []
    monkeypatch.setattr(job, "jax_runs", lambda: False)
    monkeypatch.setattr(job, "_wait_for", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **_: calls.append(given[:3]))
    for name, value in (("COORDINATOR_ADDRESS", "node0:1234"), ("NUM_PROCESSES", "4"), ("PROCESS_ID", "3")):
        monkeypatch.setenv(f"JAX_{name}", value)
    jl.distributed.initialize()
    assert calls == [("node0:1234", 4, 3)]
    jl.distributed.initialize("node1:1234", 2, 0)
    assert calls[1:] == [("node1:1234", 2, 0)], "arguments come first"


def test_initialize_after_the_first_use_of_jax_is_refused(monkeypatch):
    assert jax.devices()
    for _ in range(2):
        jl.distributed.initialize()
    assert not jax.distributed.is_initialized()
    words = "distributed.initialize came after the first use of jax"
    refuses(ProcessError, lambda: jl.distributed.initialize("127.0.0.1:1", 2, 1, timeout=5), words)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")  # which jax would find
    refuses(ProcessError, jl.distributed.initialize, words)


def test_a_coordinator_that_is_not_there_is_named_in_time(monkeypatch):
    monkeypatch.setattr(job, "jax_runs", lambda: False)
    unused = "127.0.0.1:9"  # the discard service, which nobody runs
    refuses(ProcessError, lambda: jl.distributed.initialize(unused, 2, 1, timeout=0), f"did not meet at {unused}")


(ROWS,) = sized(32, seed=1)


class Model(Linear):
    """Takes everything that a process may have otherwise."""

    def __init__(self, width: int = 8, *, hidden: dict[str, Any] | None = None, rngs: nnx.Rngs) -> None:
        self.hidden = {"width": 8, "dtype": jnp.float32, "rate": 0.1, "factor": 1.0, "scale": 1.0} | (hidden or {})
        kinds = {"param_dtype": self.hidden["dtype"], "rngs": rngs}
        scaled = nnx.initializers.normal(self.hidden["scale"])
        self.inner = nnx.Linear(3, self.hidden["width"], kernel_init=scaled, **kinds)
        self.outer = nnx.Linear(self.hidden["width"], 1, **kinds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(jnp.tanh(self.inner(x)))

    def training_step(self, batch: Any) -> jax.Array:
        return self.loss(batch) * self.hidden["factor"]

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch) * self.hidden.get("validation", 1.0))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.hidden.get("tx", optax.sgd)(self.hidden["rate"])


class Mean(jl.Callback):
    def init_arrays(self, params: Any) -> Any:
        return params

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        return params, params


class Norm(Mean):
    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        return grads, params


Run = dict[str, Any]  # the arguments of the Trainer, and `model` and `callbacks`
HERE = r"\(\S*test_job\.py:\d+\)"


def module(seed: int = 0, **hidden: Any) -> Model:
    # Arguments that are kept would name the difference before the program does, which is what is tested.
    return Model(hidden=hidden | {"unkept": object()}, rngs=nnx.Rngs(seed))


def stages(rate: float) -> Any:
    init = lambda self: Layered.__init__(self, rngs=nnx.Rngs(0))  # noqa: E731
    return made(base=Layered, tx=optax.sgd(rate), init=init)


def plateaus(rate: float) -> optax.GradientTransformation:
    """Return an optimizer whose rate is in its state, not in the step's program."""
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


def with_config(odd: bool) -> Run:
    jax.config.update("jax_default_matmul_precision", "float32" if odd else None)
    return {}


def with_version(odd: bool) -> Run:
    flax.__version__ = "0.0.1" if odd else REAL_VERSION
    return {}


REAL_VERSION = flax.__version__
RATES = (0.1, 0.3)


def by_rate(program: str) -> tuple[str, str]:
    """Return how a refusal names the equations of a program that differ in the rate."""
    first, second = (rf"\S+ = mul -{re.escape(str(rate))} v\d+ \(optax/\S+:\d+\)" for rate in RATES)
    return rf"equation \d+ of {program}: {first}", second


BY_FACTOR = (rf"equation \d+ of the user's step: \S+ = mul v\d+ 1\.0 {HERE}", rf"\S+ = mul v\d+ 2\.0 {HERE}")
KEY = r"v\d+ = constant key<fry>\[\] with checksum \w{8}"
# Arguments of the Trainer, with the value of a process and that of the odd one.
ARGUMENTS: dict[str, tuple[Any, Any]] = {"max_steps": (4, 60), "accumulate_grad_batches": (1, 2)}
ARGUMENTS |= {"gradient_clip_val": (None, 0.5), "precision": ("32-true", "bf16-mixed"), "strategy": ("ddp", "fsdp")}
ARGUMENTS |= {"enable_checkpointing": (False, True)}
KERNEL, CHECKSUM, IN = r"module\.inner\.kernel: float32\[3, 8\]", r" with checksum \w{8}", r" in \w+\(\)"
# What a process is given, of whether it is the odd one, and what the refusal says of one after the other.
CASES: dict[str, tuple[Callable[[bool], Run], str, str]] = {
    **{
        name: (lambda odd, name=name, x=x: {name: x[odd]}, rf"Trainer\({name}=\): '?{x[0]}'?", f"'?{x[1]}'?")
        for name, x in ARGUMENTS.items()
    },
    "loggers": (lambda odd: {"logger": odd}, r"Trainer\(logger=\): none", "some"),
    "folder": (
        lambda odd: {"default_root_dir": Path("here").absolute() if odd else None},
        *(r"Trainer\(default_root_dir=\): None", "a path"),
    ),
    "seed": (lambda odd: {"model": jl.lazy(Model), "seed": (5, 3)[odd]}, r"Trainer\(seed=\): 5", "3"),
    "hyperparameter": (lambda odd: {"model": Model((8, 16)[odd], rngs=nnx.Rngs(0))}, r"Model\(width=\): 8", "16"),
    "lazy argument": (lambda odd: {"model": jl.lazy(Model, (8, 16)[odd])}, r"Model\(width=\): 8", "16"),
    "early stopping": (
        lambda odd: {"callbacks": [jl.callbacks.EarlyStopping("val", patience=4 + odd)]},
        *(r"Trainer\(callbacks=\): EarlyStopping\('val', patience=4\)", r"EarlyStopping\('val', patience=5\)"),
    ),
    "version": (with_version, rf"flax: {re.escape(REAL_VERSION)}", "0.0.1"),
    "matmul precision": (with_config, "jax_default_matmul_precision: None", "float32"),
    "width": (lambda odd: {"model": module(width=(8, 16)[odd])}, KERNEL + IN, rf"float32\[3, 16\]{IN}"),
    "dtype": (
        lambda odd: {"model": module(dtype=(jnp.float32, jnp.bfloat16)[odd])},
        *(KERNEL + IN, rf"bfloat16\[3, 8\]{IN}"),
    ),
    "weights": (
        lambda odd: {"model": module(int(odd))},
        *(f"values of {KERNEL}{CHECKSUM}", rf"float32\[3, 8\]{CHECKSUM}"),
    ),
    "order": (
        lambda odd: {"callbacks": [Norm(), Mean()] if odd else [Mean(), Norm()]},
        *("callbacks with arrays: Mean, Norm", "Norm, Mean"),
    ),
    "optimizer": (
        lambda odd: {"model": module(tx=(optax.sgd, optax.adam)[odd])},
        *("the optimizer: .*", ".*ScaleByAdamState.*"),
    ),
    "lazy rngs": (
        lambda odd: {"model": jl.lazy(Model, rngs=nnx.Rngs(int(odd)))},
        *(rf"equation \d+ of create_state: {KEY}", KEY),
    ),
    "initial rate": (
        lambda odd: {"model": module(tx=plateaus, rate=RATES[odd])},
        *(r"equation \d+ of create_state: .*\b0\.1.*", r".*\b0\.3.*"),
    ),
    "rate": (lambda odd: {"model": module(rate=RATES[odd])}, *by_rate("train_step")),
    "code": (lambda odd: {"model": module(factor=1.0 + odd)}, *BY_FACTOR),
    "pipeline": (
        lambda odd: {"model": stages(RATES[odd]), "strategy": Pipeline(2, microbatches=2, layers="layers")},
        *by_rate("train_step_end"),
    ),
    "validation": (lambda odd: {"model": module(validation=1.0 + odd)}, *BY_FACTOR),
}


def run(given: Run) -> jl.Trainer:
    model = given.pop("model", None) or module()
    given = {"strategy": "ddp", "max_epochs": None, "max_steps": 4} | BARE | given
    trainer = make_trainer(*given.pop("callbacks", []), **given)
    trainer.fit(model, jl.ArrayLoader(ROWS, 16), jl.ArrayLoader(ROWS, 16))
    return trainer


def compile_with(rate: float) -> None:
    batch = {key: x[:8] for key, x in ROWS.items()}
    state, step = jl.compile_step(module(rate=rate), batch=batch, strategy="fsdp")
    step(state, batch)


def validate(count: int) -> None:
    make_trainer(strategy="ddp", limit_val_batches=count, **BARE).validate(module(), jl.ArrayLoader(ROWS, 8))


# What else a process may call, given whether it is the odd one.
OTHER_CALLS: dict[str, tuple[Callable[[bool], Any], str, str]] = {
    "compile_step": (lambda odd: compile_with(RATES[odd]), *by_rate("train_step")),
    "validate": (lambda odd: validate(1 + odd), r"Trainer\(limit_val_batches=\): 1", "2"),
}


def train_otherwise() -> None:
    index, began = jax.process_index(), list[int]()
    for name, (make, _, _) in CASES.items():
        given = make(index == 1)
        watch = hooks(on_train_batch_end=lambda trainer, *_: began.append(trainer.global_step))
        given["callbacks"] = [*given.get("callbacks", []), watch]
        say(name, error_of(lambda given=given: run(given)))
        with_version(False), with_config(False)
    say("steps", began)
    for name, (call, _, _) in OTHER_CALLS.items():
        say(name, error_of(lambda call=call: call(index == 1)))
    loggers = [jl.callbacks.CSVLogger(), jl.callbacks.CSVLogger("second.csv")]
    mine = {"default_root_dir": Path(f"run{index}").absolute(), "prefetch": index, "logger": loggers[index:]}
    say("may differ", run(mine | {"enable_progress_bar": index == 0}).global_step)
    run({"model": module(factor=1.0 + index)})  # which ends both


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What two processes have said, that differ in one thing after the other."""
    return launch(train_otherwise, tmp_path_factory.mktemp("same_job"))


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *OTHER_CALLS])
def test_what_differs_is_refused_in_both_with_both_values(case: str, two: Any) -> None:
    _, first, second = (CASES | OTHER_CALLS)[case]
    for process in two:
        message = process.said.get(case, process.errors)
        assert message.startswith("ProcessError: ")
        assert re.search(rf"^  {first} in process 0 \(\S+\); {second} in process 1 \(\S+\)$", message, re.M), message


@pytest.mark.full
def test_no_step_is_taken_and_both_end_but_paths_may_differ(two: Any) -> None:
    for process in two:
        assert process.said["steps"] == []
        assert process.said["may differ"] == 4
        assert process.code == 1, process.errors
        assert "ProcessError: The processes do not run the same training." in process.errors


def messages(monkeypatch: pytest.MonkeyPatch, items: list[dict[str, str]]) -> list[str]:
    work = lambda index: same_job("the arguments", lambda: items[index])  # noqa: E731
    errors = as_processes(monkeypatch, work, len(items))
    assert [type(error) for error in errors] == [ProcessError] * len(items)
    return list(map(str, errors))


def test_processes_that_agree_exchange_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    given, agree = list[Any](), _MultiProcess.agree

    def noting(self: _MultiProcess, topic: str, value: Any, **named: Any) -> list[Any]:
        given.append(value)
        return agree(self, topic, value, **named)

    monkeypatch.setattr(_MultiProcess, "agree", noting)
    items = [{"a": "1" * 10_000, "b": "2"}, {"b": "2", "a": "1" * 10_000}, {"a": "1" * 10_000, "b": "2"}]
    assert as_processes(monkeypatch, lambda index: same_job("the arguments", lambda: items[index]), 3) == [None] * 3
    assert len(given) == 3 and len(set(given)) == 1 and len(given[0]) == 16


def test_one_process_makes_no_items() -> None:
    def fail() -> Any:
        raise AssertionError

    same_job("the arguments", fail)
    same_program("a program", fail)


def test_every_process_names_what_differs_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.socket, "gethostname", lambda: f"host{jax.process_index()}")
    items = [{"same": "0", "steps": "4", "rate": "1"}, {"same": "0", "steps": "60"}, {"same": "0", "steps": "4"}]
    first, *others = messages(monkeypatch, items)
    assert others == [first] * 2
    assert first.splitlines()[1:] == [
        "  steps: 4 in process 0 (host0), process 2 (host2); 60 in process 1 (host1)",
        "  rate: 1 in process 0 (host0); nothing in process 1 (host1), process 2 (host2)",
    ]


def test_a_long_message_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "x" * 1000
    one, two = {"text": f"{long}1{long}"}, {"text": f"{long}2{long}"}
    (line,) = messages(monkeypatch, [one, two])[0].splitlines()[1:]
    values = re.fullmatch(r"  text: \.\.\.(x+1x+)\.\.\. in process 0 .*; \.\.\.(x+2x+)\.\.\. in process 1 .*", line)
    assert values is not None and [len(x) for x in values.groups()] == [160, 160]
    many = [{f"item {i}": str(process) for i in range(30)} for process in range(2)]
    lines = messages(monkeypatch, many)[0].splitlines()[1:]
    assert len(lines) == 9 and lines[-1] == "  and 22 more"


def test_what_is_dumped_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.local_devices()  # XLA ends the process at such flags if it reads them
    monkeypatch.setenv("XLA_FLAGS", "--xla_b --xla_dump_to=dumps --xla_a=1")
    assert environment()["XLA_FLAGS"] == "--xla_a=1 --xla_b"


def like_another(note: Callable[..., Any]) -> Any:
    """Return what stands for `team`: the processes are this one and its equal, and each topic and digest is noted."""
    agree = staticmethod(lambda topic, digest: note(topic, digest) or [digest] * 2)
    return type("Equals", (), {"size": 2, "index": 0, "agree": agree})


@pytest.mark.parametrize("strategy", thinned(THREE, "shard_map", full=()))
def test_comparing_traces_no_step_again(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = list[Any]()

    def count(team: Any) -> int:
        calls = list[int]()
        step = lambda self, batch: calls.append(0) or self.loss(batch)  # noqa: E731
        monkeypatch.setattr(job, "team", team)
        run({"strategy": strategy, "model": made(step, base=Linear, validation=step)})
        return len(calls)

    counts = [count(job.team), count(like_another(lambda *noted: digests.append(noted)))]
    assert counts[0] == counts[1]
    assert "the program train_step" in [topic for topic, _ in digests]


def print_digests() -> None:
    """Print the digest of all that this process would compare, in trainings with much to compare."""
    job.team = like_another(print)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0, "nan_policy": "skip"}
    for strategy in ("fsdp", "hsdp", "shard_map"):
        kept = [Mean(), Norm(), jl.callbacks.EMA(0.9), jl.callbacks.GradientNorm()]
        run({"strategy": splitting(strategy), "model": module(tx=optax.adamw), "callbacks": kept} | options)
    run({"strategy": "ddp", "model": jl.lazy(Model, hidden={"names": {"b", "a", "c"}})})


@pytest.mark.parametrize(
    "seeds",
    [pytest.param((0, 1), marks=pytest.mark.full), pytest.param(range(20), marks=pytest.mark.sweep)],
    ids=["two", "many"],
)
def test_what_is_compared_depends_on_no_hash_seed(
    seeds: Sequence[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for seed in seeds:
        monkeypatch.setenv("PYTHONHASHSEED", str(seed))
        (ended,) = launch(print_digests, tmp_path, count=1, devices=8, join=False)
        assert ended.code == 0, ended.errors
        printed.append(ended.output)
    assert len(set(printed)) == 1
    assert len(printed[0].splitlines()) > 15
