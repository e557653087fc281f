"""The Trainer: arguments become objects, and a run is set up, watched and torn down."""

from jaxlit.trainer.trainer import Trainer

__all__ = ["Trainer"]


def __dir__() -> list[str]:
    return __all__
