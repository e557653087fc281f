"""One module under one strategy: the programs that are compiled of its steps, for training and for evaluation."""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit.core.attributes import copied, each_attribute, same
from jaxlit.core.derived_steps import eval_step
from jaxlit.core.inspection import inspect_evaluation
from jaxlit.core.log import StepTable, Table, collecting
from jaxlit.core.module import STAGES, TrainModule
from jaxlit.core.parts import Rates, held_in
from jaxlit.core.pure_module import PureModule, Reads, Traced, reading, set_modes
from jaxlit.core.replica import abstract_batch
from jaxlit.core.train_state import Layout, Precision, StepOptions, cast
from jaxlit.distributed.job import same_job
from jaxlit.distributed.team import fetch
from jaxlit.engine.compiled_program import CompiledProgram, run_eagerly
from jaxlit.engine.creation import epoch_starter, init_state, unshared
from jaxlit.engine.state import StateSpec, WindowBackup, state_spec
from jaxlit.engine.training import Diagnosis, Training, outputs_of, trace_step, training_of
from jaxlit.strategies.base import EACH, ArraySpec, Program, Strategy
from jaxlit.texts import array_text, is_key, leaf_name, named_leaves, stable_text
from jaxlit.variables import split

_logger = logging.getLogger("jaxlit")

_FLOAT32 = Precision()
_Key = tuple[str, int | None]  # a stage, and the loader for a step that asks for it


@dataclass(frozen=True, eq=False)
class _EvalProgram:
    """A stage's step, compiled for batches like the first one: for others the step may log other things."""

    pure: PureModule  # with what the traces of this program have noted
    like: Any  # the structure, shapes and dtypes of the first batch
    program: CompiledProgram


