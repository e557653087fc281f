"""The files of a PredictionWriter: rows are appended, and their number is known at the end only."""

import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.errors import ArgumentError, DataError
from jaxlit.leaf_names import leaf_name
from jaxlit.shown import shown
from jaxlit.to_json import to_json

_INDEX, _FORMAT = "index.json", "jaxlit predictions 2"
_LONE = "predictions"  # the name of outputs that are one array, and of the Parquet file


class NpyFiles:
    """A .npy file for each leaf."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._rows = folder, 0
        self._files: dict[str, tuple[Any, np.ndarray]] = {}  # and the first rows of the leaf

    def write(self, rows: dict[str, np.ndarray]) -> None:
        """Append rows, by the name of the leaf."""
        for name, x in rows.items():
            if name not in self._files:
                if x.dtype.hasobject:
                    raise DataError(
                        f"PredictionWriter: {name!r} holds texts or objects, and .npy files hold numbers. Pass "
                        "format='parquet', or leave it out of the predictions and of host_keys."
                    )
                self._files[name] = (self._folder / f"{name}.npy").open("wb"), x
                self._write_header(name)
            self._files[name][0].write(x.tobytes())  # not memoryview(x), which dates do not have
        self._rows += len(next(iter(rows.values())))

    def close(self) -> None:
        """Write the number of rows into the headers, and close the files."""
        for name, (file, _) in self._files.items():
            file.seek(0)
            self._write_header(name)
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def _write_header(self, name: str) -> None:
        file, x = self._files[name]
        header = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False}
        # numpy pads a header so that it has one length for any number of rows.
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (self._rows, *x.shape[1:])})


class ParquetFile:
    """One Parquet file with a column for each leaf; rows that are arrays are lists of a fixed size."""

    def __init__(self, folder: Path) -> None:
        self._path, self._writer = folder / f"{_LONE}.parquet", None
        self._arrow, self._parquet = import_pyarrow()

    def write(self, rows: dict[str, np.ndarray]) -> None:
        """Append rows, as one row group."""
        columns = {}
        for name, x in rows.items():
            columns[name] = self._arrow.array(x.reshape(-1).tolist() if x.dtype.hasobject else x.reshape(-1))
            for size in reversed(x.shape[1:]):
                columns[name] = self._arrow.FixedSizeListArray.from_arrays(columns[name], size)
        table = self._arrow.table(columns)
        self._writer = self._writer or self._parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the footer, without which a Parquet file cannot be read."""
        if self._writer is not None:
            self._writer.close()


def import_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet, or raise an ArgumentError that says how to install it."""
    asked = {"owner": "PredictionWriter(format='parquet')", "install": "jaxlit[parquet]", "kind": ArgumentError}
    return check.import_package("pyarrow", **asked), check.import_package("pyarrow.parquet", **asked)


FORMATS = {"npy": NpyFiles, "parquet": ParquetFile}


class Rows:
    """Writes the predictions of one loader to a folder that it makes, in a format of `FORMATS`."""

    def __init__(self, folder: Path, format: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._files = folder, FORMATS[format](folder)
        self._batches: list[Any] = []  # that `flush` writes in one piece
        self._index: dict[str, Any] = {"format": _FORMAT, "files": format, "tree": None, "leaves": {}}

    def add(self, outputs: Any, *, now: bool) -> None:
        """Append the predictions of a batch, now or at the next `flush`.

        Args:
            outputs: A pytree of dicts, lists and tuples, of numpy arrays with a row for each row of the batch.
            now: Whether to write them now.

        Raises:
            DataError: The leaves differ in their rows, or from those of other batches in their shapes or dtypes.
        """
        self._batches.append(outputs)
        if now:
            self.flush()

    def flush(self) -> None:
        """Write the batches that wait."""
        batches, self._batches = self._batches, []
        if batches:
            self._write(jax.tree.map(lambda *x: np.concatenate(x), *batches) if len(batches) > 1 else batches[0])

    def _write(self, outputs: Any) -> None:
        rows: dict[str, np.ndarray] = {}
        leaves, structure = jax.tree_util.tree_flatten_with_path(outputs)
        for path, leaf in leaves:
            name = re.sub(r"[^\w.-]+", "_", leaf_name(path)).strip("_.") or _LONE
            while name.casefold() in map(str.casefold, rows):  # also on a disk that ignores case
                name = f"{name}_{len(rows)}"
            rows[name] = _plain(leaf)
        counts = {x.shape[:1] for x in rows.values()}
        kinds = {name: [str(x.dtype), list(x.shape[1:])] for name, x in rows.items()}
        known = self._index["leaves"] or kinds
        if len(counts) != 1 or () in counts or kinds != known:
            raise DataError(
                f"PredictionWriter: predict_step must return arrays with one row for each row of the batch, of one "
                f"dtype and shape in all batches, got {shown(rows)} where rows were {known}. Pad them in predict_step, "
                "and leave out what has no rows."
            )
        self._index |= {"leaves": kinds, "tree": to_json(jax.tree.unflatten(structure, list(rows)))}
        self._files.write(rows)

    def close(self) -> None:
        """Close the files, and write which leaves they hold."""
        self.flush()
        self._files.close()
        (self._folder / _INDEX).write_text(json.dumps(self._index, indent=1))


def holds_rows(folder: Path) -> bool:
    """Return whether `Rows` has written a folder."""
    file = folder / _INDEX
    return file.exists() and _FORMAT in file.read_text()


def read_rows(folder: Path) -> Any:
    """Return the pytree that `Rows` has written, with sequences as lists; None for a loader without rows."""
    index = json.loads((folder / _INDEX).read_text())
    parquet = index["files"] == "parquet" and index["leaves"]
    table = import_pyarrow()[1].read_table(folder / f"{_LONE}.parquet") if parquet else None

    def read(name: str) -> np.ndarray:
        if table is None:
            return np.load(folder / f"{name}.npy", mmap_mode="r")
        (dtype, shape), column = index["leaves"][name], table.column(name).combine_chunks()
        for _ in shape:
            column = column.flatten()
        return column.to_numpy(zero_copy_only=False).reshape(-1, *shape).astype(dtype)

    return jax.tree.map(read, index["tree"])


def _plain(x: Any) -> np.ndarray:
    """Return an array of a dtype that files can hold, the same in all batches."""
    x = np.asarray(x)
    if x.dtype.kind in "US":  # its width is that of the longest text
        return x.astype(object)
    return x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == np.float16 else x
