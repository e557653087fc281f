"""The bodies of the compiled training steps, as pure functions of a state and a batch.

A strategy decides whether a body sees the global batch or one replica's rows; all that differs between the two is in
`jaxlit.core.replica.Replica`. The guard is at the end: which results of an optimizer step replace the old values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.core.log import NO_WEIGHT, StepTable, Table, loss_of, weight_of
from jaxlit.core.optimizer import updates_of
from jaxlit.core.parts import Rates, keep_held, keep_held_state
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, identity, reduced, scatter_state
from jaxlit.core.train_state import Layout, StepOptions, TrainState, Window, sum_dtype
from jaxlit.errors import noting_place
from jaxlit.programs.jaxpr import bind, indices, run, sources
from jaxlit.texts import is_key


@dataclass(frozen=True)
class TrainStep:
    """Builds the training steps of a module."""

    pure: PureModule  # the module, split
    options: StepOptions  # how optimizer steps are taken
    layout: Layout  # how the flat list becomes a `TrainState`
    # functions of (grads, updates, params, opt_state) whose results leave the optimizer step
    traced: tuple[Callable, ...] = ()
    # the learning rates, which leave the optimizer step with its table
    rates: Rates = Rates()  # noqa: RUF009 - frozen
    wrap: Callable = identity  # what the strategy makes of the user's step
    constrain_grads: Callable[[Any], Any] = identity  # shards gradients inside the step
    held: frozenset[str] = frozenset()  # the names of parameters that the epoch does not train

    def micro(self, replica: Replica, leaves: list, batch: Any) -> tuple[list, jax.Array, jax.Array, Any]:
        """Add one batch to the accumulation window.

        Returns:
            The state, the window's table so far (of this replica), and this batch's loss and outputs.
        """
        state = self.layout.unflatten(leaves)
        state, loss, outputs = self._accumulate(replica, state, batch)
        assert state.window is not None
        table = state.window.metrics
        state = state.advance(steps=0)
        return self.layout.flatten(state), self.logs(table, state), loss, outputs

    def update(self, replica: Replica, leaves: list, batch: Any) -> tuple:
        """Take an optimizer step with one batch, or with the window that it completes.

        Returns:
            The state, the table of the batch or window, the batch's loss if it ends a window, its outputs, and with
            traced functions a tuple of their results.
        """
        old = self.layout.unflatten(leaves)
        if old.window is None:
            new, grads, table, outputs = self._gradient_of_all(replica, old, batch)
            loss = None  # it is in the table
        else:
            new, loss, outputs = self._accumulate(replica, old, batch)
            assert new.window is not None
            table = new.window.metrics
            if replica.axis is not None:
                table = self.table.reduce(table, replica.psum, replica.axis)
            # Sums over rows, so that replicas and batches of different sizes weigh as their rows do.
            grads = mean_of(self.constrain_grads(replica.psum(new.window.grads)), table, old.params)
            new = replace(new, window=self.empty_window(new.window))
        new_leaves, logs, *seen = self.apply(old, new, grads, table)
        return new_leaves, logs, loss, outputs, *seen

    def apply(self, old: TrainState, new: TrainState, grads: Any, table: jax.Array) -> tuple:
        """Clip and check gradients, and take the optimizer's step with them.

        Args:
            old: The state before the batch.
            new: The state with what the user's step has written, and an empty window.
            grads: The gradients over all replicas, a tree like the parameters, as jax returns them.
            table: The table of the batch or window, over all replicas.

        Returns:
            The state, `logs`, and with traced functions a tuple of their results.
        """
        # The gradient that jax returns for a complex number is the conjugate of the direction in which the loss grows.
        grads = jax.tree.map(lambda g: g.conj() if jnp.iscomplexobj(g) else g, grads)
        params = new.params  # as the batch left them
        new, updates = self._guarded_step(old, new, grads, table)
        seen = tuple(fn(grads, updates, params, new.opt_state) for fn in self.traced)
        rates = self.rates.values(old.opt_state, loss_of(table), old.step, old.epoch)
        table = self.table.of_row(table, new.sums)
        return self.layout.flatten(new), self.logs(table, new, rates), *([seen] if self.traced else [])

    def diagnose(
        self, written: Sequence[int], replica: Replica, leaves: list, batch: Any
    ) -> tuple[list, jax.Array, jax.Array]:
        """Take the gradient of one batch, and no step.

        Returns:
            What is after the batch at the `written` indices in the state, those of what the user's step writes and of
            the counters; the table; and for each parameter how many numbers of its gradient over all replicas are not
            finite.
        """
        state, grads, table, _ = self._gradient_of_all(replica, self.layout.unflatten(leaves), batch)
        bad = replica.psum(count_bad(grads))
        leaves = self.layout.flatten(state.advance(steps=0))
        return [leaves[i] for i in written], table, bad

    def needed_grads(self, state: TrainState) -> list[frozenset[int]]:
        """Return for each leaf of the optimizer's state the indices of the gradients that it needs, see `guarded`."""
        params = state.params
        loss = jnp.zeros(())
        closed = jax.make_jaxpr(self._optimize)(params, state.opt_state, params, loss)
        return _needs(closed, state.opt_state, len(jax.tree.leaves(params)), self.options.holds_weights)

    @property
    def table(self) -> Table:
        """The training metrics."""
        return self.pure.table("training")

    @property
    def is_weighted(self) -> bool:
        """Whether losses come with a `total_weight`."""
        return self.pure.trace_of("training").is_weighted

    def _gradient_of_all(
        self, replica: Replica, state: TrainState, batch: Any
    ) -> tuple[TrainState, Any, jax.Array, Any]:
        """Return the state after the batch, the gradients and the table of all replicas, and the outputs."""
        state, grads, table, _, outputs = self._gradient(replica, state, batch, 1.0)
        # One reduction for all gradients; where the body sees the global batch, jit adds the one that is needed.
        if replica.splits:
            table = self.table.reduce(table, replica.psum, str(replica.axis))
        return state, self.constrain_grads(replica.pmean(grads)), table, outputs

    def _gradient(
        self, replica: Replica, state: TrainState, batch: Any, share: float
    ) -> tuple[TrainState, Any, jax.Array, jax.Array, Any]:
        """Return the state after the batch, this body's gradients, table and loss, and the outputs."""
        batch = replica.constrain_batch(batch)
        params, frozen, rest = scatter_state(replica, state.variables, self.pure.trace_of("training").reduction)
        objective = self.objective(replica, state, frozen, rest, batch)
        (_, (loss, aux)), grads = jax.value_and_grad(objective, has_aux=True)(params)
        if (scale := state.loss_scale) is not None:  # before clipping and the guard look at them
            grads = jax.tree.map(lambda g: g / scale[0].astype(g.dtype), grads)
        state, table, outputs = self.after_batch(replica, state, loss, aux, share)
        if self.is_weighted:  # a mean over nothing may be NaN, and counts nothing
            counts = weight_of(table) > NO_WEIGHT
            grads = jax.tree.map(lambda g: jnp.where(counts | jnp.isfinite(g), g, 0), grads)
        return state, grads, table, loss, outputs

    def objective(self, replica: Replica, state: TrainState, frozen: Any, model_state: Any, batch: Any) -> Callable:
        """Return a function of the parameters to what is differentiated, and (the loss, the step's other results)."""
        body = self.wrap(self.pure.body("training", replica))
        rest = frozen, model_state, batch, state.step, state.epoch, state.batch_idx
        scale = state.loss_scale

        def objective(params: Any) -> tuple[jax.Array, Any]:
            # Of what is held the gradients are zeros, without a backward pass.
            held = jax.lax.stop_gradient(params) if self.held else params
            loss, aux = body(keep_held(self.held, held, params), *rest)
            # Gradients are averaged over replicas: n times a replica's sum has the sum over all rows as mean.
            factor = (replica.count if replica.splits else replica.passes) if replica.loss_reduction == "sum" else 1
            total = loss
            if replica.splits and self.is_weighted:
                # Here, and not in the gradients: in a collective, as of BatchNorm, those of all replicas meet.
                factor = aux[2][0] / replica.pmean(aux[2][0])
                total = loss * factor
            elif factor != 1:
                total = loss = loss * factor
            # The scaled loss is differentiated, the plain one is logged.
            return total if scale is None else total * scale[0], (loss, aux)

        return objective

    def after_batch(
        self, replica: Replica, state: TrainState, loss: jax.Array, aux: Any, share: float
    ) -> tuple[TrainState, jax.Array, Any]:
        """Return the state after a batch, its table, and its outputs."""
        # Not the loss: a replica's leaves the step as its own, and costs no collective.
        new, (_, *values), weights, outputs = reduced(replica, aux, self.pure.trace_of("training").reduction)
        return state.with_variables(new), self.table.entry([loss, *values], weights, share), outputs

    def _accumulate(self, replica: Replica, old: TrainState, batch: Any) -> tuple[TrainState, jax.Array, Any]:
        """Return the state with the batch in its window, this body's loss, and the outputs."""
        new, grads, table, loss, outputs = self._gradient(replica, old, batch, replica.share)
        window = old.window
        assert window is not None
        # Weighted by rows, so that a tail counts for its rows; divided by all rows of the window in `update`.
        weight = weight_of(table)
        if replica.splits and self.is_weighted:  # see `objective`
            loss, weight = loss * weight / replica.pmean(weight), replica.pmean(weight)
        grads = jax.tree.map(lambda total, g: total + (weight * g).astype(total.dtype), window.grads, grads)
        window = Window(self.constrain_grads(grads), self.table.combine(window.metrics, table))
        new = replace(self.only_finite(old, new), window=window, window_start=old.next_start())
        return new, loss, outputs

    def only_finite(self, old: TrainState, new: TrainState) -> TrainState:
        """Return the state after a batch that completes no step, with what it has written as far as that is finite."""
        if self.options.nan_policy == "ignore":
            return new
        # The optimizer step finds NaN in the window's gradients. Nothing checks batch statistics again, so do it here.
        stopped = old.bad_step >= 0 if self.options.nan_policy == "raise" else jnp.zeros((), bool)

        def keep(a: jax.Array, b: jax.Array) -> jax.Array:
            is_statistic = b is not a and jnp.issubdtype(b.dtype, jnp.inexact)
            return jnp.where(jnp.isfinite(b).all() & ~stopped, b, a) if is_statistic else b

        return new.with_variables(jax.tree.map(keep, old.variables, new.variables))

    def empty_window(self, window: Window) -> Window:
        """Return a window of no batch."""
        metrics = jnp.broadcast_to(self.table.empty(), window.metrics.shape)
        return Window(jax.tree.map(jnp.zeros_like, window.grads), metrics)

    def _guarded_step(self, old: TrainState, new: TrainState, grads: Any, table: jax.Array) -> tuple[TrainState, Any]:
        """Return the state after the optimizer step, and for traced functions the updates: zeros if it was left out.

        What the step has written to trained variables is what the optimizer updates, as `nnx.Optimizer.update` does
        after `nnx.value_and_grad`.
        """
        # No guard: `_changed_fields`. "raise" without a loss scale: `_select_by_leaf`. All else: `_step_or_skip`.
        policy = self.options.nan_policy
        scale = old.loss_scale
        bad_step = old.bad_step
        loss = loss_of(table)
        if self.table.has_row_means:  # first: also a step that is left out follows a row
            is_row = (old.step % (self.options.log_every or 2**30) == 0) & (old.step > self.options.rows_after)
            old = replace(old, sums=self.table.begin_row(old.sums, is_row))
        sums = self.table.add(old.sums, table)
        if policy == "ignore" and scale is None:
            fields, updates = self._changed_fields(self._optimize, old, new, grads, loss)
            return replace(new, **fields, sums=sums).advance(steps=1), updates
        # Leaf by leaf, as the norm of finite gradients may overflow. XLA adds up float32 in fewer kernels than it joins
        # booleans, and a sum of ones is not zero however it rounds.
        finite = [jnp.sum(jnp.where(jnp.isfinite(g), jnp.float32(0), 1)) == 0 for g in jax.tree.leaves(grads)]
        all_grads_finite = jnp.stack(finite).all()
        loss_finite = jnp.isfinite(loss)
        # Under "raise" a bad step stops all later ones, which may be dispatched before the host knows of it.
        stops = policy == "raise"
        good_so_far = computed_once(loss_finite & (bad_step < 0)) if stops else loss_finite
        # `ok`: take the update. `settled`: the step is not to be noted as bad.
        ok = settled = computed_once(good_so_far & all_grads_finite)
        if scale is not None:
            # What is not finite without any scaling is no overflow of it.
            overflow = good_so_far & ~all_grads_finite & (scale[0] > 1)
            ok = ~overflow if policy == "ignore" else ok
            settled = ok | overflow
        if stops and scale is None:
            # No conditional: it would keep all gradients alive, and let the host wait for a GPU in every step.
            every = self.options.holds_weights
            optimize = partial(guarded, self._optimize, early=good_so_far, finite=finite, ok=ok, wait_for_all=every)
            fields, updates = self._select_by_leaf(ok, optimize, old, replace(new, sums=sums), grads, loss)
        else:
            stopped = ~settled if stops else jnp.zeros((), bool)
            fields, updates = self._step_or_skip(ok, stopped, old, new, grads, loss)
            fields["sums"] = keep_unless(settled, old.sums, sums)
            if scale is not None:
                scale = keep_unless(~stopped, scale, self.pure.precision.next_scale(scale, overflow))
        if (start := new.window_start) is not None:
            start = replace(start, batches=jnp.zeros_like(start.batches))
        new = replace(new, **fields, loss_scale=scale, window_start=start)
        # The first bad step under "raise", the newest under "skip".
        is_noted = settled | (bad_step >= 0) if stops else settled
        return new.advance(steps=1, bad_step=jnp.where(is_noted, bad_step, old.step)), updates

    def _select_by_leaf(
        self, ok: jax.Array, optimize: Callable, old: TrainState, new: TrainState, grads: Any, loss: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """Return what `_changed_fields` does, but the old fields unless `ok`; see `guarded` for the exception."""
        fields, updates = self._changed_fields(optimize, old, new, grads, loss)
        fields["sums"] = new.sums
        # `guarded` has selected opt_state already: it is on both sides, and keep_unless returns such a leaf unchanged.
        old_fields = {name: getattr(old, name) for name in fields} | {"opt_state": fields["opt_state"]}
        return keep_unless(ok, old_fields, fields), jax.tree.map(lambda u: jnp.where(ok, u, 0), updates)

    def _step_or_skip(
        self, ok: jax.Array, stopped: jax.Array, old: TrainState, new: TrainState, grads: Any, loss: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """Return what `_changed_fields` does; unless `ok` the old fields, in which counts continue unless `stopped`."""
        update = partial(self._changed_fields, self._optimize, old, new, grads, loss)

        def keep() -> tuple[dict[str, Any], Any]:
            old_arrays, treedef = jax.tree.flatten(old.variables)
            if (start := new.window_start) is not None:  # the arrays of the window's start are put back
                old_arrays = (old.module | start.arrays).values()
            # Counts and random keys continue after a step that is left out, but not after one that stops the training.
            triples = zip(self.pure.leaves(*old.variables), old_arrays, jax.tree.leaves(new.variables), strict=True)
            arrays = [jnp.where(stopped, a, b) if leaf.continues(a.dtype) else a for leaf, a, b in triples]
            params, frozen, model_state = treedef.unflatten(arrays)
            fields = {"params": params, "opt_state": old.opt_state, "extras": old.extras}
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(update)[-1])
            return fields | {"frozen": frozen, "model_state": model_state}, nothing

        # cond, not where: where computes both sides and holds a second copy of the state.
        return jax.lax.cond(ok, update, keep)

    def _changed_fields(
        self, optimize: Callable, old: TrainState, new: TrainState, grads: Any, loss: jax.Array
    ) -> tuple[dict[str, Any], Any]:
        """Return the fields of the state that an optimizer step changes, and for traced functions the updates."""
        opt_state, (params, updates) = optimize(grads, old.opt_state, new.params, loss)
        extras = {}
        for key, keeper in self.options.extras.items():  # each callback sees the step in their order
            # Each gets copies of the containers, which it may write to: those of the step are read again later.
            copies = jax.tree.map(lambda x: x, (old.extras[key], params, grads))
            with noting_place(f"{type(keeper).__name__}.update_arrays"):
                arrays, changed = keeper.update_arrays(*copies, old.step)
            # Of the old types: a weak one, as a Python number makes it, would compile the next step again.
            extras[key] = jax.tree.map(_like, old.extras[key], arrays)
            params = jax.tree.map(_like, params, changed)
        fields = {"params": params, "opt_state": opt_state, "extras": extras}
        # Updates are kept for traced functions only: otherwise they would be one more copy of the parameters.
        return fields | {"frozen": new.frozen, "model_state": new.model_state}, updates if self.traced else None

    def _optimize(self, grads: Any, opt_state: Any, params: Any, loss: jax.Array) -> tuple[Any, tuple[Any, Any]]:
        """Return the optimizer's state after its step, the parameters, and what was added to them."""
        old = opt_state
        clipped = grads
        if self.options.clip is not None:  # by global norm or value: no state is carried from step to step
            wide = jax.tree.map(lambda g: g.astype(sum_dtype(g)), grads)  # the square of 256 is infinite in float16
            clipped, _ = self.options.clip.update(wide, self.options.clip.init(params))
            clipped = jax.tree.map(_like, grads, clipped)
        update = partial(updates_of, self.options.optimizer.tx, owner=f"{self.pure.name}.configure_optimizers")
        updates, opt_state = (self.rates.update or update)(clipped, opt_state, params, loss)
        if self.held:
            updates = keep_held(self.held, jax.tree.map(jnp.zeros_like, updates), updates)
        opt_state = keep_held_state(self.options.parts, self.held, old, opt_state)
        return jax.tree.map(_like, old, opt_state), (optax.apply_updates(params, updates), updates)

    def logs(self, table: jax.Array, state: TrainState, rates: Sequence[jax.Array] = ()) -> jax.Array:
        """Return a table as it leaves a step, with the rates of an optimizer step."""
        layout = StepTable(self.table, self.rates.names, self.options.nan_policy != "ignore")
        return layout.encode(table, rates, state.bad_step)


def mean_of(total: Any, table: jax.Array, params: Any) -> Any:
    """Return the gradients of a window, in the parameters' dtypes, given their weighted sum and its table."""
    return jax.tree.map(lambda g, p: (g / weight_of(table)).astype(p.dtype), total, params)


def count_bad(grads: Any) -> jax.Array:
    """Return how many numbers of each gradient are not finite, (num_params,) float32."""
    return jnp.stack([jnp.sum(~jnp.isfinite(g), dtype=jnp.float32) for g in jax.tree.leaves(grads)])


def _like(old: jax.Array, new: jax.Array) -> jax.Array:
    # An optimizer that widens its state would compile the step a second time.
    return new if is_key(old) else jnp.asarray(new, old.dtype)


def computed_once(ok: jax.Array) -> jax.Array:
    """Return a bool, unchanged, in a form that XLA computes in one place."""
    # XLA copies comparisons into each kernel that reads them, with all that they compare: the flags of all gradients
    # in the kernel of each parameter. A root is too expensive for it to copy.
    return jnp.sqrt(jnp.where(ok, jnp.float32(0), 1)) == 0


def keep_unless(ok: jax.Array, old: Any, new: Any) -> Any:
    """Return the tree `new` if `ok`, else `old`."""
    return jax.tree.map(lambda a, b: b if a is b else jax.lax.select(ok, b, a), old, new)


def guarded(
    update: Callable,
    grads: Any,
    state: Any,
    *inputs: Any,
    early: jax.Array,
    finite: Sequence[jax.Array],
    ok: jax.Array,
    wait_for_all: bool,
) -> tuple[Any, Any]:
    """Return what an optimizer's update returns, but old leaves of its state where a gradient is not finite.

    Each leaf selects new or old as soon as the gradients that it depends on are known, so that XLA can overwrite the
    old buffer in place. Waiting for the last gradient would keep all gradients, and a copy of the old moments, in
    memory at once. The price: after a step whose loss is finite but one gradient is not, leaves that depend on other
    gradients only have been updated.

    Args:
        update: A function of (grads, state, *inputs) to (the new state, anything).
        grads: The gradients.
        state: The optimizer's state.
        *inputs: Its other arguments.
        early: () bool, whether the step is good as far as is known without the gradients.
        finite: Of each gradient, () bool, whether it is finite.
        ok: () bool, all of these.
        wait_for_all: Whether each leaf of the state depends on all gradients, as where the state contains weights.
    """
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
        # Each equation would run by itself: nothing is overwritten in place, so nothing is gained by choosing early.
        new, rest = update(grads, state, *inputs)
        return keep_unless(ok, state, new), rest
    closed, shape = jax.make_jaxpr(update, return_shape=True)(grads, state, *inputs)
    is_good = {frozenset(range(len(finite))): ok}  # by the gradients that a leaf needs
    choices = []
    for old, needs in zip(jax.tree.leaves(state), _needs(closed, state, len(finite), wait_for_all), strict=True):
        if needs not in is_good:
            is_good[needs] = reduce(and_, [finite[i] for i in sorted(needs)], early)
        choices.append(Choice(is_good[needs], old))
    results = _run(closed, jax.tree.leaves((grads, state, inputs)), choices)
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def _needs(closed: ClosedJaxpr, state: Any, num_grads: int, wait_for_all: bool) -> list[frozenset[int]]:
    # A moment depends on its own gradient, after a clip by the global norm on all. Leaves that no gradient reaches,
    # and single numbers such as counts, wait for all: they must agree with each other.
    every = frozenset(range(num_grads))
    if wait_for_all:
        return [every] * len(jax.tree.leaves(state))
    needs = []
    for leaf, inputs in zip(jax.tree.leaves(state), sources(closed.jaxpr), strict=False):
        grads = indices(inputs & ((1 << num_grads) - 1)) if leaf.ndim else every  # the gradients are the first inputs
        needs.append(grads or every)
    return needs


class Choice(NamedTuple):
    """The condition by which an output of the update is selected, and its old value."""

    is_good: jax.Array  # () bool, whether to take the new array
    old: Any


def _run(closed: ClosedJaxpr, args: Sequence[Any], choices: Sequence[Choice]) -> list:
    """Run a program whose first outputs are selected by `choices`, each as soon as it is computed."""
    places: dict[Any, list[int]] = {}  # by variable, the indices of the outputs that it is
    for i, var in enumerate(closed.jaxpr.outvars[: len(choices)]):
        if not isinstance(var, Literal):
            places.setdefault(var, []).append(i)
    chosen = {}

    def rule(eqn: Any, args: list) -> list:
        results = bind(eqn, args)
        for k, (var, new) in enumerate(zip(eqn.outvars, results, strict=True)):
            for i in places.get(var, ()):
                # Later equations read what was selected: if they read the new array, both would be kept in memory.
                results[k] = chosen[i] = keep_unless(*choices[i], new)
        return results

    results = run(closed.jaxpr, closed.consts, args, rule)
    for i, choice in enumerate(choices):  # inputs and literals, which no equation computes, are selected here
        results[i] = chosen[i] if i in chosen else keep_unless(*choice, results[i])
    return results
