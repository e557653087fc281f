"""Fully sharded data parallel: its stages (ZeRO), and copies of its shards (HSDP)."""

import math
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit import sharding
from jaxlit.core.state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import Strategy, own_mesh
from jaxlit.strategies.like_params import like_params


class FSDP(Strategy):
    """Shard the state over the devices that split the batch.

    Each array is split along its largest dim that divides by the number of shards; arrays of at most
    `min_size` elements, and those with no such dim, stay whole. Random state, batch statistics and
    counters stay whole too. The step sees the global batch, so the numbers are those of `single`.

    The stages are those of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). With `replicas` the state
    is split over a part of the devices only, and each such group holds a copy (HSDP: Zhao et al., 2023,
    https://arxiv.org/abs/2304.11277): parameters are gathered within a group, the batch is split over all devices.

    Args:
        stage: What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.
        min_size: The most elements of an array that stays whole.
        replicas: Copies of the state, a divisor of the number of devices; the mesh is then `data` x `fsdp`. "auto" is
            the number of processes, and 2 in a single one.
        mesh: A mesh of your own: the batch is split over its axes `data` and `fsdp`, the state over `fsdp`; with one
            of the two, or with an only axis, both are split over that.

    Raises:
        ArgumentError: A value is out of its set, or the mesh has several axes and none of these names.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy=jl.strategies.FSDP(min_size=4096), max_epochs=1, logger=False)
        >>> strategy = jl.strategies.FSDP(replicas=2)  # on 8 devices: two copies, each split over four
    """

    def __init__(
        self,
        *,
        stage: int = 3,
        min_size: int = 1024,
        replicas: int | str = 1,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        whole = check.is_int(min_size, low=0)
        check.require(stage in (1, 2, 3), "stage", stage, "must be 1, 2 or 3", owner="FSDP")
        check.require(whole, "min_size", min_size, "must be an int of at least 0", owner="FSDP")
        known = replicas == "auto" or check.is_int(replicas, low=1)
        check.require(known, "replicas", replicas, "must be a positive int or 'auto'", owner="FSDP")
        alone = mesh is None or replicas == 1
        check.require(alone, "replicas", replicas, "is said by the mesh where one is given: leave it out", owner="FSDP")
        self.stage, self.min_size, self.replicas = stage, min_size, replicas
        if replicas != 1:
            self.batch_axes = ("data", "fsdp")
        own_mesh(self, mesh, known=("data", "fsdp"))

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        """Return one axis `data`, or `data` for the copies and `fsdp` for the shards of each.

        Raises:
            ArgumentError: The copies do not divide the devices.
        """
        if self.replicas == 1:
            return super().mesh_shape(device_count)
        several = jax.process_count() if jax.process_count() > 1 else min(2, device_count)
        replicas = several if isinstance(self.replicas, str) else self.replicas
        if device_count % replicas:
            raise ArgumentError(
                f"FSDP(replicas={self.replicas!r}): {device_count} devices do not divide into {replicas} copies of the "
                "state. Give a divisor."
            )
        return {"data": replicas, "fsdp": device_count // replicas}

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """The mesh axes that the state is split over, together."""
        return ("fsdp",) if "fsdp" in self.batch_axes else self.batch_axes

    def spec(self, shape: tuple[int, ...]) -> P:
        """Return how an array of this shape is split."""
        parts = math.prod(self.mesh.shape[axis] for axis in self.shard_axes)
        return sharding.split_dim(sharding.largest_dim(shape, parts, self.min_size), self.shard_axes)

    def state_sharding(self, state: TrainState) -> Any:
        """Return sharded parameters and optimizer state, and the rest whole."""
        split = lambda tree: jax.tree.map(lambda x: NamedSharding(self.mesh, self.spec(x.shape)), tree)  # noqa: E731
        whole = jax.tree.map(lambda _: self.replicated, state)
        params = split(state.params) if self.stage == 3 else whole.params
        window = whole.window
        if window is not None and self.stage >= 2:
            window = replace(window, grads=split(state.params))
        return replace(
            whole,
            params=params,
            frozen=split(state.frozen) if self.stage == 3 else whole.frozen,
            opt_state=like_params(state.opt_state, state.params, split(state.params), self.replicated),
            window=window,
        )

    def constrain_grads(self, grads: Any) -> Any:
        """Shard the gradients from stage 2 on."""
        if self.stage == 1:
            return grads
        return jax.tree.map(
            lambda g: jax.lax.with_sharding_constraint(g, NamedSharding(self.mesh, self.spec(g.shape))), grads
        )
