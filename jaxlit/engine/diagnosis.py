"""Runs batches again to diagnose a bad step: their losses and gradients."""

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlit.core.microbatch_step import MicrobatchStep
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.engine.state import State
from jaxlit.engine.training import Training
from jaxlit.strategies.program import SHARED, Program


class Diagnosis:
    """Takes the gradients of batches, one after the other, from the state as it is, and changes nothing.

    Args:
        training: How the module is trained.
        state: The training state.
        compile: Compiles a program, when it is first needed.
    """

    def __init__(self, training: Training, state: State, compile: Callable[[Program], CompiledProgram]) -> None:
        train, step, spec = training.train, training.step, training.spec
        counters: Any = spec.index.counters
        passes = MicrobatchStep(step, training.written, "diagnose")
        self._state, self._step, self._written = state, step, [counters, *training.written]
        outputs = ([spec.array_specs[i] for i in self._written], SHARED, SHARED)
        program = replace(train, name="diagnose", fn=partial(step.diagnose, self._written), outputs=outputs)
        self._compile = partial(compile, replace(program, donate=(), passes=passes))

    def __call__(self, batches: Iterable[Any]) -> list[tuple[float, list[str]]]:
        """Return for each placed batch its loss, and the parameters whose gradient is not finite, by their paths."""
        program, names, leaves, results = self._compile(), self._names, list(self._state.leaves), []
        for batch in batches:
            made, table, bad = program.run(leaves, batch)
            for i, x in zip(self._written, made, strict=True):
                leaves[i] = x
            loss = self._step.table.read(np.asarray(table))[0]
            results.append((loss, list(itertools.compress(names, np.asarray(bad)))))
        return results

    def took(self, bad: Collection[str] | None) -> list[str]:
        """Return the arrays of the optimizer's state that a bad step whose loss was finite has changed.

        Args:
            bad: The parameters whose gradients were not finite; None if they are not known, for all that it may have.
        """
        spec, names = self._state.spec, self._names
        if spec.index.loss_scale is not None:  # such a step changes nothing
            return []
        known = {i for i, name in enumerate(names) if bad is not None and name in bad}
        leaves = zip(jax.tree.leaves(spec.index.opt_state), self._step.needed_grads(spec.tree), strict=True)
        return [spec.entries[i][0] for i, needs in leaves if len(needs) < len(names) and not needs & known]

    @property
    def _names(self) -> list[str]:
        spec = self._state.spec
        return [spec.entries[i][0].removeprefix("module.") for i in jax.tree.leaves(spec.index.params)]
