"""What leaves a step under strategies that split it: outputs and predictions are rows, counts or means of all rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kit.journal import hooks
from kit.line import START, Line, Outputs, Step, make_batches, outputs_of, returning
from kit.trainers import REPLICAS, make_trainer, thinned

from jaxlit.errors import ModuleError


@pytest.mark.parametrize(
    ("strategy", "verb"),
    thinned([("shard_map", "fit"), ("pmap", "validate"), ("replicas:8", "fit")], ("shard_map", "fit")),
)
def test_an_output_stays_averaged_for_later_batches(strategy: str, verb: str) -> None:
    # 10 values; the second batch has 80 rows and so 10 a replica, the third has 10 in all.
    scale = lambda module, batch: {"ten": jnp.arange(10.0) * batch["x"].mean(), "row": batch["x"].sum(1)}  # noqa: E731
    batches = make_batches(208, 80, 10)
    for result, batch in zip(outputs_of(verb, returning(scale), batches, strategy), batches, strict=True):
        np.testing.assert_allclose(result["ten"], np.arange(10.0) * batch["x"].mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(result["row"], batch["x"].sum(1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "rows", "verb"),
    [("ddp", 16, "fit"), ("replicas:8", 16, "fit"), ("shard_map", 23, "validate"), ("pmap", 23, "predict")],
)
def test_a_count_is_that_of_the_whole_batch(strategy: str, rows: int, verb: str) -> None:
    batches, count = make_batches(rows), lambda module, batch: {"correct": (batch["x"][:, 0] > 0).sum()}
    (result,) = outputs_of(verb, returning(count), batches, strategy)
    assert result["correct"] == (batches[0]["x"][:, 0] > 0).sum() > 2


CLASSES = 3


def confusion(module: Any, batch: Any) -> dict[str, jax.Array]:
    true, result = ((x > 0).astype(jnp.int32) + (x > 0.8) for x in (batch["x"][:, 0], batch["x"].sum(1)))
    return {
        "confusion": jnp.zeros((CLASSES, CLASSES), jnp.int32).at[true, result].add(1),
        "true": true,
        "same": jnp.int32(7),
    }


@pytest.mark.parametrize("strategy", thinned(["fsdp", "zero2", "hsdp", *REPLICAS], "fsdp", "shard_map"))
def test_confusion_matrices_add_up_to_that_of_all_rows(strategy: str) -> None:
    # The tails do not divide among 8 devices, and one has as many rows as the matrix.
    batches = make_batches(16, 24, 13, CLASSES)
    result = outputs_of("validate", returning(confusion), batches, strategy)
    x = np.concatenate([batch["x"] for batch in batches])
    true, guess = ((v > 0).astype(int) + (v > np.float32(0.8)) for v in (x[:, 0], x[:, 0] + x[:, 1]))
    expected = np.zeros((CLASSES, CLASSES), int)
    np.add.at(expected, (true, guess), 1)
    np.testing.assert_array_equal(sum(batch["confusion"] for batch in result), expected)
    np.testing.assert_array_equal(np.concatenate([batch["true"] for batch in result]), true)
    assert [int(batch["same"]) for batch in result] == [7] * 4


@pytest.mark.parametrize(
    ("strategy", "rows", "verb"),
    [("shard_map", 16, "fit"), ("pmap", 23, "fit"), ("replicas:8", 16, "validate"), ("pmap", 23, "predict")],
)
def test_an_int_that_differs_by_replica_is_refused(strategy: str, rows: int, verb: str) -> None:
    module = returning(lambda m, batch: {"largest": batch["x"][:, 0].argmax()})
    with pytest.raises(ModuleError, match=r"largest, int32\[\].*differs between the replicas"):
        outputs_of(verb, module, make_batches(rows), strategy)


@pytest.mark.parametrize(("strategy", "name"), [("shard_map", "transposed"), ("pmap", "spread")])
def test_predictions_that_are_no_rows_are_refused_by_their_name(strategy: str, name: str) -> None:
    values: dict[str, Step] = {"transposed": lambda m, batch: batch["x"].T, "spread": lambda m, batch: batch["x"].std()}
    step = lambda module, batch: {"rows": batch["x"], name: values[name](module, batch)}  # noqa: E731
    with pytest.raises(ModuleError, match=f"predict_step returned {name}, float32"):
        outputs_of("predict", returning(step), make_batches(32), strategy)


def two_loaders() -> list[list[dict[str, np.ndarray]]]:
    first, second = make_batches(8, 16)
    return [[first], [{**second, "z": 2 * second["x"]}]]


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_loaders_with_other_outputs_are_refused_by_name(strategy: str) -> None:
    with pytest.raises(ModuleError, match="validation_step returned .*'z'.* take dataloader_idx as an argument"):
        make_trainer(strategy=strategy).validate(returning(lambda module, batch: dict(batch)), two_loaders())


@pytest.mark.parametrize("strategy", ["single", "pmap"])
def test_outputs_may_differ_by_dataloader_idx(strategy: str) -> None:
    class Both(Line):
        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
            self.log("which", 10.0 + dataloader_idx + 0 * self.loss(batch))
            return {"z": batch["z"]} if dataloader_idx else {"x": batch["x"], "mean": batch["x"].mean()}

    keep, loaders = Outputs(), two_loaders()
    result = make_trainer(keep, strategy=strategy).validate(Both(), loaders)
    assert result == [{"which/dataloader_idx_0": 10.0}, {"which/dataloader_idx_1": 11.0}]
    first, second = keep.outputs
    assert (set(first), set(second)) == ({"x", "mean"}, {"z"})
    np.testing.assert_array_equal(first["x"], loaders[0][0]["x"])
    np.testing.assert_allclose(first["mean"], loaders[0][0]["x"].mean(), rtol=1e-5)
    np.testing.assert_array_equal(second["z"], loaders[1][0]["z"])


@pytest.mark.parametrize("strategy", ["ddp", "pmap"])
def test_an_output_of_a_replicas_length_by_chance_is_no_row(strategy: str) -> None:
    module = returning(lambda m, batch: m.w * 2.0)
    (result,) = make_trainer(strategy=strategy).predict(module, make_batches(16))
    np.testing.assert_array_equal(result, START * 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_prediction_of_rows_is_split_over_the_devices(strategy: str) -> None:
    specs: list[Any] = []
    see = hooks(on_predict_batch_end=lambda t, m, outputs, *_: specs.append(outputs.sharding.spec))
    make_trainer(see, strategy=strategy).predict(returning(lambda m, batch: batch["x"]), make_batches(16))
    assert specs == [P("data")]
