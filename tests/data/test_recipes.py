"""The loaders of other libraries in docs/data.md; each runs where its library is installed."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from kit.pages import block_with, blocks, needing, recipe, recipes, run_script

PAGE = "data.md"
PACKAGES = ("torch", "datasets", "tensorflow", "webdataset")

# Trains twice by the recipe's loader, with a journal of the batches; the slope by its formula in float64.
CHECK = """
class Journal(jl.Callback):
    def on_train_epoch_start(self, trainer, module):
        epochs.append([])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        epochs[-1].append({key: np.asarray(value, np.float64) for key, value in batch.items()})


def train():
    epochs.clear()
    module = Line()
    trainer = jl.Trainer(strategy="single", max_epochs=2, logger=False, enable_checkpointing=False, callbacks=Journal())
    trainer.fit(module, loader)
    return float(module.slope[...]), [[batch["x"] for batch in epoch] for epoch in epochs], [*epochs]


epochs = []
slope, drawn, journal = train()
by_hand = 0.0
for batch in sum(journal, []):
    by_hand -= 0.1 * np.mean(2 * (by_hand * batch["x"] - batch["y"]) * batch["x"])
np.testing.assert_allclose(slope, by_hand, rtol=1e-5)
one, other = (np.concatenate(epoch) for epoch in drawn)
np.testing.assert_array_equal(np.sort(one), np.sort(x))
np.testing.assert_array_equal(np.sort(other), np.sort(x))
assert [len(batch) for batch in drawn[0]] == [16, 16, 16, 12] and not np.array_equal(one, other)
_, again, _ = train()
for found, expected in zip(sum(again, []), sum(drawn, []), strict=True):
    np.testing.assert_array_equal(found, expected)

for batches in TAKEN:
    jl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False).fit(Line(), batches)
for rows in REFUSED:
    try:
        jl.Trainer(max_epochs=1, logger=False).fit(Line(), rows)
    except jl.errors.DataError as error:
        assert "These are rows: batch them" in str(error), error
    else:
        raise AssertionError(rows)
"""
TAKEN = {
    "torch": "[torch.utils.data.DataLoader(samples, batch_size=32)]",
    "datasets": "[dataset.batch(32), dataset.to_iterable_dataset().batch(32)]",
}
REFUSED = {
    "torch": "[samples, torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(x))]",
    "datasets": "[dataset, datasets.Dataset.from_dict(rows), dataset.to_iterable_dataset()]",
}


def write_shards(folder: Path) -> list[str]:
    x = np.linspace(-1, 1, 60, dtype=np.float32)
    for start in (0, 30):
        with tarfile.open(folder / f"{start}.tar", "w") as tar:
            for i in range(start, start + 30):
                for name, value in (("x", x[i]), ("y", 3 * x[i])):
                    data = io.BytesIO()
                    np.save(data, value)
                    entry = tarfile.TarInfo(f"{i:03d}.{name}.npy")
                    entry.size = data.tell()
                    data.seek(0)
                    tar.addfile(entry, data)
    return [str(folder / f"{start}.tar") for start in (0, 30)]


@pytest.mark.full
@pytest.mark.parametrize("package", ["datasets", *needing(*(name for name in PACKAGES if name != "datasets"))])
def test_a_recipe_gives_each_row_once_an_epoch(package: str, tmp_path: Path) -> None:
    parts = [blocks(PAGE)[0], block_with(PAGE, "class Epochs"), f"shards = {write_shards(tmp_path)}"]
    given = [f"TAKEN = {TAKEN.get(package, [])}", f"REFUSED = {REFUSED.get(package, [])}"]
    run_script(tmp_path / "train.py", "\n".join([*parts, recipe(PAGE, package), *given, CHECK]))


def test_each_recipe_is_tried_and_can_be_compiled() -> None:
    assert sorted(recipes(PAGE)) == sorted(PACKAGES)
    for package, code in recipes(PAGE).items():
        compile(code, package, "exec")
