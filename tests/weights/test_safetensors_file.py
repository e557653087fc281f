"""Files of safetensors, read and written without the library, which they are compared with."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxlit.errors import CheckpointError
from jaxlit.weights import sources as safetensors_file

SHAPES = [(), (0, 3), (5,), (2, 3)]


def of_all_kinds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, dtype in safetensors_file.DTYPES.items():
        for shape in SHAPES:
            bits = rng.integers(0, 2 if name == "BOOL" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{name}{list(shape)}"] = bits.view(dtype).reshape(shape)
    return arrays


def write(path: Path, arrays: dict[str, np.ndarray], **metadata: str) -> Path:
    specs = [(name, x.shape, x.dtype) for name, x in arrays.items()]
    safetensors_file.write_safetensors(path, specs, arrays.values(), metadata)
    return path


def test_every_dtype_comes_back_bit_by_bit() -> None:
    arrays = of_all_kinds()
    read = safetensors_file.read_safetensors(write(Path("all.safetensors"), arrays))
    assert read.keys() == arrays.keys()
    for name, x in arrays.items():
        assert read[name].dtype == x.dtype
        assert read[name].shape == x.shape
        assert read[name].tobytes() == x.tobytes()


def test_the_library_reads_what_was_written() -> None:
    arrays = of_all_kinds()
    path = write(Path("all.safetensors"), arrays, format="np")
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "np"}
        assert sorted(file.keys()) == sorted(arrays)
    entries = dict(safetensors.deserialize(path.read_bytes()))
    for name, x in arrays.items():
        assert entries[name]["dtype"] == name.split("[")[0]
        assert entries[name]["shape"] == list(x.shape)
        assert bytes(entries[name]["data"]) == x.tobytes()


def test_what_the_library_has_written_is_read() -> None:
    arrays = {name: x for name, x in of_all_kinds().items() if x.dtype.kind in "biuf"}
    safetensors.numpy.save_file(arrays, "theirs.safetensors", {"format": "pt"})
    read = safetensors_file.read_safetensors(Path("theirs.safetensors"))
    assert {name: x.tobytes() for name, x in read.items()} == {name: x.tobytes() for name, x in arrays.items()}


def test_arrays_are_mapped_and_not_read() -> None:
    array = safetensors_file.read_safetensors(write(Path("one.safetensors"), {"x": np.arange(6.0)}))["x"]
    while array.base is not None and not isinstance(array.base, np.memmap):
        array = array.base
    assert isinstance(array.base, np.memmap)


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": (b"", "cannot be read"),
    "short": (b"123", "header is damaged"),
    "long header": ((2**60).to_bytes(8, "little") + b"{}", "header is damaged"),
    "no json": (with_header("x")[:-1] + b"!", "header is damaged"),
    "no entry": (with_header({"x": 3}), "header is damaged"),
    "truncated": (with_header({"x": ENTRY}, b"1234567"), "the bytes of x .* Download the file again"),
    "other size": (with_header({"x": ENTRY | {"shape": [3]}}, bytes(12)), "the bytes of x"),
    "negative": (with_header({"x": ENTRY | {"data_offsets": [-8, 0]}}, bytes(12)), "the bytes of x"),
    "from the end": (with_header({"x": ENTRY | {"data_offsets": [-16, -8]}}, bytes(16)), "the bytes of x"),
    "no size": (with_header({"x": ENTRY | {"shape": [-1], "data_offsets": [0, 400]}}, bytes(16)), "the bytes of x"),
    "overlapping": (with_header({"x": ENTRY, "y": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "not contiguous"),
    "a hole": (with_header({"x": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)), "not contiguous"),
    "more": (with_header({"x": ENTRY}, bytes(16)), "not contiguous up to the end"),
    "a broken second": (with_header({"x": ENTRY, "y": {"shape": [1]}}, bytes(8)), "the entry of y"),
    "deep": (len(b"[" * 99999).to_bytes(8, "little") + b"[" * 99999, "header is damaged"),
    "dtype": (with_header({"x": ENTRY | {"dtype": "F4"}}, bytes(8)), "x has the dtype 'F4'"),
}


def test_a_header_beyond_the_limit_of_the_library_is_refused() -> None:
    path, length = Path("long.safetensors"), 100_000_001
    try:
        path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * (length - 2))
        with pytest.raises(safetensors.SafetensorError, match="header too large"):
            safetensors.safe_open(path, framework="np")
        with pytest.raises(CheckpointError, match="header is damaged"):
            safetensors_file.read_safetensors(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(damage: str) -> None:
    content, message = DAMAGED[damage]
    Path("bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"bad.safetensors .*{message}"):
        safetensors_file.read_safetensors(Path("bad.safetensors"))


def test_a_write_that_fails_leaves_the_older_file() -> None:
    path = write(Path("x.safetensors"), {"x": np.arange(3)})
    before = path.read_bytes()

    def arrays():
        yield np.arange(2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        safetensors_file.write_safetensors(path, [("x", (2,), np.dtype(int)), ("y", (2,), np.dtype(int))], arrays(), {})
    assert path.read_bytes() == before
    assert [file.name for file in Path().iterdir()] == [path.name]


def test_arrays_without_alignment_are_read() -> None:
    """Files of other writers need not have any."""
    header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["y"] = {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]}
    y = np.array([1.5, -2], ml_dtypes.bfloat16)
    Path("odd.safetensors").write_bytes(with_header(header, b"\7" + y.tobytes()))
    read = safetensors_file.read_safetensors(Path("odd.safetensors"))
    assert read["x"].tolist() == [7]
    assert read["y"].tolist() == [1.5, -2]
