"""The files of a PredictionWriter: rows are appended, and their number is known at the end only."""

import json
import os
import re
import sys
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
LOADER = "dataloader_idx_"  # the beginning of a folder's name
_LONE = "predictions"  # the name of outputs that are one array, and of the Parquet file


class Rows:
    """Writes the predictions of one loader to a folder that it makes.

    Args:
        folder: The folder.
        format: "npy", a file for each leaf, or "parquet", a column for each leaf: a list where a row is an array.
        at_once: Whether each batch is written when it is added; otherwise all are at the end, in one piece.
    """

    def __init__(self, folder: Path, format: str, *, at_once: bool) -> None:
        folder.mkdir(parents=True)
        self._folder, self._at_once, self._num_rows = folder, at_once, 0
        self._append = self._append_npy if format == "npy" else self._append_parquet
        self._batches: list[dict[str, np.ndarray]] = []  # that wait
        self._files: dict[str, tuple[Any, np.ndarray]] = {}  # .npy files, and the first rows of each
        self._writer: Any = None  # of the Parquet file
        self._index: dict[str, Any] = {"format": _FORMAT, "files": format, "tree": None, "leaves": {}}

    def add(self, outputs: Any) -> None:
        """Append the predictions of a batch, a pytree of dicts, lists and tuples of numpy arrays.

        Raises:
            DataError: The leaves differ in their rows, or from those of other batches in their shapes or dtypes.
        """
        rows = self._checked(outputs)
        if self._at_once:
            self._append(rows)
        else:
            self._batches.append(rows)

    def close(self) -> None:
        """Write what waits, complete the files, and write which leaves they hold."""
        if batches := self._batches:
            self._append({name: np.concatenate([rows[name] for rows in batches]) for name in batches[0]})
        for name, (file, _) in self._files.items():
            file.seek(0)
            self._write_header(name)
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._writer is not None:  # it writes the footer, without which a Parquet file cannot be read
            self._writer.close()
        (self._folder / _INDEX).write_text(json.dumps(self._index, indent=1))

    def _checked(self, outputs: Any) -> dict[str, np.ndarray]:
        """Return the rows of a batch by the names of the leaves."""
        rows: dict[str, np.ndarray] = {}
        leaves, structure = jax.tree_util.tree_flatten_with_path(outputs)
        for path, leaf in leaves:
            name = re.sub(r"[^\w.-]+", "_", leaf_name(path)).strip("_.") or _LONE
            while name.casefold() in map(str.casefold, rows):  # also on a disk that ignores case
                name = f"{name}_{len(rows)}"
            x = np.asarray(leaf)
            if x.dtype.kind in "US":  # its width is that of the longest text
                x = x.astype(object)
            rows[name] = x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == np.float16 else x
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
        return rows

    def _append_npy(self, rows: dict[str, np.ndarray]) -> None:
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
        self._num_rows += len(next(iter(rows.values())))

    def _write_header(self, name: str) -> None:
        file, x = self._files[name]
        header = {"descr": np.lib.format.dtype_to_descr(x.dtype), "fortran_order": False}
        # numpy pads a header so that it has one length for any number of rows.
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (self._num_rows, *x.shape[1:])})

    def _append_parquet(self, rows: dict[str, np.ndarray]) -> None:
        arrow, columns = import_pyarrow(), {}
        for name, x in rows.items():
            columns[name] = arrow.array(x.reshape(-1).tolist() if x.dtype.hasobject else x.reshape(-1))
            for size in reversed(x.shape[1:]):
                columns[name] = arrow.FixedSizeListArray.from_arrays(columns[name], size)
        table, path = arrow.table(columns), self._folder / f"{_LONE}.parquet"
        self._writer = self._writer or arrow.parquet.ParquetWriter(path, table.schema)
        self._writer.write_table(table)


def import_pyarrow() -> Any:
    """Return pyarrow with its module `parquet`, or raise an ArgumentError that says how to install it."""
    owner = "PredictionWriter(format='parquet')"
    check.import_package("pyarrow.parquet", owner=owner, install="pyarrow", kind=ArgumentError)
    return sys.modules["pyarrow"]


def folders_of(folder: Path) -> list[Path]:
    """Return the folders that `Rows` has written: a folder itself, or one in it for each loader, in their order."""
    places = folder, *sorted(folder.glob(f"{LOADER}*"), key=lambda path: (len(path.name), path.name))
    written = [path for path in places if (path / _INDEX).exists() and _FORMAT in (path / _INDEX).read_text()]
    return written[:1] if folder in written else written


def read_rows(folder: Path) -> Any:
    """Return the pytree that `Rows` has written, with sequences as lists; None for a loader without rows."""
    index = json.loads((folder / _INDEX).read_text())
    parquet = index["files"] == "parquet" and index["leaves"]
    table = import_pyarrow().parquet.read_table(folder / f"{_LONE}.parquet") if parquet else None

    def read(name: str) -> np.ndarray:
        if table is None:
            return np.load(folder / f"{name}.npy", mmap_mode="r")
        (dtype, shape), column = index["leaves"][name], table.column(name).combine_chunks()
        for _ in shape:
            column = column.flatten()
        return column.to_numpy(zero_copy_only=False).reshape(-1, *shape).astype(dtype)

    return jax.tree.map(read, index["tree"])
