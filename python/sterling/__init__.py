"""From PyTorch to Sterling and back.

`export` writes trained modules as a model package, `train`, `publish` and `serve` run the ``sterling`` program with it,
`load_snapshot` opens a published version as NumPy arrays, and `Client` sends requests to a server. Only `export` needs PyTorch.
"""

from .answers import Ranked, Upserted
from .client import Client
from .errors import ConnectionFailed, ExportError, ProgramError, RequestError, SnapshotError, SterlingError
from .exporting import Exported, export
from .features import Category, Column, Dense, Feature, Ids, ItemVector, Query, Text
from .learning import Trained, load_trained, write_optimizer
from .program import Published, Server, find_program, publish, serve, train
from .snapshot import Index, ItemColumn, Snapshot, load_snapshot
from .tables import Table

__all__ = [
    "Category",
    "Client",
    "Column",
    "ConnectionFailed",
    "Dense",
    "ExportError",
    "Exported",
    "Feature",
    "Ids",
    "Index",
    "ItemColumn",
    "ItemVector",
    "ProgramError",
    "Published",
    "Query",
    "Ranked",
    "RequestError",
    "Server",
    "Snapshot",
    "SnapshotError",
    "SterlingError",
    "Table",
    "Trained",
    "Text",
    "Upserted",
    "export",
    "find_program",
    "load_snapshot",
    "load_trained",
    "publish",
    "serve",
    "train",
    "write_optimizer",
]
