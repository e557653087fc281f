"""Those callbacks that are loggers, as `from jaxlit.loggers import WandbLogger` in a port asks for them."""

from typing import TYPE_CHECKING, Any

from jaxlit.callbacks import CSVLogger, JSONLLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from jaxlit.porting import no_such_name

__all__ = ["CSVLogger", "JSONLLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # a type checker would take any name that it finds a __getattr__ for

    def __getattr__(name: str) -> Any:
        raise no_such_name("jl.callbacks", name, __all__, called="jl.loggers")
