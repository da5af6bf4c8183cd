"""Compares the evaluation of random graphs with ONNX Runtime: random_graphs.py FOLDER

The folder is written by `STERLING_GRAPHS_FOLDER=FOLDER STERLING_RANDOM_GRAPHS=0:2000 cargo test -p sterling-snapshot --lib --
sandbox::graphs`. Needs numpy, onnx and onnxruntime. Exits with 1 if any result differs.
"""

import json
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime


def model(path, inputs):
    """Returns the model with declared inputs: Sterling reads input shapes from the package, so that the graph in the file declares no inputs."""
    model = onnx.load(path)
    declared = {port.name for port in model.graph.input}
    read = {name for node in model.graph.node for name in node.input}
    for name in inputs.keys() & read - declared:
        rank = inputs[name].ndim
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None] * rank))
    if not model.graph.output:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(model.graph.node[-1].output[0]))
    return model.SerializeToString()


def main():
    wrong = compared = refused = 0
    for path in sorted(pathlib.Path(sys.argv[1]).glob("*.onnx"), key=lambda path: int(path.stem)):
        case = json.loads(path.with_suffix(".json").read_text())
        inputs = {
            name: np.array([float(x) for x in values], np.float32).reshape(shape)
            for name, (shape, values) in case["inputs"].items()
        }
        expected = np.array([[float(x) for x in row] for row in case["rows"]])
        allowed = np.array([[float(x) for x in row] for row in case["tolerances"]])
        try:
            session = onnxruntime.InferenceSession(model(path, inputs), providers=["CPUExecutionProvider"])
            read = {port.name for port in session.get_inputs()}
            got = session.run(None, {name: array for name, array in inputs.items() if name in read})[0]
        except Exception as e:
            refused += 1
            print(f"{path.stem}: ONNX Runtime does not run it: {str(e)[:200]}")
            continue
        got = got.reshape(expected.shape).astype(np.float64)
        compared += 1
        single = expected.astype(np.float32).astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.isinf(allowed) | (got == single) | (np.isnan(got) & np.isnan(single)) | (abs(got - expected) <= allowed)
        if not near.all():
            wrong += 1
            row, place = np.argwhere(~near)[0]
            print(f"{path.stem}: row {row}, index {place}: got {got[row, place]} from ONNX Runtime, expected {expected[row, place]} as in the reference")
    print(f"{compared} graphs compared, {wrong} differ, {refused} not run")
    return 1 if wrong or not compared else 0


sys.exit(main())
