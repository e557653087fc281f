"""What a run is told and tells while it goes."""

from dataclasses import dataclass, field


@dataclass
class Control:
    """What changes during a run, apart from where it stands.

    Attributes:
        should_stop: A stop was asked for.
        stop_reason: Why, as whoever asked first said it.
        interrupted: Ctrl-C or SIGTERM came: training ends after the step that runs.
        sanity_checking: The validation that runs is the one before training.
        num_training_batches: Batches of an epoch; inf where the loader has no length.
        num_val_batches: Batches of each validation loader.
    """

    should_stop: bool = False
    stop_reason: str | None = None
    interrupted: bool = False
    sanity_checking: bool = False
    num_training_batches: int | float = 0
    num_val_batches: list[int | float] = field(default_factory=list)

    def stop(self, reason: str) -> None:
        """Ask for a stop; the first reason is kept."""
        self.should_stop, self.stop_reason = True, self.stop_reason or reason
