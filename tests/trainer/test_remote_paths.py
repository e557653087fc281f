"""The address of a remote file system is refused: it would become the name of a local folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit.batches import random
from kit.modules import Mean

import jaxlit as jl
from jaxlit.errors import ArgumentError

MODULE = Mean()


def save(path: Any) -> None:
    trainer = jl.Trainer(max_epochs=1, strategy="single", logger=False, enable_checkpointing=False)
    trainer.fit(Mean(), [{"x": np.ones((2, 1), np.float32)}])
    trainer.save_checkpoint(path)


USES: dict[str, Callable[[Any], Any]] = {
    r"Trainer\(default_root_dir": lambda url: jl.Trainer(default_root_dir=url),
    r"Trainer\(resume": lambda url: jl.Trainer(resume=url),
    r"ModelCheckpoint\(dirpath": lambda url: jl.callbacks.ModelCheckpoint(url),
    r"trainer\.saver\.begin\(path": save,
    r"load_from_checkpoint": Mean.load_from_checkpoint,
    r"fit\(init_from=\.\.\.\)": lambda url: jl.Trainer(max_epochs=1).fit(MODULE, random(1), init_from=url),
    r"validate\(ckpt_path=\.\.\.\)": lambda url: jl.Trainer().validate(MODULE, random(1), ckpt_path=url),
    r"save_weights\(path": lambda url: jl.save_weights(MODULE, f"{url}/x.safetensors"),
    r"load_weights\(source": lambda url: jl.load_weights(MODULE, f"{url}/x.safetensors"),
}


@pytest.mark.parametrize("use", USES)
def test_the_address_of_a_bucket_is_refused(use: str) -> None:
    for url in ("gs://bucket/run", Path("s3://bucket/run"), "memory://run"):
        with pytest.raises(
            ArgumentError, match=rf"{use}(=\.\.\.\))? takes a path on a disk .*{str(url)[:4]}.*on_checkpoint_saved"
        ):
            USES[use](url)
    assert not [path for path in Path().iterdir() if ":" in path.name]


@pytest.mark.parametrize("path", ["C:/runs", "runs/a:b", "a:/b", "./gs://x", "runs"])
def test_a_colon_is_no_address(path: str) -> None:
    assert jl.Trainer(default_root_dir=path).default_root_dir == path
