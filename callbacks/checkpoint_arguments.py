"""What the arguments of ModelCheckpoint may be."""

from pathlib import Path
from typing import Any

from jaxlit import checks as check
from jaxlit.checkpoints.naming import check_filename
from jaxlit.errors import ArgumentError


def check_checkpoint_arguments(given: dict[str, Any]) -> None:
    """Refuse arguments that are out of their sets, or keep nothing.

    Raises:
        ArgumentError: Naming the argument.
    """
    owner, dirpath, filename = "ModelCheckpoint", given["dirpath"], given["filename"]
    is_path = dirpath is None or (isinstance(dirpath, (str, Path)) and bool(str(dirpath)))
    check.require(is_path, "dirpath", dirpath, "takes a path", owner=owner)
    is_text = filename is None or (isinstance(filename, str) and bool(filename))
    check.require(is_text, "filename", filename, "takes a text like '{epoch}-{val/loss:.2f}'", owner=owner)
    check_filename(filename)
    for name in ("save_last", "save_on_exception"):
        check.boolean(name, given[name], owner=owner)
    check.integer("save_top_k", given["save_top_k"], low=-1, owner=owner)
    for name in ("every_n_train_steps", "every_n_epochs"):
        if given[name] is not None:
            check.integer(name, given[name], low=1, owner=owner)
    action = given["on_save_error"]
    check.require(action in ("raise", "warn"), "on_save_error", action, "takes 'raise' or 'warn'", owner=owner)
    if given["monitor"] is None and given["save_top_k"] > 1:
        raise ArgumentError(
            f"{owner}(save_top_k={given['save_top_k']}) without monitor: nothing says which are best. Pass monitor=."
        )
    if given["save_top_k"] == 0 and not given["save_last"]:
        raise ArgumentError(
            f"{owner}(save_top_k=0, save_last=False) keeps nothing. Pass Trainer(enable_checkpointing=False)."
        )
