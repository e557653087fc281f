"""Where a Trainer's runs keep what no logger holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.reporting.media_folder import MediaFolder

if TYPE_CHECKING:
    from jaxlit.trainer.session import Session


def media_of(trainer: Any, session: "Session") -> MediaFolder:
    """Return a Trainer's folder: the first process writes to it, and a trial run makes everything and writes nothing.

    Args:
        trainer: The Trainer.
        session: Its session.
    """

    def run_dir() -> Path | None:
        return trainer.run_dir if trainer.is_global_zero and not session.settings.fast_dev_run else None

    return MediaFolder(
        run_dir,
        step=lambda: max(session.position.global_step - 1, 0),
        goes_on=lambda: session.running and not session.settings.fast_dev_run,
    )
