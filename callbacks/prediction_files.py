"""Rows of predictions in files, one after the other, whose number is known at the end only."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from jaxlit.errors import ArgumentError, DataError
from jaxlit.leaf_names import leaf_name

INDEX, MAGIC, LONE = "index.json", "jaxlit predictions 1", "predictions"

_HEADER = 256  # bytes, whatever stands in it


class Files(Protocol):
    """Where the leaves of predictions go."""

    def write(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows, by the name of the leaf; the first call says which leaves there are."""

    def close(self) -> None:
        """End the files: they are whole now."""

    def give_up(self) -> None:
        """Let go of files that will be deleted."""


class NpyFiles:
    """A .npy file for each leaf.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[str, tuple[Any, np.dtype, tuple[int, ...]]]()
        self._rows = 0

    def write(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows."""
        for name, x in rows.items():
            if name not in self._files:
                refuse_texts(name, x)
                file = (self._folder / f"{name}.npy").open("wb")
                file.write(_header(x.dtype, (0, *x.shape[1:])))
                self._files[name] = file, x.dtype, x.shape[1:]
            self._files[name][0].write(x.tobytes())  # dates have no buffer
        self._rows += len(next(iter(rows.values())))

    def close(self) -> None:
        """Write the number of rows into the headers."""
        for file, dtype, shape in self._files.values():
            file.seek(0)
            file.write(_header(dtype, (self._rows, *shape)))
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def give_up(self) -> None:
        """Close the files."""
        for file, _, _ in self._files.values():
            file.close()


def refuse_texts(name: str, x: np.ndarray) -> None:
    """Refuse what .npy files do not hold.

    Raises:
        DataError: It is texts or objects.
    """
    if x.dtype.kind in "OUS":
        raise DataError(
            f"PredictionWriter: {name!r} holds texts or objects, and .npy files hold numbers. Pass format='parquet', "
            "or leave it out of the predictions and of host_keys."
        )


class ParquetFile:
    """One Parquet file with a column for each leaf; rows that are arrays are lists of a fixed size.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._writer = folder / f"{LONE}.parquet", None
        self._arrow, self._parquet = pyarrow_or_refuse()

    def write(self, rows: Mapping[str, np.ndarray]) -> None:
        """Add rows, as a group of their own."""
        table = self._arrow.table({name: self._column(name, x) for name, x in rows.items()})
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the footer, without which a Parquet file is none."""
        if self._writer is not None:
            self._writer.close()

    def give_up(self) -> None:
        """Close the file."""
        self.close()

    def _column(self, name: str, x: np.ndarray) -> Any:
        if 0 in x.shape[1:] or x.dtype.kind == "c":
            held = "complex numbers" if x.dtype.kind == "c" else f"rows of shape {x.shape[1:]}"
            raise DataError(
                f"PredictionWriter: {name!r} has {held}, which Parquet does not hold. Pass format='npy', or leave it "
                "out of the predictions."
            )
        try:
            column = self._arrow.array(x.reshape(-1).tolist() if x.dtype.hasobject else x.reshape(-1))
        except self._arrow.ArrowException as error:
            raise DataError(
                f"PredictionWriter: {name!r} holds {x.dtype}, and Parquet cannot take it: {error}. Leave it out of the "
                "predictions and of host_keys, or make texts or numbers of it."
            ) from error
        for size in reversed(x.shape[1:]):
            column = self._arrow.FixedSizeListArray.from_arrays(column, size)
        return column


