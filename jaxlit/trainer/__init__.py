"""The Trainer: arguments become objects, and a run is set up, watched and torn down."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.trainer.trainer import Trainer

__all__ = ["Trainer"]
