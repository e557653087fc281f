"""The command line of hydra in docs/scripts.md, where it is installed; that of jl.cli is tested in test_cli.py."""

import json
from pathlib import Path

import numpy as np
import pytest
from kit.pages import block_with, needing, recipe, recipes, run_script

PAGE = "scripts.md"
TOLD = """
import json
trainer, module = jl.Trainer(**config.trainer), Line(**config.model)
trainer.fit(module, data)
print(json.dumps([module.hparams, float(module.slope[...]), trainer.max_epochs, type(trainer.strategy).__name__]))
"""


def slope_by_hand(lr: float, epochs: int) -> float:
    """Return the slope of whole batches, in any order: each step is one on all of x."""
    x, slope = np.linspace(-1, 1, 64), 0.0
    for _ in range(epochs):
        slope -= lr * np.mean(2 * (slope - 3) * x * x)
    return slope


@pytest.mark.full
@pytest.mark.parametrize("package", needing("hydra"))
def test_a_config_of_hydra_becomes_the_arguments(package: str, tmp_path: Path) -> None:
    code = recipe(PAGE, package)
    whole = "    jl.Trainer(**config.trainer).fit(Line(**config.model), data, data)\n"
    assert whole in code
    kept = TOLD.replace("\n", "\n    ").rstrip(" ")
    (tmp_path / "conf").mkdir()
    config = "trainer: {max_epochs: 2, strategy: ddp, logger: false}\nmodel: {lr: 0.1}\n"
    (tmp_path / "conf" / "train.yaml").write_text(config)
    code = f"{block_with(PAGE, 'import Line, line_data')}\ndata = line_data(64)\n{code.replace(whole, kept)}"
    output = run_script(tmp_path / "train.py", code, "trainer.max_epochs=3", "model.lr=0.05")
    hparams, slope, epochs, strategy = json.loads(output.strip().splitlines()[-1])
    assert (hparams, epochs, strategy) == ({"slope": 0.0, "lr": 0.05}, 3, "DDP")
    assert slope == pytest.approx(slope_by_hand(0.05, 3), rel=1e-5)


def test_each_command_line_is_tried_and_can_be_compiled() -> None:
    assert sorted(recipes(PAGE)) == ["hydra"]
    for package, code in recipes(PAGE).items():
        compile(code, package, "exec")
