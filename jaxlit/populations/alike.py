"""Which members have the same programs, and which are the same training."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.optimizer import updates_of
from jaxlit.core.stage import STAGES
from jaxlit.engine.training import Training
from jaxlit.errors import ArgumentError
from jaxlit.fingerprint import array_text
from jaxlit.leaf_names import is_key
from jaxlit.populations.members import Member, abstract
from jaxlit.programs.jaxpr import numbers_of
from jaxlit.programs.lifting import is_same


class Kind(NamedTuple):
    """The traces from which the programs of a member follow, and the state of their numbers at that time."""

    programs: Sequence[Any]
    # Checksums: a trace refers to the NumPy arrays that it has read, and make_module may fill them again.
    numbers: Sequence[str]
    logged: Mapping[str, Sequence[Any]]  # the metrics of each step, and the names of the rates
    schedule: Any

    def is_same(self, other: "Kind") -> bool:
        """Return whether members of the two kinds have the same programs."""
        alike = self.logged == other.logged and self.schedule is other.schedule and self.numbers == other.numbers
        return alike and all(map(is_same, self.programs, other.programs))


def trace_of(training: Training, stage: str, loader: int | None, batch: Any) -> Any:
    """Trace a step of a member alone, and its gradient in training.

    Args:
        training: How the member is trained.
        stage: The stage of the step.
        loader: The loader's index; None for a step that does not take it.
        batch: The shapes and dtypes of a batch.
    """
    variables, number = jax.tree.map(abstract, training.spec.tree.variables), jax.ShapeDtypeStruct((), jnp.int32)
    # A new function each time: jax would return the earlier trace of the same one.
    run = partial(training.pure.run, stage, training.spec.strategy.replica, loader)
    if stage == "training":  # a number may be in a rule of jax.custom_vjp only, which the step alone does not run
        run = jax.value_and_grad(run, has_aux=True)
    return jax.make_jaxpr(run)(*variables, batch, number, number, number)


def kind_of(training: Training, examples: Mapping[tuple[str, int | None], Any]) -> Kind:
    """Trace each step and the optimizer of a member, which costs about half of tracing its programs.

    Args:
        training: How the member is trained.
        examples: The shapes and dtypes of a batch, by the stage and the loader of its step.
    """
    pure, params = training.pure, jax.tree.map(abstract, training.spec.tree.variables[0])

    def first_step(grads: Any, params: Any, loss: Any) -> Any:
        opt_state, tx = training.options.tx.init(params), training.options.tx
        return opt_state, updates_of(tx, grads, opt_state, params, loss, f"{pure.name}.configure_optimizers")

    programs = [jax.make_jaxpr(first_step)(params, params, jax.ShapeDtypeStruct((), jnp.float32))]
    logged: dict[str, Sequence[Any]] = {"the optimizer": training.rates.names}
    for (stage, loader), batch in examples.items():
        programs.append(trace_of(training, stage, loader, batch))
        logged[STAGES[stage].step] = pure.table(stage, loader).metrics
    numbers = [array_text(x if is_key(x) else np.asarray(x)) for program in programs for x in numbers_of(program)]
    return Kind(programs, numbers, logged, training.options.optimizer.lr_schedule)


def check_same_logs(first: str, a: Kind, name: str, b: Kind) -> None:
    """Refuse a member that logs other values than the first one, or in another way.

    Args:
        first: The name of the first member in messages.
        a: Its kind.
        name: The name of the other member.
        b: Its kind.

    Raises:
        ArgumentError: Naming a value.
    """
    for where, values in a.logged.items():
        for x, y in itertools.zip_longest(values, b.logged[where]):
            if x != y:
                raise ArgumentError(
                    f"jl.fit_many: all members must log the same, and {where} logs {x} in {first}, and {y} in {name}. "
                    "Log the same names in the same way, or call jl.fit_many once for each kind of members."
                )


def check_distinct(
    members: Sequence[Member],
    arrays: Sequence[Sequence[np.ndarray]],
    numbers: Sequence[np.ndarray],
) -> None:
    """Refuse two members of different variations that would be the same training.

    Args:
        members: The members.
        arrays: The arrays of each member's module.
        numbers: The numbers in which the programs differ, (members, ...) each.

    Raises:
        ArgumentError: Naming the members.
    """
    seen = dict[str, int]()
    for i, member in enumerate(members):
        digest = hashlib.sha256()
        for x in (*arrays[i], *(column[i] for column in numbers)):
            digest.update(np.ascontiguousarray(x).tobytes())
        first = seen.setdefault(digest.hexdigest(), i)
        if members[first].contents != member.contents:
            raise ArgumentError(
                f"jl.fit_many: {members[first].name} and {member.name} begin with the same weights, and "
                "their steps are the same for the first batch: what they differ in reaches neither. Read it in a step "
                "or in configure_optimizers, or leave it out."
            )
