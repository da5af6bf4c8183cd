"""Features, columns and queries in model.toml, and invalid ones."""

import numpy as np
import pytest
from sterling import Category, Column, Dense, ExportError, Ids, ItemVector, Query
from sterling.exporting import item_line
from sterling.features import listed


def test_declarations_hold_what_is_needed_alone():
    assert Category("section", "sections", "mean", max_ids=8).declared() == {
        "name": "section", "kind": "category", "table": "sections", "pooling": "mean", "max_ids": 8,
    }  # fmt: skip
    sequence = Ids("past", "items", "none", length=50, keep="first", column="history")
    assert sequence.declared() == {
        "name": "past", "kind": "ids", "table": "items", "pooling": "none", "length": 50, "keep": "first", "column": "history",
    }  # fmt: skip
    assert Dense("age").declared() == {"name": "age", "kind": "dense", "width": 1}
    assert Column("title", filter=False).declared() == {"name": "title", "filter": False}
    assert Query("like", candidates=200, weight=1.5).declared() == {"name": "like", "candidates": 200, "weight": 1.5}


@pytest.mark.parametrize(
    ("feature", "said"),
    [
        (Ids("a", "t", "max"), "pooling `max`, expected one of: sum, mean, none"),
        (Ids("a", "t", "none"), "length None, expected a length with `none` alone"),
        (Ids("a", "t", "sum", length=3), "length 3"),
        (Ids("a", "t", "none", length=3, keep="middle"), "keep `middle`"),
        (ItemVector("v", 8, format="int4"), "format `int4`"),
    ],
)
def test_wrong_ones_are_refused_with_their_name(feature, said):
    with pytest.raises(ExportError, match=said):
        feature.declared()


def test_values_of_a_row_come_as_a_list():
    ids = Ids("past", "items", column="history")
    for given in ([3, 4], (3, 4), np.array([3, 4]), {"values": [3, 4], "weights": [1.0, 0.5]}):
        assert listed(ids, {"history": given}) == [3, 4]
    assert listed(ids, {"past": [3]}) == []
    assert listed(ids, {"history": 3}) == [3]


def test_items_without_id_or_with_what_json_lacks_are_refused():
    with pytest.raises(ExportError, match="no `id`"):
        item_line({"brand": "acme"})
    with pytest.raises(ExportError, match="item 1: holds a number that is not finite"):
        item_line({"id": 1, "embedding": [float("nan"), 1.0]})
    with pytest.raises(ExportError, match="item 1: holds a number that is not finite"):
        item_line({"id": 1, "price": float("inf")})
    # The missing values of data frames become no value.
    assert item_line({"id": 1, "price": float("nan"), "tags": ("a",), "brand": None}) == '{"id":1,"attributes":{"tags":["a"]}}'
    with pytest.raises(ExportError, match="item 1: holds a number that is not finite"):
        item_line({"id": 1, "picture": [0.5, float("nan")]})
    assert item_line({"id": np.int64(1), "v": np.array([0.5])}) == '{"id":1,"attributes":{"v":[0.5]}}'
