"""The server implements the Open Inference Protocol, tested with raw requests and with clients that were written for other
servers.

KServe publishes no conformance suite, but the protocol's OpenAPI document: `tests/golden/open_inference_rest.yaml` has its paths,
fields and types, from <https://github.com/kserve/open-inference-protocol> (Apache License 2.0, The KServe Authors). Its schemas
validate requests and answers, and every one of its operations is called.
"""

import json

import httpx
import pytest
from conftest import ROOT

jsonschema = pytest.importorskip("jsonschema")
yaml = pytest.importorskip("yaml")

INFER = "/v2/models/tiny/infer"


@pytest.fixture(scope="module")
def document():
    return yaml.safe_load((ROOT / "tests/golden/open_inference_rest.yaml").read_text())


@pytest.fixture(scope="module")
def conforms(document):
    """Validates a body with one of the document's schemas."""

    def check(name, body):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        jsonschema.validate(body, schema, cls=jsonschema.Draft202012Validator)
        return body

    return check


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url) as client:
        yield client


def tensor(name, shape, datatype, data):
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


def asks(*inputs, **more):
    return {"inputs": [*inputs], **more}


USERS = [
    tensor("installed", [2, 2], "INT64", [1, 5, 3, 4]),
    tensor("section", [2, 1], "BYTES", ["games", "admin"]),
    tensor("size", [2, 3], "FP32", [0.5, 1, -2, 0, 0, 1]),
]


