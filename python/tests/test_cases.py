"""Small towers of one function or module of PyTorch each, by both exporters: some of those that ``scripts/real_models.py --cases``
measures. Skipped without PyTorch."""

import subprocess

import pytest
import sterling

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
from real.cases import CASES  # noqa: E402

BY_NAME = {case.name: case for case in CASES}
# Cases that the tracing exporter cannot write or ONNX Runtime cannot run.
UNTRACED = {"torch.sinh", "torch.cosh", "torch.asinh", "torch.expm1", "torch.trunc", "torch.frac", "cumprod", "bilinear", "take_along_dim", "bfloat16"}
# Each takes seconds.
BY_DYNAMO = ["last by gather", "sdpa, mask of -inf", "MultiheadAttention with weights"]
COMPILED = ["F.gelu", "SwiGLU", "masked mean", "sdpa causal", "TransformerEncoder", "RMSNorm", "attention pooling", "einsum of two", "sdpa, grouped queries"]


def export(path, name, exporter):
    return sterling.export(path, program=False, exporter=exporter, **BY_NAME[name].build())


def test_names_are_unique():
    assert len(BY_NAME) == len(CASES) >= 150


@pytest.mark.filterwarnings("ignore:samples")
@pytest.mark.parametrize("name", sorted(BY_NAME.keys() - UNTRACED)[::4])
def test_a_traced_tower_computes_what_its_module_does(tmp_path, name):
    assert export(tmp_path / "case", name, "torchscript").largest < 1e-4


@pytest.mark.filterwarnings("ignore:samples")
@pytest.mark.parametrize("name", BY_DYNAMO)
def test_a_tower_of_dynamo_computes_what_its_module_does(tmp_path, name):
    assert export(tmp_path / "case", name, "dynamo").largest < 1e-4


@pytest.mark.filterwarnings("ignore:samples")
@pytest.mark.parametrize("name", COMPILED)
def test_common_towers_are_compiled(tmp_path, program, name):
    export(tmp_path / "case", name, "torchscript")
    said = subprocess.run([program, "inspect", tmp_path / "case"], capture_output=True, text=True)
    assert "graph user.onnx is compiled" in said.stdout, said.stdout + said.stderr
