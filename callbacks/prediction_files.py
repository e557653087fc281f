"""The files of a PredictionWriter: rows are appended, and their number is known at the end only."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.errors import ArgumentError, DataError
from jaxlit.leaf_names import leaf_name

_INDEX, _FORMAT = "index.json", "jaxlit predictions 1"
_LONE = "predictions"  # the name of outputs that are one array, and of the Parquet file


def import_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet.

    Raises:
        ArgumentError: It is not installed.
    """
    asked = {"owner": "PredictionWriter(format='parquet')", "install": "jaxlit[parquet]", "kind": ArgumentError}
    return check.import_package("pyarrow", **asked), check.import_package("pyarrow.parquet", **asked)


class Rows:
    """Writes the predictions of one loader: a .npy file for each leaf, or a Parquet file with a column for each.

    Args:
        folder: The folder of the files; it is made.
        format: "npy" or "parquet".
    """

    def __init__(self, folder: Path, format: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._format, self._rows = folder, format, 0
        self._leaves: list[dict[str, Any]] = []
        self._files: dict[str, Any] = {}  # the .npy files
        self._parquet: Any = None  # the writer of the Parquet file

    def write(self, outputs: Any) -> None:
        """Append the predictions of a batch.

        Args:
            outputs: A pytree of numpy arrays with a row for each row of the batch.

        Raises:
            DataError: The leaves differ in their rows, or from those of other batches in their shapes or dtypes.
        """
        paths, arrays = zip(*jax.tree_util.tree_leaves_with_path(jax.tree.map(_plain, outputs)), strict=True)
        named = dict(zip(_names(paths), arrays, strict=True))
        counts = {name: len(x) if x.ndim else None for name, x in named.items()}
        if len({*counts.values()}) != 1 or None in counts.values():
            raise DataError(
                f"PredictionWriter: predict_step must return arrays with one row for each row of the batch, got rows "
                f"{counts}. Leave out what has none."
            )
        leaves = [
            {"name": name, "path": _keys(path), "dtype": str(x.dtype), "shape": list(x.shape[1:])}
            for path, (name, x) in zip(paths, named.items(), strict=True)
        ]
        self._leaves = self._leaves or leaves
        if leaves != self._leaves:
            raise DataError(
                "PredictionWriter: predictions must be of one dtype and shape in all batches, and were "
                f"{_kinds(self._leaves)}, and are {_kinds(leaves)}. Pad them in predict_step."
            )
        (self._write_npy if self._format == "npy" else self._write_parquet)(named)
        self._rows += len(arrays[0])

    def close(self) -> None:
        """Complete the files, and write which leaves they hold."""
        for name, file in self._files.items():
            self._write_header(name)  # with the number of rows
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self._parquet is not None:
            self._parquet.close()
        index = {"format": _FORMAT, "files": self._format, "rows": self._rows, "leaves": self._leaves}
        (self._folder / _INDEX).write_text(json.dumps(index, indent=1))

    def _write_npy(self, rows: Mapping[str, np.ndarray]) -> None:
        for name, x in rows.items():
            if x.dtype.kind in "OUS":
                raise DataError(
                    f"PredictionWriter: {name!r} holds texts or objects, and .npy files hold numbers. Pass "
                    "format='parquet', or leave it out of the predictions and of host_keys."
                )
            if name not in self._files:
                self._files[name] = (self._folder / f"{name}.npy").open("wb")
                self._write_header(name)
            self._files[name].write(x.tobytes())  # not memoryview(x), which dates do not have

    def _write_header(self, name: str) -> None:
        leaf = next(leaf for leaf in self._leaves if leaf["name"] == name)
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(leaf["dtype"])), "fortran_order": False}
        self._files[name].seek(0)
        # numpy pads a header so that it has one length for any number of rows.
        np.lib.format.write_array_header_1_0(self._files[name], {**header, "shape": (self._rows, *leaf["shape"])})

    def _write_parquet(self, rows: Mapping[str, np.ndarray]) -> None:
        """Append rows as one row group; rows that are arrays are lists of a fixed size."""
        arrow, parquet = import_pyarrow()
        columns = dict[str, Any]()
        for name, x in rows.items():
            try:
                columns[name] = arrow.array(x.reshape(-1).tolist() if x.dtype.hasobject else x.reshape(-1))
                for size in reversed(x.shape[1:]):
                    columns[name] = arrow.FixedSizeListArray.from_arrays(columns[name], size)
            except (arrow.ArrowException, ValueError) as error:
                raise DataError(
                    f"PredictionWriter: Parquet cannot hold {name!r}, {x.dtype} of shape {list(x.shape)}: {error}. "
                    "Pass format='npy', or leave it out of the predictions and of host_keys."
                ) from error
        table = arrow.table(columns)
        if self._parquet is None:
            self._parquet = parquet.ParquetWriter(self._folder / f"{_LONE}.parquet", table.schema)
        self._parquet.write_table(table)


