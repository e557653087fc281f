"""What tests know of jaxlit's private parts: all of it stands here."""

from typing import Any

import jaxlit as jl
from jaxlit.core.log import Metric as Metric
from jaxlit.core.replica import Replica as Replica
from jaxlit.engine.engine import Engine
from jaxlit.leaf_names import leaf_name as leaf_name
from jaxlit.strategies import registry


def engine_of(trainer: jl.Trainer) -> Engine:
    """Return the engine of a Trainer's newest fit."""
    engine = trainer._session.engine
    assert engine is not None
    return engine


def leaves_of(trainer: jl.Trainer) -> list[Any]:
    """Return the flat training state."""
    return engine_of(trainer).state.leaves


def position_of(trainer: jl.Trainer) -> Any:
    """Return where a Trainer's training stands."""
    return trainer._session.position


def lowered(trainer: jl.Trainer, name: str, batch: Any) -> Any:
    """Return a program of a Trainer's newest fit, lowered for a host batch.

    Args:
        trainer: The Trainer.
        name: "train_step", "micro_step", or "traced" for the step that callbacks look into.
        batch: The host batch.
    """
    engine = engine_of(trainer)
    found = [fn for key, fn in engine._programs.items() if (type(key) is tuple if name == "traced" else key == name)]
    assert len(found) == 1, list(engine._programs)
    program: Any = getattr(found[0], "split", found[0])
    return program.lower(engine.state.leaves, engine.strategy.shard_batch(batch))


registered_strategies = registry._registry
