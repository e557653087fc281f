"""A training to compare: what is drawn, and which draws make sense."""

import math
from dataclasses import dataclass, fields

GLOBAL, PER_REPLICA = ("single", "ddp", "fsdp", "zero1"), ("shard_map", "pmap", "replicas")
STRATEGIES = GLOBAL + PER_REPLICA

LAYERS = ("linear", "norm", "masked_norm", "attention", "gru", "scan", "scan_remat", "tied", "embed", "lora")
LAYERS += ("lora_around", "weight_norm", "spectral_norm", "partitioned")
EVALUATING = ("eval_norm", "eval_dropout")  # parts put into evaluation mode before training
RANDOM = ("dropout", "attention_dropout", "scan_dropout", "remat_dropout", "own_key", "own_rngs")
METRICS = ("average", "accuracy", "welford")
COUNTERS = ("count_steps", "count_rows", "ema_mean", *METRICS)
TARGETS = ("hard_target", "soft_target", "own_target", "own_hard_target")
WRITERS = ("copied", "centred", "weight_norm", "spectral_norm", "hard_target", "soft_target")

OPTIMIZERS = ("sgd", "momentum", "adamw", "multi_transform", "masked_decay", "inject", "multi_steps", "ema")
OPTIMIZERS += ("adafactor", "schedule_free")
SCHEDULED = ("sgd", "momentum", "adamw", "inject")

# What a replica's step does to these follows from its own rows, so that no mean of the replicas is true.
IRREDUCIBLE = {"count_rows", "masked_norm", *METRICS}


@dataclass(frozen=True)
class Case:
    """One training. Each default is the simplest choice, and all of them a plain linear regression."""

    parts: tuple[str, ...] = ("linear",)  # of the network, in order
    loss: str = "mean"  # or "sum" over rows, or "masked_mean"
    mask: str = "full"  # the 0/1 row mask: or "some", or "half", whose second half is empty
    wrt: str = "all"  # what is trained: or "head", "no_bias", "lora", or "online" (all but targets)
    optimizer: str = "sgd"
    schedule: str = ""  # or "by_step" or "by_epoch"
    sizes: tuple[int, ...] = (8, 8)  # rows of each batch of an epoch
    epochs: int = 1
    limit: int = 0  # `limit_train_batches`, 0 for none
    accumulate: int = 1
    clip: str = ""  # or "norm" or "value"
    precision: str = "32-true"  # or "bf16-mixed"
    val: tuple[tuple[int, ...], ...] = ()  # rows of each batch of each validation loader
    val_every: int = 0  # `val_check_interval`, 0 for the end of the epoch
    nested: bool = False  # whether the module that holds the network is held by another TrainModule
    again: str = ""  # the strategy of a second fit of the same module; empty for none
    cut: int = 0  # optimizer steps after which training ends and a new Trainer continues; 0 for none
    resume_on: str = ""  # the strategy that continues; empty for the same
    strategy: str = "single"
    devices: int = 1  # or replicas of "replicas"
    loss_reduction: str = ""  # what a per-replica strategy is told of the loss: or "sum"

    def __repr__(self) -> str:
        """Return the literal, with what is not a default."""
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"Case({', '.join(given)})"

    @property
    def num_batches(self) -> int:
        return self.limit or len(self.sizes)

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_batches / self.accumulate)

    @property
    def strategies(self) -> set[str]:
        return {self.strategy, self.again, self.resume_on} - {""}

    @property
    def draws_apart(self) -> bool:
        """Whether a step of replicas draws random numbers, which are theirs: one replica's differ from a device's."""
        return bool({*self.parts} & {*RANDOM}) and bool(self.strategies & {*PER_REPLICA})

    @property
    def per_replica(self) -> bool:
        """Whether some step sees one replica's rows."""
        return self.devices > 1 and bool(self.strategies & {*PER_REPLICA})

    @property
    def divides(self) -> bool:
        return any(size % self.devices == 0 for size in self.sizes[: self.num_batches])

    @property
    def may_be_refused(self) -> bool:
        """Whether something here cannot be reduced over replicas."""
        return self.per_replica and (self.loss == "sum" or bool({*self.parts} & IRREDUCIBLE))


def is_sound(case: Case) -> bool:
    """Return whether a case is one whose numbers are promised."""
    has, count = {*case.parts}, case.num_batches
    rules = (
        case.parts and len(has) == len(case.parts),
        (case.strategy == "single") == (case.devices == 1) or case.strategy != "single",
        case.loss != "masked_mean" or not case.per_replica,  # by contract it sees one replica's rows
        # A replica whose rows are all masked has no statistics, with flax's own layer as well.
        "masked_norm" not in has or not case.per_replica or case.mask == "full",
        case.loss_reduction != "sum" or (case.per_replica and case.loss == "sum" and case.strategies <= {*PER_REPLICA}),
        case.wrt != "lora" or has & {"lora", "lora_around"},
        case.wrt != "online" or has & {"hard_target", "soft_target"},
        # A write in bfloat16 rounds what it writes, and the bound of the comparison is loose.
        case.precision == "32-true" or not (has & {*WRITERS, *TARGETS, "partitioned", "weight_norm", "gru"}),
        case.precision == "32-true" or case.optimizer in ("sgd", "momentum", "adamw"),
        not case.schedule or case.optimizer in SCHEDULED,
        case.limit <= len(case.sizes),
        case.val_every <= count and (case.val or not case.val_every),
        not (case.again and case.cut),
        case.cut < case.epochs * case.steps_per_epoch and (case.cut or not case.resume_on),
        # Random numbers of replicas are compared between two per-replica strategies, so these must stay.
        not (case.draws_apart and (case.again or case.resume_on)),
    )
    return all(bool(rule) for rule in rules)
