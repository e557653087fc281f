"""Several processes: how they start, which rows each has, and how they agree."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.distributed.job import initialize, own_rows, shard_options

__all__ = ["initialize", "own_rows", "shard_options"]
