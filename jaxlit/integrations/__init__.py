"""Programs that start and watch trainings: Ray Train."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.integrations import ray

__all__ = ["ray"]