def pyarrow_or_refuse() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet.

    Raises:
        ArgumentError: It is not installed.
    """
    try:
        import pyarrow  # type: ignore[import-not-found]
        import pyarrow.parquet  # type: ignore[import-not-found]

        return pyarrow, pyarrow.parquet
    except ImportError as error:
        raise ArgumentError(
            "PredictionWriter(format='parquet') needs pyarrow, which is not installed. Run `pip install "
            "jaxlit[parquet]`, or leave format out for .npy files."
        ) from error


FORMATS = {"npy": NpyFiles, "parquet": ParquetFile}


class Rows:
    """The predictions of one loader.

    Args:
        folder: Where they go; it is made.
        kind: A key of `FORMATS`.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._kind, self._files = folder, kind, FORMATS[kind](folder)
        self._leaves: list[dict[str, Any]] = []
        self._rows = 0

    def write(self, outputs: Any) -> None:
        """Add the predictions of a batch.

        Args:
            outputs: A pytree of numpy arrays with a row for each row of the batch.

        Raises:
            DataError: A leaf has no rows, other rows than the others, or another shape or dtype than in other batches.
        """
        leaves = [(path, _plain(x)) for path, x in jax.tree_util.tree_leaves_with_path(outputs)]
        names = _names([path for path, _ in leaves])
        counts = {name: len(x) if x.ndim else None for name, (_, x) in zip(names, leaves, strict=True)}
        if not leaves or len({*counts.values()}) > 1 or None in counts.values():
            raise DataError(
                f"PredictionWriter: predict_step must return arrays with one row for each row of the batch, got rows "
                f"{counts}. Leave out what has none."
            )
        found = [
            {"name": name, "path": _keys(path), "dtype": str(x.dtype), "shape": list(x.shape[1:])}
            for name, (path, x) in zip(names, leaves, strict=True)
        ]
        self._leaves = self._leaves or found
        if found != self._leaves:
            was, now = ({x["name"]: (x["dtype"], x["shape"]) for x in kinds} for kinds in (self._leaves, found))
            raise DataError(
                f"PredictionWriter: predictions must be of one dtype and shape in all batches, and were {was}, and are "
                f"{now}. Pad them in predict_step."
            )
        self._files.write({name: x for name, (_, x) in zip(names, leaves, strict=True)})
        self._rows += len(leaves[0][1])

    def give_up(self) -> None:
        """Let go of files that will be deleted."""
        self._files.give_up()

    def close(self) -> None:
        """End the files, and say what is in them."""
        self._files.close()
        index = {"format": MAGIC, "files": self._kind, "rows": self._rows, "leaves": self._leaves}
        with (self._folder / INDEX).open("w") as file:
            json.dump(index, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def holds_rows(folder: Path) -> bool:
    """Return whether `Rows` has written a folder."""
    try:
        return json.loads((folder / INDEX).read_text())["format"] == MAGIC
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_rows(folder: Path) -> Any:
    """Return what `Rows` has written: a pytree as it was, sequences as lists; None of a loader without rows.

    Args:
        folder: The folder; arrays of .npy files are mapped from it, not read.
    """
    index = json.loads((folder / INDEX).read_text())
    if not index["leaves"]:
        return None
    if index["files"] == "npy":
        arrays = [np.load(folder / f"{leaf['name']}.npy", mmap_mode="r") for leaf in index["leaves"]]
    else:
        table = pyarrow_or_refuse()[1].read_table(folder / f"{LONE}.parquet")
        arrays = [_of_column(table.column(leaf["name"]), leaf) for leaf in index["leaves"]]
    return _tree([(leaf["path"], x) for leaf, x in zip(index["leaves"], arrays, strict=True)])


def _tree(leaves: list[tuple[list[Any], Any]]) -> Any:
    """Return the tree of leaves with their paths, whose indices are ints and whose other keys are texts."""
    if leaves and not leaves[0][0]:
        return leaves[0][1]
    inside: dict[Any, list[Any]] = {}
    for (key, *rest), x in leaves:
        inside.setdefault(key, []).append((rest, x))
    found = {key: _tree(below) for key, below in inside.items()}
    return list(found.values()) if found and all(isinstance(key, int) for key in found) else found


def _of_column(column: Any, leaf: Mapping[str, Any]) -> np.ndarray:
    column = column.combine_chunks()
    for _ in leaf["shape"]:
        column = column.flatten()
    flat = (
        np.asarray(column.to_pylist(), object) if leaf["dtype"] == "object" else column.to_numpy(zero_copy_only=False)
    )
    return flat.reshape(-1, *leaf["shape"]).astype(leaf["dtype"])


def _keys(path: tuple[Any, ...]) -> list[Any]:
    """Return the keys of a path: ints for places in a sequence, texts for all others."""
    return [
        getattr(x, "idx", None) if hasattr(x, "idx") else str(getattr(x, "key", getattr(x, "name", x))) for x in path
    ]


def _plain(x: Any) -> np.ndarray:
    """Return an array of a dtype that files know, the same in all batches."""
    x = np.asarray(x)
    if x.dtype.kind in "US":  # whose width is that of the longest
        return x.astype(object)
    return x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == np.float16 else x


def _names(paths: list[tuple[Any, ...]]) -> list[str]:
    """Return the names of files or columns for leaves, as a user writes them where that is a name of a file."""
    found, taken = list[str](), set[str]()
    for path in paths:
        plain = re.sub(r"[^\w.-]+", "_", leaf_name(path)).strip("_.") or LONE
        tries = (plain, *(f"{plain}_{k}" for k in range(len(found), 2 * len(paths) + len(found))))
        name = next(name for name in tries if name.casefold() not in taken)  # some disks take "A" and "a" for one
        found.append(name)
        taken.add(name.casefold())
    return found


def _header(dtype: np.dtype, shape: Sequence[int]) -> bytes:
    """Return a header of a .npy file, of one length for any number of rows."""
    said = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)}
    text = repr(said).encode("latin1")
    start = b"\x93NUMPY\x01\x00" + (_HEADER - 10).to_bytes(2, "little")
    return start + text.ljust(_HEADER - 11) + b"\n"