@pytest.fixture(scope="module")
def infer(http, conforms):
    """Sends a valid request of the document; the answer must match its schema."""

    def send(body, path=INFER, **headers):
        response = http.post(path, json=conforms("inference_request", body), headers=headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/json"
        answer = conforms("inference_response", response.json())
        assert answer["model_name"] == "tiny" and answer["model_version"] == "1"
        assert answer.get("id") == body.get("id")
        for output in answer["outputs"]:
            count = 1
            for size in output["shape"]:
                count *= size
            assert len(output["data"]) == count, output
        if "outputs" in body:
            assert [output["name"] for output in answer["outputs"]] == [output["name"] for output in body["outputs"]]
        return {output["name"]: output for output in answer["outputs"]}

    return send


@pytest.fixture(scope="module")
def refused(http, conforms):
    """Sends a request that must be rejected, and returns the error."""

    def send(status, method, path, **more):
        response = http.request(method, path, **more)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        body = conforms("inference_error_response", response.json())
        assert list(body) == ["error"] and body["error"], body
        return body["error"]

    return send


def test_every_operation_of_the_document_is_answered_as_it_says(document, http, conforms):
    asked = 0
    for path, operations in document["paths"].items():
        named = path.replace("${MODEL_NAME}", "tiny").replace("${MODEL_VERSION}", "1")
        # In the text of the protocol the version is optional; its document has only the longer path.
        for each in {named, named.replace("/versions/1", "")}:
            for method, operation in operations.items():
                if method == "parameters":
                    continue
                body = conforms("inference_request", asks(*USERS)) if "requestBody" in operation else None
                response = http.request(method, each, json=body)
                assert response.status_code == 200, (each, response.text)
                asked += 1
                for kind, told in operation["responses"]["200"].get("content", {}).items():
                    assert response.headers["content-type"] == kind
                    conforms(told["schema"]["$ref"].rsplit("/", 1)[1], response.json())
    assert asked == 9, "six operations, three of them with and without a version"


def test_probes_say_what_the_text_says(http):
    """The document has no schemas of them. The text has `live` in both of the server's; KServe's own server and client have
    `ready` in the second."""
    assert http.get("/v2/health/live").json() == {"live": True}
    assert http.get("/v2/health/ready").json() == {"live": True, "ready": True}
    for path in ("/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"):
        assert http.get(path).json() == {"name": "tiny", "ready": True}


def test_the_server_and_the_model_are_told(http, conforms):
    told = conforms("metadata_server_response", http.get("/v2").json())
    assert told == http.get("/v2/").json() and told["name"] == "sterling"
    model = conforms("metadata_model_response", http.get("/v2/models/tiny").json())
    assert model["versions"] == ["1"]
    known = {"BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"}
    assert {entry["datatype"] for entry in model["inputs"] + model["outputs"]} <= known


def test_what_is_told_of_a_model_is_what_it_takes_and_gives(http, infer):
    model = http.get("/v2/models/tiny").json()
    values = {"INT64": 1, "BYTES": "games", "FP32": 0.5}
    inputs = []
    for entry in model["inputs"]:
        shape = [2 if size == -1 else size for size in entry["shape"]]
        inputs.append(tensor(entry["name"], shape, entry["datatype"], [values[entry["datatype"]]] * (shape[0] * shape[1])))
    given = infer(asks(*inputs, outputs=[{"name": entry["name"]} for entry in model["outputs"]]))
    for entry in model["outputs"]:
        output = given[entry["name"]]
        assert output["datatype"] == entry["datatype"] and len(output["shape"]) == len(entry["shape"])


def test_a_request_has_an_id_parameters_outputs_and_a_version(infer):
    whole = infer(asks(*USERS, id="42", parameters={"k": 3, "exact": True}))
    assert whole["ids"]["shape"] == [2, 3]
    two = infer(asks(*USERS, parameters={"k": 3, "exact": True}, outputs=[{"name": "scores"}, {"name": "ids", "parameters": {}}]))
    pinned = infer(asks(*USERS, parameters={"k": 3, "exact": True}, outputs=[{"name": "ids"}]), path="/v2/models/tiny/versions/1/infer")
    assert two["ids"] == whole["ids"] == pinned["ids"] and two["scores"] == whole["scores"]


def test_values_nest_or_not_and_come_in_every_datatype_of_their_kind(infer):
    wanted = infer(asks(*USERS))
    for datatype in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"):
        assert infer(asks(tensor("installed", [2, 2], datatype, [[1, 5], [3, 4]]), *USERS[1:])) == wanted, datatype
    for datatype in ("FP32", "FP64"):
        assert infer(asks(*USERS[:2], tensor("size", [2, 3], datatype, [[0.5, 1, -2], [0, 0, 1]]))) == wanted, datatype


def test_a_body_that_kserves_client_makes_is_read(http, infer, conforms):
    """It repeats the model's name, and has no content type."""
    body = asks(*USERS, id="5b0d3c24-6f6c-4a83-a9a5-0c4f6f2c8d1e", model_name="tiny")
    response = http.post(INFER, content=json.dumps(conforms("inference_request", body)))
    assert response.status_code == 200, response.text
    ids = next(output for output in response.json()["outputs"] if output["name"] == "ids")
    assert ids == infer(asks(*USERS))["ids"]


def test_what_is_wrong_is_an_error_with_its_reason(refused):
    def of(*inputs, **more):
        return {"json": asks(*inputs, **more)}

    for method, path in [
        ("GET", "/v2/models/none"),
        ("GET", "/v2/models/none/versions/1"),
        ("GET", "/v2/models/none/ready"),
        ("GET", "/v2/models/tiny/versions/9"),
        ("GET", "/v2/models/tiny/versions/9/ready"),
        ("POST", "/v2/models/none/infer"),
        ("POST", "/v2/models/tiny/versions/9/infer"),
    ]:
        more = of(*USERS) if method == "POST" else {}
        assert ("9" if "9" in path else "none") in refused(404, method, path, **more), path
    refused(405, "GET", INFER)
    refused(415, "POST", INFER, content="x", headers={"content-type": "text/csv"})
    for said, more in {
        "JSON": {"content": "["},
        "inputs": {"json": {}},
        "expected 4": of(tensor("installed", [2, 2], "INT64", [1, 2, 3])),
        "3 rows": of(USERS[0], tensor("section", [3, 1], "BYTES", ["a", "b", "c"])),
        "`size`": of(tensor("size", [1, 2], "FP32", [1, 2])),
        "`colour`": of(tensor("colour", [1, 1], "INT64", [1])),
        "boolean": of(tensor("installed", [1, 1], "BOOL", [True])),
        "binary_data_size": of(tensor("size", [1, 3], "FP16", [1, 2, 3])),
        "`nothing`": of(*USERS, outputs=[{"name": "nothing"}]),
        "expected `tiny`": of(*USERS, model_name="other"),
        "`kk`": of(*USERS, parameters={"kk": 3}),
    }.items():
        assert said in refused(400, "POST", INFER, **more), said


def test_tritons_client_probes_and_calls(server, infer):
    np = pytest.importorskip("numpy")
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("tiny") and client.is_model_ready("tiny", "1") and not client.is_model_ready("tiny", "9")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    assert client.get_model_metadata("tiny")["versions"] == ["1"]
    wanted = infer(asks(*USERS, parameters={"k": 3}, outputs=[{"name": name} for name in ("ids", "scores", "columns.title")]))

    def given(binary, dtypes):
        inputs = []
        for user, dtype in zip(USERS, dtypes, strict=True):
            values = np.array(user["data"], dtype=dtype).reshape(user["shape"])
            inputs.append(triton.InferInput(user["name"], user["shape"], "FP16" if dtype is np.float16 else user["datatype"]))
            inputs[-1].set_data_from_numpy(values, binary_data=binary)
        return inputs

    for binary in (False, True):
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in wanted]
        for more in ({}, {"model_version": "1"}, {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}):
            answer = client.infer("tiny", given(binary, (np.int64, np.object_, np.float32)), outputs=outputs, request_id="42", parameters={"k": 3}, **more)
            assert answer.get_response()["id"] == "42"
            for name, output in wanted.items():
                values = answer.as_numpy(name)
                assert list(values.shape) == output["shape"]
                texts = values.dtype == np.object_
                flat = [value.decode() if isinstance(value, bytes) else value for value in values.ravel()] if texts else values.ravel().tolist()
                assert flat == (output["data"] if texts else np.array(output["data"], dtype=values.dtype).tolist()), name
    # Without outputs, the client requests all of them as bytes. Half-precision numbers, which have no form in JSON, hold these
    # values exactly.
    answer = client.infer("tiny", given(True, (np.int64, np.object_, np.float16)), parameters={"k": 3})
    assert answer.as_numpy("ids").tolist() == np.reshape(wanted["ids"]["data"], wanted["ids"]["shape"]).tolist()
    with pytest.raises(triton.InferenceServerException, match="none"):
        client.infer("none", given(True, (np.int64, np.object_, np.float32)))
