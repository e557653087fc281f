"""Those callbacks that are loggers, as `from jaxlit.loggers import WandbLogger` in a port asks for them."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.callbacks import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

__all__ = ["CSVLogger", "Logger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"]