def holds_rows(folder: Path) -> bool:
    """Return whether `Rows` has written a folder."""
    try:
        return json.loads((folder / _INDEX).read_text())["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError):
        return False


def read_rows(folder: Path) -> Any:
    """Return the pytree that `Rows` has written, with sequences as lists; None for a loader without rows.

    Args:
        folder: The folder; arrays of .npy files are mapped, not read.
    """
    index = json.loads((folder / _INDEX).read_text())
    if not index["leaves"]:
        return None
    if index["files"] == "npy":
        arrays = [np.load(folder / f"{leaf['name']}.npy", mmap_mode="r") for leaf in index["leaves"]]
    else:
        table = import_pyarrow()[1].read_table(folder / f"{_LONE}.parquet")
        arrays = [_of_column(table.column(leaf["name"]), leaf) for leaf in index["leaves"]]
    return _tree([(leaf["path"], x) for leaf, x in zip(index["leaves"], arrays, strict=True)])


def _tree(leaves: list[tuple[list[Any], Any]]) -> Any:
    """Return the tree of leaves with their paths: ints are indices of a list, texts are keys of a dict."""
    if not leaves[0][0]:
        return leaves[0][1]
    branches: dict[Any, list[Any]] = {}
    for (key, *rest), x in leaves:
        branches.setdefault(key, []).append((rest, x))
    tree = {key: _tree(branch) for key, branch in branches.items()}
    return list(tree.values()) if all(isinstance(key, int) for key in tree) else tree


def _of_column(column: Any, leaf: Mapping[str, Any]) -> np.ndarray:
    column = column.combine_chunks()
    for _ in leaf["shape"]:
        column = column.flatten()
    texts = leaf["dtype"] == "object"
    flat = np.asarray(column.to_pylist(), object) if texts else column.to_numpy(zero_copy_only=False)
    return flat.reshape(-1, *leaf["shape"]).astype(leaf["dtype"])


def _keys(path: tuple[Any, ...]) -> list[Any]:
    return [x.idx if hasattr(x, "idx") else str(getattr(x, "key", getattr(x, "name", x))) for x in path]


def _plain(x: Any) -> np.ndarray:
    """Return an array of a dtype that files can hold, the same in all batches."""
    x = np.asarray(x)
    if x.dtype.kind in "US":  # its width is that of the longest text
        return x.astype(object)
    return x.astype(np.float32) if x.dtype.kind == "V" or x.dtype == np.float16 else x


def _kinds(leaves: list[dict[str, Any]]) -> dict[str, tuple[str, list[int]]]:
    return {leaf["name"]: (leaf["dtype"], leaf["shape"]) for leaf in leaves}


def _names(paths: Sequence[Any]) -> list[str]:
    """Return a file's or column's name for each leaf, unique on a disk that ignores case."""
    names = [re.sub(r"[^\w.-]+", "_", leaf_name(path)).strip("_.") or _LONE for path in paths]
    folded = [name.casefold() for name in names]
    return [name if folded.count(name.casefold()) == 1 else f"{name}~{i}" for i, name in enumerate(names)]
