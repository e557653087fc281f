"""Fully sharded data parallel, with the stages of ZeRO, copies of the shards (HSDP), and rules."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit import sharding
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.programs.scans import by_layer, scanned_dims
from jaxlit.sharding import axes_of, over_axes
from jaxlit.strategies.base import AXIS_TYPES, ArraySpec, Program, Strategy, like_params, remat_policy
from jaxlit.strategies.rules import Rules, dim_names, placed_by_names
from jaxlit.texts import is_key, leaf_name


class FSDP(Strategy):
    """Shard the state over the devices that split the batch.

    A parameter is split by the first of these that applies: a rule of its path; the names of its dims, as the module
    annotates them; its largest dim that divides by the number of shards; two dims that divide together; a dim that
    divides by a part of the shards. Otherwise it is replicated, as are arrays of at most `min_size` elements, random
    state, batch statistics and counters. The dim that a scan goes along, layer by layer, is split by rules only. The
    step sees the global batch, so the numbers are those of `single`. In a scan over layers, the weights of one layer
    are gathered at a time; scans inside a cond or a loop are left to XLA.

    The stages are those of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054). With `replicas` the state
    is split over a part of the devices only, and each such group has a copy (HSDP: Zhao et al., 2023,
    https://arxiv.org/abs/2304.11277): parameters are gathered within a group, the batch is split over all devices.

    Args:
        stage: What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.
        min_size: The most elements of an array that is replicated.
        replicas: Copies of the state, a divisor of the number of devices; the mesh is then `data` x `fsdp`. "auto" is
            the number of processes, and 2 in a single one.
        rules: Which mesh axes arrays are split over, see `Rules`.
        remat: Recompute the layers that a step scans over in the backward pass: True saves their inputs only,
            "dots_saveable" and other names of `jax.checkpoint_policies` save more, and so does a policy of your own,
            such as `jax.checkpoint_policies.save_only_these_names("up")`. Refused if there is no scan.
        offload: "optimizer" keeps the arrays of the optimizer's state in the host's memory, `pinned_host`: a step moves
            them to the devices for its update, and back.
        mesh: A mesh of the user's, or the sizes of its axes: the batch is split over its axes `data` and `fsdp`, the
            state over `fsdp`; with one of the two, or with a single axis, both are split over that. Its axes keep their
            types.
        axis_types: "explicit" makes all axes Explicit, and the one of a mesh that is not given is called `fsdp`: for
            models with `out_sharding=P("fsdp")`. What they type so is split so, and all else gathered while it is used.

    Raises:
        ArgumentError: A value is out of its set, or the mesh has several axes and none of these names.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy=jl.strategies.FSDP(min_size=4096), max_epochs=1, logger=False)
        >>> strategy = jl.strategies.FSDP(replicas=2)  # on 8 devices: two copies, each split over four
    """

    mesh_axes: ClassVar[tuple[str, ...]] = sharding.BATCH_AXES

    def __init__(
        self,
        *,
        stage: int = 3,
        min_size: int = 1024,
        replicas: int | Literal["auto"] = 1,
        rules: Mapping[str, Any] | None = None,
        remat: bool | str | Callable[..., Any] = False,
        offload: Literal["optimizer"] | None = None,
        mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
        axis_types: Literal["auto", "explicit"] = "auto",
    ) -> None:
        name = type(self).__name__
        self.axis_types = check.one_of("axis_types", axis_types, AXIS_TYPES, owner=name)
        check.require(check.is_int(stage, low=1) and stage <= 3, "stage", stage, "must be 1, 2 or 3", owner=name)
        self.min_size = check.integer("min_size", min_size, low=0, owner=name)
        self.replicas = check.integer("replicas", replicas, low=1, also=("auto",), owner=name)
        self.offload = offload
        check.require(offload in (None, "optimizer"), "offload", offload, "takes None or 'optimizer'", owner=name)
        self.stage, self.remat, self._policy = stage, remat, remat_policy(remat, name)
        self.rules = Rules(rules, owner=name)
        if replicas != 1:
            self.batch_axes = ("data", "fsdp")
        elif axis_types == "explicit":
            self.batch_axes = ("fsdp",)  # as models of that kind call it
        self.use_mesh(mesh)

    def use_mesh(self, mesh: jax.sharding.Mesh | Mapping[str, int] | None) -> None:
        """Train on a mesh of the user's; see `Strategy.use_mesh`."""
        is_allowed = mesh is None or self.replicas in (1, "auto")
        rule = "is a size of the given mesh: leave it out"
        check.require(is_allowed, "replicas", self.replicas, rule, owner=type(self).__name__)
        super().use_mesh(mesh)

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        """Return one axis; or `data` for the copies, which divide the devices, and `fsdp` for their shards."""
        if self.replicas == 1:
            return {self.batch_axes[0]: device_count}
        replicas = self.replicas
        if isinstance(replicas, str):
            replicas = jax.process_count() if jax.process_count() > 1 else math.gcd(2, device_count)
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

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return sharded parameters and optimizer state, and the rest replicated."""
        sharded = self._stage3_shardings(state, model, example)
        params, frozen, model_state = sharded if self.stage == 3 else self._used(sharded, model)
        shardings = jax.tree.map(lambda _: self.replicated, state)
        window = shardings.window
        if window is not None:
            window = replace(window, grads=sharded[0] if self.stage >= 2 else params)
        opt_state = like_params(state.opt_state, state.params, sharded[0], self.replicated)
        if self.offload is not None:  # not of counts, which are read before the update
            move = lambda x, to: to.with_memory_kind(sharding.HOST) if x.ndim else to  # noqa: E731
            opt_state = jax.tree.map(move, state.opt_state, opt_state)
        return replace(
            shardings, params=params, frozen=frozen, model_state=model_state, opt_state=opt_state, window=window
        )

    def grad_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the gradients' shards from stage 2 on."""
        return None if self.stage == 1 else self._stage3_shardings(state, model, example)[0]

    def used_sharding(self, shardings: TrainState, model: PureModule) -> Any:
        """Return the shardings over the axes of rules only; on Explicit axes those that the module itself gives."""
        return self._used(shardings.variables, model)

    def wrap_body(self, body: Callable[..., Any], stored: Any, used: Any) -> Callable[..., Any]:
        """Return the step with scans that gather the weights of one layer at a time, and recompute it with `remat`."""
        types = stored
        if self.explicit_axes:
            mesh = self.model_mesh
            stored, used = jax.tree.map(lambda x: NamedSharding(mesh, self._type_of(x)), (stored, used))
        pairs = list(zip(jax.tree.leaves(stored), jax.tree.leaves(used), strict=True))
        gathered = [pair if pair[0] != pair[1] else None for pair in pairs]
        if self.remat:
            body = by_layer(body, pairs, self._policy)
        elif any(gathered):
            body = by_layer(body, gathered)
        return self.typed(body, types)

    def on_state(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled function, which sees arrays of the state on the devices."""
        if self.offload is None:
            return super().on_state(fn)
        return super().on_state(lambda arrays, *inputs: fn(jax.device_put(arrays, jax.memory.Space.Device), *inputs))

    def compile(self, program: Program) -> Callable[..., Any]:
        """Return the compiled program; it moves what is in the host's memory to the devices, and back if it changes."""

        def run(replica: Replica, *args: Any) -> Any:
            *states, batch = args
            pairs = []

            def move(spec: ArraySpec, x: Any) -> Any:
                if spec.sharding.memory_kind != sharding.HOST:
                    return x
                pairs.append((jax.device_put(x, jax.memory.Space.Device), x))
                return pairs[-1][0]

            results = program.fn(replica, *jax.tree.map(move, program.inputs, tuple(states)), batch)
            unchanged = {id(moved): x for moved, x in pairs}
            return jax.tree.map(lambda x: unchanged.get(id(x), x), results)

        return super().compile(program if self.offload is None else replace(program, fn=run))

    def _stage3_shardings(self, state: TrainState, model: PureModule, example: Any) -> tuple[Any, Any, Any]:
        """Return the shardings of parameters, frozen parameters and other state under stage 3."""
        parts, names = state.variables, dim_names(model.origin, typed=bool(self.explicit_axes))
        # Whether each is a parameter, by its place in (params, frozen, model_state); its name; the leaf.
        leaves = [(path[0].idx < 2, leaf_name(path[1:]), x) for path, x in jax.tree_util.tree_leaves_with_path(parts)]
        self.rules.check(self.mesh, [name for _, name, _ in leaves], names.values())

        def shardings_for(scanned: dict[int, set[int]]) -> list[NamedSharding]:
            return [
                self._sharding(name, x, names.get(name, P()), by_size=is_param, scanned=scanned.get(i, set()))
                for i, (is_param, name, x) in enumerate(leaves)
            ]

        shardings = shardings_for({})
        # The step is traced only if a scan may go along a dim that is split: dim 0 of two, or any of three.
        may_scan = any(
            axes_of(first.spec) and (x.ndim > 2 or (x.ndim > 1 and first.spec[0]))
            for first, (_, _, x) in zip(shardings, leaves, strict=True)
        )
        if example is not None and (may_scan or self.remat):
            indices = [i for i, (_, _, x) in enumerate(leaves) if not is_key(x)]
            scanned = scanned_dims(self.step_program(state, model, example), indices)
            if self.remat and not scanned:
                raise ArgumentError(
                    f"{type(self).__name__}(remat={self.remat!r}) recomputes the layers of a scan, and "
                    f"{model.name}.training_step scans over none. Leave remat out, and wrap layers in nnx.remat."
                )
            shardings = shardings_for(scanned)
        return jax.tree.structure(parts).unflatten(shardings)

    def _used(self, sharded: Any, model: PureModule) -> Any:
        if not self.explicit_axes:
            return jax.tree.map(self._gathered, sharded)
        return placed_by_names(self.rules, model.origin, sharded, self.mesh, self._gathered)

    def _sharding(self, name: str, x: Any, names: P, *, by_size: bool, scanned: set[int]) -> NamedSharding:
        if not is_key(x) and (by_rule := self.rules.sharding(name, x, names, self.mesh)) is not None:
            return by_rule
        if not by_size:
            return self.replicated
        return sharding.by_size(x, self.mesh, self.shard_axes, min_size=self.min_size, unsplit_dims=scanned)

    def _gathered(self, sharded: NamedSharding) -> NamedSharding:
        """Return the sharding of an array while it is used: over the axes of rules only."""
        if sharded.mesh != self.mesh:  # a divided mesh, all of whose axes are shards
            return self.replicated
        return NamedSharding(self.mesh, over_axes(sharded.spec, {*self.mesh.axis_names} - {*self.shard_axes}))
