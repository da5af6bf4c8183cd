"""A Haystack retriever that queries a server. Needs httpx and haystack-ai."""

from __future__ import annotations

from typing import Any

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.utils import Secret, deserialize_secrets_inplace

from .client import Client


@component
class SterlingRetriever:
    """Returns the best items for the embedding of a query as documents: ``content`` is the text column, the other ``columns`` are
    the ``meta``.

    ``fields`` are fields of a retrieval (``docs/reference/http.md``): ``filter``, ``candidates``, ``constants`` and others.
    """

    def __init__(
        self,
        url: str,
        model: str,
        content: str,
        columns: list[str] | None = None,
        top_k: int = 10,
        fields: dict[str, Any] | None = None,
        api_key: Secret | None = None,
    ):
        self.url, self.model, self.content, self.columns = url, model, content, columns or []
        self.top_k, self.fields, self.api_key = top_k, fields or {}, api_key
        self._client: Client | None = None

    def to_dict(self) -> dict[str, Any]:
        """Serializes the component for a stored pipeline; the result contains the reference to a key, never the key itself."""
        key = self.api_key.to_dict() if self.api_key else None
        named = {name: getattr(self, name) for name in ("url", "model", "content", "columns", "top_k", "fields")}
        return default_to_dict(self, **named, api_key=key)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SterlingRetriever:
        """Creates the component of a stored pipeline."""
        deserialize_secrets_inplace(data["init_parameters"], keys=["api_key"])
        return default_from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(self, query_embedding: list[float], top_k: int | None = None, filter: str | None = None) -> dict[str, list[Document]]:
        """Returns the documents, best first; ``filter`` takes precedence over the filter in ``fields``."""
        if self._client is None:
            self._client = Client(self.url, api_key=self.api_key.resolve_value() if self.api_key else None)
        fields = self.fields | ({} if filter is None else {"filter": filter})
        columns = [self.content, *self.columns]
        found = self._client.retrieve(self.model, vector=query_embedding, k=top_k or self.top_k, columns=columns, **fields)
        document = lambda n: Document(  # noqa: E731
            id=str(found.ids[n]),
            content=found.columns[self.content][n] or "",
            score=float(found.scores[n]),
            meta={column: found.columns[column][n] for column in self.columns},
        )
        return {"documents": [document(n) for n in range(len(found))]}
