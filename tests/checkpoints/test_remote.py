"""Checkpoints and weights at a URL are fetched to this machine, whatever is there already."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import safetensors.numpy
from kit.buckets import URL, Bucket, WaitsForCopies, checkpoints, go, in_bucket, make_machine, replace, saves
from kit.checkpoints import bytes_of, keep_all, names, train
from kit.modules import Linear
from kit.refusals import refuses, warnings_of
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.checkpoints.remote import local, staging
from jaxlit.errors import ArgumentError, CheckpointError


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_machine(tmp_path, monkeypatch)


def write(name: str, data: bytes) -> None:
    fs, base = fsspec.core.url_to_fs(URL)
    fs.pipe_file(f"{base}/{name}", data)


def delete(name: str) -> None:
    fs, base = fsspec.core.url_to_fs(URL)
    fs.rm(f"{base}/{name}", recursive=True)


def fetched() -> list[str]:
    return [path.split("/")[4] for operation, path in Bucket.log if operation == "get" and path.endswith("state.json")]


KINDS = ("bucket://a/run", "memory://{name}/run", "file://{path}/run", "dir::file://{path}")


@pytest.mark.parametrize("kind", thinned(KINDS, KINDS[0], full=()))
def test_another_machine_continues_bit_by_bit(kind: str, machine: Path, tmp_path: Path) -> None:
    url = kind.format(name=tmp_path.name, path=tmp_path / "remote")
    go(2, url=url)
    replace(machine)
    trainer, whole = go(4, url=url), train("whole", 4, saves())
    assert bytes_of(trainer) == bytes_of(whole)
    assert (trainer.run_dir / "metrics.csv").read_bytes() == (whole.run_dir / "metrics.csv").read_bytes()
    assert in_bucket(url)["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()


def test_the_same_machine_fetches_nothing(machine: Path) -> None:
    go(2)
    go(3)
    assert fetched() == []


def test_a_checkpoint_that_is_only_here_is_taken_and_copied(machine: Path) -> None:
    go(2)
    delete("checkpoints")
    assert go(2).global_step == 6
    assert checkpoints() == ["step_00000006"]


def test_a_machine_that_was_left_behind_takes_what_others_did(machine: Path) -> None:
    go(2)
    machine.rename("first")
    go(4)
    replace(machine)
    Path("first").rename(machine)
    trainer = go(5)
    assert fetched() == ["step_00000006", "step_00000012"]
    assert checkpoints() == ["step_00000015"]  # what it had left is not copied again
    whole = train("whole", 5, saves())
    assert in_bucket()["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()
    assert bytes_of(trainer) == bytes_of(whole)


def flip(name: str) -> None:
    data = in_bucket()[name]
    write(name, bytes([data[0] ^ 1]) + data[1:])


DAMAGES: dict[str, tuple[Callable[[str], None], str | None]] = {  # and what is warned of
    "it is half copied": (lambda folder: delete(f"{folder}/MANIFEST.json"), None),
    "its manifest is cut": (lambda x: write(f"{x}/MANIFEST.json", in_bucket()[f"{x}/MANIFEST.json"][:-7]), None),
    "a file is damaged": (lambda folder: flip(f"{folder}/state.json"), "state.json is damaged"),
    "a file is missing": (lambda folder: delete(f"{folder}/state.json"), "a file is missing"),
}


@pytest.mark.parametrize("damage", thinned(DAMAGES, *[*DAMAGES][::2], full=()))
def test_the_one_before_is_taken_if(damage: str, machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    go(3, WaitsForCopies(), keep_all())
    assert checkpoints() == ["step_00000003", "step_00000006", "step_00000009"]
    do, warned = DAMAGES[damage]
    do("checkpoints/step_00000009")
    replace(machine)
    trainer = go(3, keep_all())
    skipped = [text for text in warnings_of(caplog) if "step_00000009: " in text]
    assert len(skipped) == (warned is not None)
    assert all(f"{warned}" in text and "/runs/net/checkpoints/" in text for text in skipped)
    assert fetched()[-1] == "step_00000006"
    assert trainer.global_step == 9
    replace(machine)
    go(3, keep_all())
    assert fetched()[-1] == "step_00000009"  # it was written again


@pytest.mark.parametrize("name", thinned(["metrics.csv", "state.json"], full=["metrics.csv", "state.json"]))
def test_a_machine_that_stops_while_it_fetches_fetches_the_rest_later(name: str, machine: Path) -> None:
    go(2)
    replace(machine)

    def stop(operation: str, path: str) -> None:
        if operation == "get" and path.endswith(name):
            raise ConnectionError("stopped")

    Bucket.meet = staticmethod(stop)
    refuses(CheckpointError, lambda: go(3), f"{URL} cannot be read: ConnectionError: stopped")
    Bucket.meet = staticmethod(lambda *_: None)
    trainer, whole = go(3), train("whole", 3, saves())
    assert (trainer.run_dir / "metrics.csv").read_bytes() == (whole.run_dir / "metrics.csv").read_bytes()
    assert bytes_of(trainer) == bytes_of(whole)


def test_a_run_of_which_nothing_can_be_used_does_not_start_again(machine: Path) -> None:
    go(1)
    flip("checkpoints/step_00000003/state.json")
    replace(machine)
    refuses(CheckpointError, lambda: go(2), f"no checkpoint in {URL}", "state.json is damaged", r"^(?!.*\.tmp-)")


def test_a_damaged_copy_is_fetched_again(machine: Path) -> None:
    path = go(2).run_dir / "checkpoints" / "step_00000006" / "state.json"
    path.write_text("damaged")
    assert go(2).global_step == 6
    assert fetched() == ["step_00000006"]


def test_what_a_crash_left_or_did_not_delete_in_the_bucket_is_deleted(machine: Path) -> None:
    go(1)
    old = {name: data for name, data in in_bucket().items() if "step_00000003" in name}
    go(2)
    for name, data in old.items():
        write(name, data)
    replace(machine)
    write("checkpoints/step_00000099/arrays/part", b"half of it")
    go(3)
    assert {name.split("/")[1] for name in in_bucket() if name.startswith("checkpoints/")} == {"step_00000009"}


@pytest.mark.full
def test_the_best_ones_are_known_on_another_machine(machine: Path) -> None:
    best = lambda: saves(monitor="loss", mode="max", save_top_k=2)  # noqa: E731
    whole, first, second = best(), best(), best()
    train("whole", 5, whole)
    go(4, WaitsForCopies(), first)
    replace(machine)
    go(4, second)
    assert second.best_k_models == first.best_k_models
    assert len(second.best_k_models) == 2
    go(5, best())
    assert checkpoints() == names("whole/checkpoints")  # those that are no longer among the best are deleted
    replace(machine)
    module = Linear.load_from_checkpoint(f"{URL}/best")
    expected = Linear.load_from_checkpoint(whole.best_model_path)
    np.testing.assert_array_equal(module.kernel[...], expected.kernel[...])


def test_a_bucket_or_a_folder_with_another_run_is_refused(machine: Path) -> None:
    go(1)
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*of another run")
    replace(machine)
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*of another run")
    go(1)
    delete("")
    refuses(ArgumentError, lambda: go(1, resume=None), f"{URL}.*in .*machine/jaxlit/runs/bucket/runs/net, holds")


def test_a_bucket_that_cannot_be_read_is_no_new_run(machine: Path) -> None:
    go(1)
    replace(machine)

    class Closed(Bucket):
        def ls(self, *_: Any, **__: Any) -> Any:
            raise PermissionError("closed")

    fsspec.register_implementation("bucket", Closed, clobber=True)
    refuses(CheckpointError, lambda: go(1), f"{URL} cannot be read: PermissionError: closed")


URLS = (f"{URL}/checkpoints/step_00000006", URL, f"{URL}/", f"{URL}/last", f"{URL}/checkpoints")
USES = {
    "load_from_checkpoint": lambda url: Linear.load_from_checkpoint(url),
    "init_from": lambda url: train("other", 0, init_from=url).module,
    "ckpt_path": lambda url: train("other", 2, ckpt_path=url).module,
    "resume": lambda url: train("other", 2, resume=url).module,
}


@pytest.mark.parametrize(
    ("url", "use"),
    thinned(
        itertools.product(URLS, USES),
        *[*zip(URLS, [*USES] * 2, strict=False)][::2],
        full=[*zip(URLS, [*USES] * 2, strict=False)][1::2],
    ),
)
def test_a_checkpoint_at_a_url_is_taken_by(use: str, url: str, machine: Path) -> None:
    kernel = np.asarray(go(2).module.kernel[...])
    replace(machine)
    np.testing.assert_array_equal(USES[use](url).kernel[...], kernel)


def test_weights_are_fetched_and_again_only_if_they_have_changed(machine: Path) -> None:
    arrays = {"kernel": np.full((3, 1), 2.0, np.float32), "bias": np.ones(1, np.float32)}
    url, files = f"{URL}/model.safetensors", []
    for scale in (1, 1, 3):
        if not files or scale == 3:
            write("model.safetensors", safetensors.numpy.save({name: scale * x for name, x in arrays.items()}))
        module = Linear()
        jl.load_weights(module, url)
        np.testing.assert_array_equal(module.kernel[...], scale * arrays["kernel"])
        files.append(Bucket.log.count(("get", "/runs/net/model.safetensors")))
    assert files == [1, 1, 2]


def test_the_files_of_an_index_and_of_a_hubs_folder_are_fetched(machine: Path) -> None:
    write("a.safetensors", safetensors.numpy.save({"kernel": np.full((3, 1), 2.0, np.float32)}))
    write("b.safetensors", safetensors.numpy.save({"bias": np.full(1, 5.0, np.float32)}))
    index = {"weight_map": {"kernel": "a.safetensors", "bias": "b.safetensors"}}
    write("model.safetensors.index.json", json.dumps(index).encode())
    module = Linear()
    jl.load_weights(module, f"{URL}/model.safetensors.index.json")
    assert [float(module.kernel[0, 0]), float(module.bias[0])] == [2.0, 5.0]
    write("hub/model.safetensors", safetensors.numpy.save({"kernel": np.full((3, 1), 3.0, np.float32)}))
    jl.load_weights(module, f"{URL}/hub", strict=False)
    assert float(module.kernel[0, 0]) == 3.0


def test_copies_are_in_the_folder_of_caches_and_files_by_their_path(machine: Path) -> None:
    for url in ("memory://a/../../../b", "memory:///../b", "dir::file:///../../b"):
        assert machine / "jaxlit" / "runs" in staging(url).parents and ".." not in staging(url).parts
    first = staging("file://runs/net")  # of the folder of the program
    with contextlib.chdir(machine.parent.parent):
        assert staging("file://runs/net") != first
    for path in ("runs/net", Path("runs/net"), "C:/runs", 3, None):
        assert local(path) is path


def test_a_name_in_a_bucket_that_leads_elsewhere_is_not_fetched(machine: Path) -> None:
    go(1)
    Bucket.store["/runs/net/../../../../outside.txt"] = Bucket.store["/runs/net/metrics.csv"]
    replace(machine)
    go(1)
    assert not list(machine.parent.rglob("outside.txt"))


def test_nothing_at_a_url_is_named(machine: Path) -> None:
    refuses(CheckpointError, lambda: Linear.load_from_checkpoint(URL), f"no checkpoint in {URL}")
    refuses(CheckpointError, lambda: jl.load_weights(Linear(), f"{URL}/x.npz"), f"{URL}/x.npz cannot be read")


def test_a_machine_that_has_loaded_weights_continues_with_all_rows(machine: Path) -> None:
    go(2)
    replace(machine)
    Linear.load_from_checkpoint(URL)
    go(3)
    whole = train("whole", 3, saves())
    assert in_bucket()["metrics.csv"] == (whole.run_dir / "metrics.csv").read_bytes()


def test_what_is_in_the_bucket_is_loaded_whatever_was_fetched_before(machine: Path) -> None:
    first = go(3, keep_all()).module.kernel[...]
    assert not np.array_equal(first, Linear.load_from_checkpoint(f"{URL}/checkpoints/step_00000003").kernel[...])
    np.testing.assert_array_equal(first, Linear.load_from_checkpoint(URL).kernel[...])
    delete("")
    replace(machine / "jaxlit" / "runs")
    second = go(1).module.kernel[...]  # a new run, with older checkpoints than those that were fetched
    np.testing.assert_array_equal(second, Linear.load_from_checkpoint(URL).kernel[...])
    assert len([*(machine / "jaxlit" / "fetched").rglob("MANIFEST.json")]) == 1


def test_two_runs_are_not_mixed(machine: Path) -> None:
    go(3)
    machine.rename("first")
    delete("")
    go(1)
    before = in_bucket()
    refuses(CheckpointError, lambda: train("local", 1, jl.callbacks.Mirror(URL)), f"{URL} holds another run")
    replace(machine)
    Path("first").rename(machine)
    refuses(CheckpointError, lambda: go(4), f"{URL} holds another run than .*runs/net. Delete that folder")
    assert in_bucket() == before
