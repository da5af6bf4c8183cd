"""A LangChain retriever that queries a server. Needs httpx and langchain-core."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from .client import Client


class SterlingRetriever(BaseRetriever):
    """Returns the best items for a query as documents: ``content`` is the text column; id, scores and the other ``columns`` are
    the metadata.

    ``encode`` turns a query into a vector (an array or a list of numbers, such as ``Embeddings.embed_query`` of LangChain
    returns) or into features of the user by name. ``fields`` are fields of a retrieval (``docs/reference/http.md``): ``filter``,
    ``candidates``, ``constants`` and others.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: Client
    model: str
    encode: Callable[[str], np.ndarray | list[float] | Mapping[str, Any]]
    content: str
    columns: list[str] = Field(default_factory=list)
    k: int = 4
    fields: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        encoded = self.encode(query)
        user = {"features": encoded} if isinstance(encoded, Mapping) else {"vector": encoded}
        found = self.client.retrieve(self.model, **user, k=self.k, columns=[self.content, *self.columns], **self.fields)
        document = lambda n: Document(  # noqa: E731
            id=str(found.ids[n]),
            page_content=found.columns[self.content][n] or "",
            metadata={"id": int(found.ids[n]), "score": float(found.scores[n]), "similarity": float(found.similarities[n])}
            | {column: found.columns[column][n] for column in self.columns},
        )
        return [document(n) for n in range(len(found))]
