"""The server matches `/openapi.json`: the document is valid, and schemathesis sends bodies that it generates from it."""

import json
import pathlib

import pytest
import sterling

schemathesis = pytest.importorskip("schemathesis")
hypothesis = pytest.importorskip("hypothesis")

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENT = json.loads((ROOT / "tests/golden/openapi.json").read_text())


def test_the_document_is_valid():
    validator = pytest.importorskip("openapi_spec_validator")
    validator.validate(DOCUMENT)


CHECKS = [
    schemathesis.checks.content_type_conformance,
    schemathesis.checks.response_headers_conformance,
    schemathesis.checks.response_schema_conformance,
    schemathesis.checks.status_code_conformance,
]
# Existing names: with others every call returns 404, which tests nothing.
NAMES = {"model": "tiny", "version": 1, "label": "kept", "column": "section", "id": 1}


@pytest.fixture(scope="module")
def document(store, program, tmp_path_factory):
    settings = {"STERLING_UPDATES": str(tmp_path_factory.mktemp("updates")), "STERLING_RECORDED_QUERIES": "100"}
    with sterling.serve(store, program=program, settings=settings) as server:
        with sterling.Client(server.url) as client:
            client.set_traffic("tiny", shadow={"version": 1, "share": 1})
        yield schemathesis.openapi.from_url(server.url + "/openapi.json")


# Routers use a binary protocol, and a merge publishes, which is slow.
LEFT_OUT = {"GET /v1/parts", "POST /v1/models/{model}/versions/{version}:pass", "POST /v1/models/{model}:rows", "POST /v1/models/{model}/items:merge"}
SETTINGS = hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck))


def test_calls_answer_as_the_document_says(document):
    asked, failures = set(), []
    for operation in (found.ok() for found in document.get_all_operations()):
        if operation.label in LEFT_OUT:
            continue

        @SETTINGS
        @hypothesis.given(case=operation.as_strategy())
        def check(case):
            case.path_parameters = {name: NAMES.get(name, value) for name, value in (case.path_parameters or {}).items()}
            response = case.call()
            asked.add((case.operation.label, response.status_code))
            assert response.status_code != 500, response.text
            case.validate_response(response, checks=CHECKS)

        try:
            check()
        except (AssertionError, schemathesis.errors.FailureGroup) as failure:
            failures.append((operation.label, *getattr(failure, "exceptions", (failure,))))
    assert not failures
    # Every operation must also succeed at least once: rejections alone test little.
    calls, answered = {label for label, _ in asked}, {label for label, status in asked if status == 200}
    assert len(calls) > 45 and len(answered) > 25, sorted(asked)
