"""Which kernel draws the random bits of weights: jax's own on one GPU, XLA's elsewhere."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxlit.strategies.base import _kernel_of_random_bits


def mesh_of(platform: str, size: int) -> Any:
    return SimpleNamespace(size=size, devices=np.array([SimpleNamespace(platform=platform)] * size))


def flag() -> bool:
    return jax.config.jax_threefry_gpu_kernel_lowering  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("platform", "size", "wanted"), [("gpu", 1, True), ("gpu", 2, False), ("cpu", 1, False), ("tpu", 1, False)]
)
def test_one_gpu_draws_random_bits_by_a_kernel_of_jax(platform: str, size: int, wanted: bool) -> None:
    with _kernel_of_random_bits(mesh_of(platform, size)):
        assert flag() is wanted
    assert flag() is False


def test_an_error_leaves_the_kernel_of_random_bits_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), _kernel_of_random_bits(mesh_of("gpu", 1)):
        assert flag() is True
        raise ZeroDivisionError
    assert flag() is False


def test_a_kernel_that_the_user_chose_is_kept() -> None:
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        with _kernel_of_random_bits(mesh_of("gpu", 1)):
            assert flag() is True
        assert flag() is True
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", False)


@pytest.mark.parametrize(("platform", "size"), [("cpu", 1), ("tpu", 1), ("gpu", 2)])
def test_other_devices_do_not_write_the_flag(platform: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "config", SimpleNamespace(jax_threefry_gpu_kernel_lowering=False))  # has no update
    with _kernel_of_random_bits(mesh_of(platform, size)):
        pass


def test_a_jax_without_the_flag_still_creates_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "config", SimpleNamespace())
    with _kernel_of_random_bits(mesh_of("gpu", 1)):
        pass
