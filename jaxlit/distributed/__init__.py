"""Several processes: how they start, which rows are whose, and how they agree."""

from jaxlit.distributed.start import initialize, own_rows, shard_options

__all__ = ["initialize", "own_rows", "shard_options"]


def __dir__() -> list[str]:
    return __all__
