"""Arrow streams as bodies of requests. Needs pyarrow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def is_there() -> bool:
    """Returns whether pyarrow can be imported."""
    try:
        import pyarrow.ipc  # noqa: F401
    except ImportError:
        return False
    return True


def stream(columns: Mapping[str, Any], shared: Mapping[str, Any] | None = None) -> bytes:
    """Encodes columns of equal length with the fields that all rows share: rows of a matrix become lists, NaN becomes null."""
    import pyarrow
    from pyarrow import ipc

    table = pyarrow.table({name: _array(values) for name, values in columns.items()})
    if shared:
        table = table.replace_schema_metadata({"sterling": json.dumps(shared, allow_nan=False)})
    sink = pyarrow.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def _array(values: Any) -> Any:
    import pyarrow

    if isinstance(values, np.ndarray) and values.ndim == 2:
        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.ascontiguousarray(values).ravel()), values.shape[1])
    array = pyarrow.array(values, from_pandas=True)
    if pyarrow.types.is_list(array.type) and pyarrow.types.is_null(array.type.value_type):
        # All lists are empty, so any element type is right.
        array = array.cast(pyarrow.list_(pyarrow.int64()))
    # The server accepts plain values, no dictionary-encoded columns.
    return array.dictionary_decode() if pyarrow.types.is_dictionary(array.type) else array