class Engine:
    """Compiles the steps of a module, and runs them on its state.

    Args:
        module: The module; its arrays are copied.
        options: How it is trained; None to evaluate only.
        debug: Donate nothing, so that old arrays stay readable.
        take_ownership: The module's arrays may be overwritten, and need not be copied.

    Attributes:
        state: The arrays.
        outputs_with_rows: Whether each output of `fused_steps` has one row for each row of a batch, a pytree like them.
    """

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        options: StepOptions | None,
        *,
        precision: Precision = _FLOAT32,
        debug: bool = False,
        take_ownership: bool = False,
    ) -> None:
        self.module, self.strategy, self.debug, self.evaluates_only = module, strategy, debug, options is None
        self.nan_policy = "raise" if options is None else options.nan_policy
        self.precision, self._contents = precision, _contents(module, precision)
        graphdef = nnx.graphdef(module, graph=True)
        self.pure = PureModule(graphdef, options.optimizer.wrt if options else nnx.Param, module, precision)
        self._programs: dict[Any, CompiledProgram] = {}
        variables, init = self.pure.split(module), partial(init_state, optax.identity(), 0, precision)
        self.training: Training | None = None
        self.rates, self.extras = Rates(), {}
        if options is None:
            spec = state_spec(self.pure, strategy, init, variables)
        else:
            training = self.training = training_of(module, self.pure, strategy, options)
            self.rates, self.extras = training.rates, dict(training.options.extras)
            init, spec = training.init, training.spec
        # Before arrays are made, for which processes with other shapes would wait for ever.
        same_job("the training state", partial(self._described, spec, variables))
        self.state = spec.make(init, variables, donate=take_ownership)
        self.state.hyperparams_at_start = self.state.hyperparams()
        self.outputs_with_rows: Any = None
        self._restored: Table | None = None  # the training metrics of a checkpoint
        # Of an evaluation: by index, an array of the module and the one in the state that was placed from it.
        self._placed: dict[int, tuple[Any, jax.Array]] = {}
        if options is None and not take_ownership:  # else the module's arrays are overwritten, and show nothing
            leaves = self.state.module_leaves(module)
            self._placed = {i: (leaf.get_raw_value(), self.state.leaves[i]) for _, leaf, i in leaves}
        self._applied: dict[tuple[Callable, int], tuple[Callable, Reads]] = {}
        self._recent_evaluations: dict[_Key, deque[_EvalProgram]] = {}  # of recent runs, the last used at the end
        self._evaluations: dict[_Key, _EvalProgram] = {}  # of this run
        # A program of its own: the step counter is on the devices, and is not waited for.
        self._next_epoch = epoch_starter(strategy.replicated)
        # `prepare_training` also sets train_step, micro_step and diagnose: they need the first batch.
        self.window_start: WindowBackup | None = None

    def serves(self, module: TrainModule, precision: Precision, debug: bool) -> bool:
        """Return whether the programs of this engine are those of the module as it is now.

        What a step reads from elsewhere, such as a global, is compiled into it, as by `jax.jit`.
        """
        # A step or a restore that failed leaves no arrays.
        if (self.module, self.precision, self.debug) != (module, precision, debug) or not self.state.is_complete:
            return False
        (old_graph, old_attributes), (graph, attributes) = self._contents, _contents(module, precision)
        try:
            return old_graph == graph and same(old_attributes, attributes)
        except Exception:  # an attribute's own comparison, for example of arrays
            return False

    def evaluator(self, module: TrainModule | None = None) -> "Engine":
        """Return an engine for one run of evaluations, of the same programs, with the arrays of the module now.

        Without a module it has the arrays of this engine.
        """
        engine = copy.copy(self)  # shallow: programs are shared
        engine.state, engine.evaluates_only, engine._evaluations = self.state.branch(), True, {}
        state, engine._placed = engine.state, dict(self._placed)
        new = dict[str, tuple[int, Any, Any]]()
        for name, leaf, i in [] if module is None else state.module_leaves(module):
            array = leaf.get_raw_value()
            data = jax.random.key_data(array) if is_key(array) else array
            known, placed = self._placed.get(i, (None, None))
            # A numpy array may have been written to in place: its identity shows nothing.
            is_placed = array is known and placed is state.leaves[i] and isinstance(array, jax.Array)
            if not (is_placed or data is state.leaves[i]):  # after a fit the module has the arrays of the state
                new[f"module.{name}"] = i, array, data
        same_job("the weights to evaluate", lambda: {name: array_text(data) for name, (_, _, data) in new.items()})
        for i, array, data in new.values():
            if not getattr(data, "is_fully_addressable", True):  # jax moves no array to devices of other processes
                data = fetch(data)
            # astype for weak types too, as jnp.full(shape, 1.0) makes them: to jit they are other types.
            state.put(i, data.astype(state.spec.arrays[i].dtype))
            engine._placed[i] = (array, state.leaves[i])
        return engine

    def prepare_training(self, batch: Any, placed: Any) -> None:
        """Trace the training step on the first batch and build its programs; later calls do nothing.

        Args:
            batch: The shapes and dtypes of the batch.
            placed: The batch, or a `Stack` whose first it is, as the strategy has placed it.
        """
        if "train_step" in self._programs:
            return
        assert self.training is not None
        arrays = self.state.unflatten(), placed
        training = self.training = self.training.trace(batch, arrays, debug=self.debug)
        table = self.pure.table("training")
        if self._restored is None or self._restored.metrics != table.metrics:
            if self._restored is not None:
                _logger.warning("training_step logs other metrics than in the checkpoint: epoch sums start again.")
            self._use_metrics(table)
        # Under "raise" a bad window is undone: what its batches have written is restored.
        restores = training.spec.index.window is not None and training.written and self.nan_policy == "raise"
        self.window_start = WindowBackup(self.state, training.written) if restores else None
        self._build_steps(training)

    def _build_steps(self, training: Training) -> None:
        """Build the programs of the training, which are compiled when they are first called."""
        self._programs = {"train_step": self._compile(training.train, self.pure.trace_of("training").program)}
        if training.spec.index.window is not None:
            self._programs["micro_step"] = self._compile(training.micro)
            self.micro_step = partial(self._train, self._programs["micro_step"])
        self.diagnose = Diagnosis(training, self.state, self._compile)
        self.train_step = partial(self._train, self._programs["train_step"])

    def hold(self, epoch: int) -> None:
        """Have steps leave out the gradients of the parts that an epoch, which begins or is resumed, does not train."""
        assert self.training is not None
        held = held_in(self.training.options.parts, epoch)
        self._use(replace(self.training, held=held), held != self.training.held)

    def log_every(self, steps: int, step: int, *, after_row: bool) -> None:
        """From a step on begin the means since the last row every so many steps, and at once `after_row`."""
        training = self.training
        assert training is not None
        if steps != training.options.log_every or step <= training.options.rows_after:  # training may have gone back
            options = replace(training.options, log_every=steps, rows_after=step)
            sums, table = self.state.spec.index.sums, self.training_table
            is_other = table.has_row_means and options != training.options
            self._use(replace(training, options=options), is_other)
            if table.has_row_means and after_row:
                self.state.put(sums, table.begin_row(self.state.leaves[sums], True))  # type: ignore[call-overload]

    def _use(self, training: Training, other: bool) -> None:
        """Take steps of another training, whose programs are others if so said."""
        self.training = training
        if other and "train_step" in self._programs:
            self._build_steps(training)

    def _train(self, program: CompiledProgram, batch: Any) -> list:
        """Run a training program; return the table of metrics, the loss of a window's batch, and the outputs."""
        self.state.leaves, *results = program.run(self.state.leaves, batch)
        return results

    def traced_step(self, traced: tuple[Callable, ...], batch: Any) -> list:
        """Take an optimizer step with functions of (grads, updates, params, opt_state) compiled into it.

        Returns:
            What `train_step` returns, and a tuple of the functions' results.
        """
        if traced not in self._programs:
            assert self.training is not None
            self._programs[traced] = self._compile(self.training.traced(traced))
        return self._train(self._programs[traced], batch)

    def fused_steps(self, window: int, batches: Any) -> list:
        """Take the optimizer steps of a placed `Stack` of batches, `window` each.

        Returns:
            The tables of the steps, and the losses of windows' batches and the outputs of all, see `FusedSteps`.
        """
        backup, key = self.window_start, ("train_steps", window)
        if key not in self._programs:
            assert self.training is not None
            program = self.training.fused(window, [] if backup is None else backup.places)
            self._programs[key] = self._compile(program)
            self._programs[key].steps = getattr(batches, "batch", batches).count // window
            self.outputs_with_rows = program.fn.is_row  # type: ignore[attr-defined]
        arrays = []
        if backup is not None:
            backup.keep()
            arrays = backup.arrays
        self.state.leaves, arrays, *results = self._programs[key].run(self.state.leaves, arrays, batches)
        if backup is not None:
            backup.arrays = arrays
        return results

    def left_out(self) -> dict[int, str]:
        """Return by index the sha256 of what a checkpoint of trained_only leaves out; all processes must call this."""
        return {} if self.training is None else self.state.as_built(self.training.constant)

    def run_step(self, leaves: list[jax.Array], batch: Any) -> tuple[list[jax.Array], jax.Array]:
        """Take an optimizer step from a state of the caller; return the next one and the table of metrics."""
        # Nothing of the engine is touched: compile_step hands the state from call to call.
        leaves, logs, _, _ = self._programs["train_step"].run(leaves, batch)
        return leaves, logs

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch and forget the last one's metrics and unfinished window."""
        counters, leaves = self.state.spec.index.counters, self.state.leaves
        leaves[counters] = self._next_epoch(leaves[counters], np.int32(epoch))  # type: ignore[call-overload]
        table = self.training_table
        if not table.has_row_means:  # a row may have steps of two epochs
            self._restored = None  # only the epoch that the checkpoint was in continues with its metrics
        self._use_metrics(table, self._sums_of_row())

    def clear_sums(self) -> None:
        """Forget the epoch's metrics."""
        self.state.put(self.state.spec.index.sums, self._sums_of_row())

    def _sums_of_row(self) -> Any:
        """Return the sums without those of the epoch."""
        empty, sums = self.training_table.empty_sums(), self.state.leaves[self.state.spec.index.sums]  # type: ignore[call-overload]
        return jnp.concatenate([empty[:4], sums[4:]]) if self.training_table.has_row_means else empty

    def clear_window(self) -> None:
        """Drop the batches of an accumulation window that will not be completed."""
        state, index = self.state, self.state.spec.index
        if (window := index.window) is not None:
            for i in jax.tree.leaves(window.grads):
                state.put(i, np.zeros(state.leaves[i].shape, state.leaves[i].dtype))
            state.put(window.metrics, state.spec.stacked(self.training_table.empty()))
        if (start := index.window_start) is not None:
            state.put(start.batches, np.zeros((), np.int32))

    @property
    def training_table(self) -> Table:
        """The training metrics: of the step, or before it was traced those of a checkpoint."""
        has_step = "train_step" in self._programs
        return self.pure.traced["training", None].table if has_step else self._restored or Table([])

    @property
    def step_table(self) -> StepTable:
        """The layout of what a training step returns for the host."""
        return StepTable(self.training_table, self.rates.names, self.nan_policy != "ignore")

    def epoch_values(self) -> list[float]:
        """Return the epoch's value of each training metric, none if every step was left out; waits for the device."""
        sums = np.asarray(self.state.leaves[self.state.spec.index.sums])  # type: ignore[call-overload]
        return self.training_table.read(sums) if sums[1, 0] else []

    def go_back(self, step: int, epoch: int, batch_idx: int) -> None:
        """Forget a bad step and those after it, none of which has changed the parameters: the next one is `step`."""
        self.state.count_from(step, epoch, batch_idx)
        self.clear_window()
        if self.window_start is not None:
            self.window_start.restore()

    def bad_step(self) -> int:
        """Return the non-finite step, the first under "raise", the newest under "skip", or -1; waits for the device."""
        return self.state.counters()[3]

    def restore(self, arrays: Mapping[int, Any], table: Table | None) -> None:
        """Replace arrays of the state, given by index, and the training metrics that they were saved with, if any."""
        if table is not None:
            self._restored = table
            self._use_metrics(table)
        self.state.restore(arrays)
        if table is not None and self.training_table.metrics != table.metrics:
            self._use_metrics(self.training_table)  # a rollback to before the step was traced, or logged other metrics

    def _use_metrics(self, table: Table, sums: Any = None) -> None:
        """Give the sums of an epoch and of a window the columns of these metrics, of no batch but for the loss."""
        spec = self.state.spec = self.state.spec.with_metrics(table)
        self.state.put(spec.index.sums, table.empty_sums() if sums is None else sums)
        if (window := spec.index.window) is not None:
            sums = spec.stacked(table.empty())
            if self.state.is_complete:  # the loss stays, with the weight of the gradients
                before = fetch(self.state.leaves[window.metrics])
                sums[..., : before.shape[-1]][..., :1] = before[..., :1]
            self.state.put(window.metrics, sums)

    def init_extras(self, keys: Iterable[str]) -> None:
        """Make the arrays of some callbacks again, from the parameters as they are now."""
        for key in keys:
            self._init(self.state.spec.index.extras[key], self.extras[key].init_arrays)

    def init_optimizer(self) -> None:
        """Make the optimizer's state again, from the parameters as they are now."""
        assert self.training is not None
        self._init(self.state.spec.index.opt_state, self.training.options.optimizer.tx.init)

    def _init(self, index: Any, make: Callable[[Any], Any]) -> None:
        """Make arrays of the state again, given a tree of their indices; `make` is a function of the parameters."""
        state, indices = self.state, jax.tree.leaves(index)

        def init(params: Any) -> list[jax.Array]:
            tree = unshared(make(params))
            return Layout(tree).flatten(tree)

        params = state.unflatten().params
        state.release(indices)
        arrays = self.strategy.create_state(init, list(map(state.spec.sharding, indices)), params)
        for i, array in zip(indices, arrays, strict=True):
            state.leaves[i] = array

    def prepare_eval(self, stage: str, batch: Any, placed: Any, loader: int | None = None) -> None:
        """Choose the program of the stage's step by its first batch; a new one is traced and built.

        The arguments are those of `prepare_training`.

        One program serves a run, whatever batches follow, unless what it has read of the Trainer changes. Those of
        earlier runs are used again for a first batch like theirs.
        """
        key = (stage, loader)
        if key in self._evaluations and self._holds(key, self._evaluations[key]):
            return
        like = *jax.tree.flatten(abstract_batch(batch)), len(self.state.spec.eval_index)  # after a fit without averages
        # Bounded over all kinds of batches: calls with ever new sizes must not fill the memory with programs.
        recent = self._recent_evaluations.setdefault(key, deque(maxlen=8))
        program = next((x for x in recent if x.like == like and self._holds(key, x)), None)
        if program is None:
            program = self._build_eval(stage, batch, placed, loader, like)
        else:
            recent.remove(program)
        recent.append(program)
        self._evaluations[key] = program

    @staticmethod
    def _holds(key: _Key, program: _EvalProgram) -> bool:
        """Return whether the step would read of the Trainer what it has read while it was traced."""
        return program.pure.trace_of(*key).reads.hold()

    def _build_eval(self, stage: str, batch: Any, placed: Any, loader: int | None, like: Any) -> _EvalProgram:
        # What is known of another program's traces must not be mixed with this one's.
        pure, spec = replace(self.pure, traced={}, _bodies={}), self.state.spec
        inspect = partial(inspect_evaluation, stage, loader, pure)
        trace_step(pure, spec, (stage, loader), inspect, batch, (self.state.unflatten(), placed))
        sums = [ArraySpec(spec.replica_sharding, per_replica=spec.per_replica), ArraySpec(self.strategy.replicated)]
        sums += [spec.array_specs[i] for i in spec.places(pure.trace_of(stage, loader).carried)]
        entry = EACH if pure.table(stage, loader).has_steps else None
        program = Program(
            name=STAGES[stage].program,
            kind="eval",
            fn=eval_step(pure, stage, loader, spec.eval_layout, spec.wrap),
            inputs=([spec.array_specs[i] for i in spec.eval_index], sums),
            outputs=(sums, entry, outputs_of(pure, stage, loader)),
            donate=(1,),  # the weights are the training's, or the next evaluation's
        )
        return _EvalProgram(pure, like, self._compile(program, pure.trace_of(stage, loader).program))

    def eval_trace(self, stage: str, loader: int | None = None) -> Traced:
        """Return what the trace of the stage's step has shown; it must have been prepared."""
        return self._evaluations[stage, loader].pure.trace_of(stage, loader)

    def eval_sums(self, stage: str, loader: int | None = None) -> list[jax.Array]:
        """Return the metrics of no batch."""
        spec = self.state.spec
        table = spec.stacked(self.eval_trace(stage, loader).table.empty_sums())
        # The count of batches is a token as well: waiting for it is waiting for the step.
        sums = jax.device_put([table, np.int32(0)], [spec.replica_sharding, self.strategy.replicated])
        carried = spec.places(self.eval_trace(stage, loader).carried)
        return [*sums, *(jnp.copy(self.state.leaves[i]) for i in carried)]  # which the first step gives away

    def eval_metrics(self, stage: str, sums: list[jax.Array], loader: int | None = None) -> dict[int, jax.Array]:
        """Return the metrics that the module holds after a loader's batches, by their index in the state."""
        carried = self.state.spec.places(self.eval_trace(stage, loader).carried)
        return dict(zip(carried, sums[2:], strict=True))

    def eval_program(self, stage: str, loader: int | None = None) -> CompiledProgram:
        """Return the program that adds a batch to the metrics, given `State.evaluated`, the metrics and a placed batch.

        It returns the metrics, those of the batch alone, and the step's outputs.
        """
        return self._evaluations[stage, loader].program

    def apply(self, fn: Callable, *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled, with the newest arrays, in evaluation mode."""
        key = fn, len(self.state.spec.eval_index)
        if key not in self._applied or not self._applied[key][1].hold():
            # Not the engine: the function outlives it, and would hold its arrays.
            pure, spec, reads = self.pure, self.state.spec, Reads()

            def on_module(params: Any, frozen: Any, model_state: Any, inputs: Any) -> Any:
                module: Any = pure.merge(params, frozen, model_state)
                set_modes(module, training=False)
                with collecting(None), reading() as noted:  # a hook that calls this may log, the function may not
                    result = fn(module, *cast(inputs, pure.precision.compute))
                reads.extend(noted)
                return result

            def applied(leaves: list, inputs: Any) -> Any:
                _, *variables = spec.eval_layout.unflatten(leaves)
                return spec.strategy.typed(on_module, spec.used)(*variables, inputs)

            self._applied[key] = self.strategy.on_state(applied), reads
        return self._applied[key][0](self.state.evaluated(), inputs)

    @property
    def programs(self) -> list[CompiledProgram]:
        """The programs that this engine's run has called; an evaluator has none of the training."""
        training = {} if self.evaluates_only else self._programs
        return [x for x in (*training.values(), *(x.program for x in self._evaluations.values())) if x.ran]

    @property
    def failed(self) -> CompiledProgram | None:
        """The program whose first call has raised an error, if one has."""
        programs = (*self._programs.values(), *(x.program for x in self._evaluations.values()))
        return next((x for x in programs if x.failed), None)

    def _described(self, spec: StateSpec, variables: Any) -> dict[str, str]:
        """Return what processes of one training have in common before its state is made."""
        nodes = [(path, x) for path, x in nnx.iter_graph(self.module, graph=True) if not isinstance(x, nnx.Variable)]
        items = {f"the type of module.{leaf_name(path)}".rstrip("."): type(x).__name__ for path, x in nodes}
        items["the optimizer"] = stable_text(spec.optimizer_kind)
        items["callbacks with arrays"] = ", ".join(self.extras)
        for i, (name, shape, dtype) in enumerate(spec.entries):
            items[name] = f"{dtype}{list(shape)} in {spec.sharding(i).spec}"
        for name, x in named_leaves(variables):
            items[f"values of module{name.lstrip('[012]')}"] = array_text(x)
        return items

    def _compile(self, program: Program, step: Any = None) -> CompiledProgram:
        # Where jit is disabled a program is not compiled, but must still take and place what it would.
        run = self.strategy.compile(replace(program, donate=()) if self.debug else program)
        run = run_eagerly(run, program) if jax.config.jax_disable_jit else run  # type: ignore[attr-defined]
        return CompiledProgram(program.name, run, step)


def _contents(module: TrainModule, precision: Precision) -> tuple[Any, Any]:
    """Return what programs of a module depend on: its graph, its arrays' shapes and dtypes, and its plain attributes.

    Attributes are copied, because the graph does not notice what is written into a list or a dict.
    """
    graphdef, state = split(module)
    arrays: list = [jax.tree.structure(state)]  # with what is no array
    for x in jax.tree.leaves(state):
        dtype = x.dtype if is_key(x) else jax.dtypes.canonicalize_dtype(x.dtype)
        is_held = precision.held is not None and jnp.issubdtype(dtype, jnp.floating)
        arrays.append((x.shape, precision.held if is_held else dtype))
    attributes: dict = copied({path: at[name] for path, at, name in each_attribute(module)})
    # A class in a notebook may be given other methods, and IPython's autoreload puts new code into the old function.
    for cls in {cls for _, node in nnx.iter_graph(module, graph=True) for cls in type(node).__mro__}:
        if cls.__module__.partition(".")[0] not in ("builtins", "flax", "jax", "jaxlit"):
            for name, method in vars(cls).items():
                if hasattr(method, "__get__"):
                    # The function in a property, a classmethod or a jax.jit has the code.
                    wrapped = getattr(method, "fget", getattr(method, "__wrapped__", method))
                    attributes[cls, name] = (method, getattr(wrapped, "__code__", None))
    return (graphdef, arrays, jax.config.jax_disable_jit), attributes  # type: ignore[attr-defined]
