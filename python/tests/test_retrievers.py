"""The retrievers of LangChain and Haystack, with the real libraries and a real server."""

import numpy as np
import pytest
import sterling

pytest.importorskip("httpx")
VECTOR = [0.5, -0.25, 1.0, 0.125]


@pytest.fixture(scope="module")
def wanted(server):
    with sterling.Client(server.url) as client:
        return client.retrieve("tiny", vector=VECTOR, k=3, filter="popularity < 6", columns=["title", "section"])


def test_langchain(server, wanted):
    pytest.importorskip("langchain_core")
    from langchain_core.runnables import RunnableLambda
    from sterling.langchain import SterlingRetriever

    with sterling.Client(server.url) as client:
        retriever = SterlingRetriever(
            client=client, model="tiny", encode=lambda query: VECTOR, content="title", columns=["section"], k=3, fields={"filter": "popularity < 6"}
        )
        documents = (RunnableLambda(str.strip) | retriever).invoke(" anything ")
        assert [document.page_content for document in documents] == wanted.columns["title"]
        assert [document.metadata["id"] for document in documents] == wanted.ids.tolist()
        assert np.allclose([document.metadata["score"] for document in documents], wanted.scores)
        assert [document.metadata["section"] for document in documents] == wanted.columns["section"]
        by_features = retriever.model_copy(update={"encode": lambda query: {"installed": [int(query)]}})
        assert len(by_features.invoke("3")) == 3


def test_haystack(server, wanted):
    haystack = pytest.importorskip("haystack")
    from sterling.haystack import SterlingRetriever

    retriever = SterlingRetriever(server.url, "tiny", "title", columns=["section"], top_k=3, fields={"filter": "popularity < 6"})
    for one in (retriever, SterlingRetriever.from_dict(retriever.to_dict())):
        pipeline = haystack.Pipeline()
        pipeline.add_component("retriever", one)
        documents = pipeline.run({"retriever": {"query_embedding": VECTOR}})["retriever"]["documents"]
        assert [document.content for document in documents] == wanted.columns["title"]
        assert [document.id for document in documents] == [str(id) for id in wanted.ids]
        assert [document.meta["section"] for document in documents] == wanted.columns["section"]
    found = retriever.run(VECTOR, top_k=1, filter="section:nothing")
    assert found == {"documents": []}
