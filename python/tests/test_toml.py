"""Written TOML is parsed back unchanged."""

import tomllib

import pytest
from sterling import ExportError
from sterling.toml import written


def test_every_kind_of_value_comes_back():
    tree = {
        "name": 'a "quoted" name\n\twith\\ controls \x00\x1f\x7f and ünï😀',
        "dimension": 64,
        "share": 1e-7,
        "large": 1e20,
        "yes": True,
        "list": [1, 2],
        "tables": [{"name": "a b", "deep": [{"x": 1}, {"x": 2}]}, {"name": "c"}],
        "user": {"tower": "user.onnx", "features": [{"name": "f"}]},
        "value": {"constants": {"w": 0.5, "needs quotes": 1.0}},
        "quoted key": {"a.b": "c"},
    }
    assert tomllib.loads(written(tree)) == tree


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, object(), b"x", {"a": None}, [float("inf")]])
def test_what_toml_cannot_say_is_refused(value):
    with pytest.raises(ExportError, match="constants|`a`"):
        written({"constants": value})
