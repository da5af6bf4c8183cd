"""Makes tests/golden/items/: one small catalogue as pandas, Polars, DuckDB and PyArrow write it.

    pip install pyarrow pandas polars duckdb && python3 python/make_items_golden.py

Made with pyarrow 26.0.1, pandas 3.1.1, polars 2.1.0 and duckdb 2.0.0. Spark's own types (INT96 timestamps, decimals of 38 digits)
and its folders of parts are written through PyArrow. All files have the content of expected.json.
"""
import gzip, json, pathlib, shutil
from datetime import datetime, timezone
from decimal import Decimal

import duckdb
import pandas
import polars
import pyarrow
import pyarrow.parquet

HERE = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden" / "items"
COUNT = 7

ITEMS = [
    {
        "id": n * 11 - 20,
        "embedding": [n / 8.0, 1.0 - n / 4.0, -0.5],
        "lang": ["en", "fr", "pt-br"][: n % 4],
        "year": None if n == 3 else 1990 + n,
        "owner": 2**53 + n,
        "price": None if n == 5 else [9.334749517884099, 0.1, 1e-9][n % 3] * (n + 1),
        "cost": f"{n}.25",
        "late": n % 2 == 0,
        "section": "utils" if n < 4 else "python",
        "seen": 1_700_000_000_000_000 + n,
    }
    for n in range(COUNT)
]


def column(name):
    return [item[name] for item in ITEMS]


def seen():
    return [datetime.fromtimestamp(s // 10**6, timezone.utc).replace(microsecond=s % 10**6) for s in column("seen")]


def costs():
    return [Decimal(cost) for cost in column("cost")]


def of_pandas():
    frame = pandas.DataFrame({name: column(name) for name in ("id", "embedding", "lang", "owner", "late")})
    frame["year"] = pandas.array(column("year"), dtype="Int64")
    frame["price"] = column("price")
    frame["cost"] = costs()
    frame["section"] = pandas.Categorical(column("section"))
    frame["seen"] = pandas.to_datetime(column("seen"), unit="us", utc=True)
    frame["note"] = [None] * COUNT
    for codec in ("snappy", "gzip", "zstd", "lz4", "brotli"):
        frame.to_parquet(HERE / f"pandas-{codec}.parquet", compression=codec, index=False)


def of_polars():
    frame = polars.DataFrame(
        {
            "id": polars.Series(column("id"), dtype=polars.Int32),
            "embedding": polars.Series(column("embedding"), dtype=polars.Array(polars.Float32, 3)),
            "lang": polars.Series(column("lang"), dtype=polars.List(polars.Categorical)),
            "year": polars.Series(column("year"), dtype=polars.UInt16),
            "owner": polars.Series(column("owner"), dtype=polars.UInt64),
            "price": column("price"),
            "cost": polars.Series(costs(), dtype=polars.Decimal(12, 2)),
            "late": column("late"),
            "section": polars.Series(column("section"), dtype=polars.Categorical),
            "seen": polars.Series(seen(), dtype=polars.Datetime("us", "UTC")),
            "note": polars.Series([None] * COUNT, dtype=polars.Null),
        }
    )
    frame.write_parquet(HERE / "polars.PARQUET")
    frame.write_parquet(HERE / "polars-lz4.pq", compression="lz4")


def of_duckdb():
    frame = pyarrow.table({name: column(name) for name in ITEMS[0]})  # Looked up by DuckDB under its name.
    query = """
        SELECT id::BIGINT AS id, embedding::FLOAT[3] AS embedding, lang, year::USMALLINT AS year, owner::UBIGINT AS owner,
            price, cost::DECIMAL(18, 3) AS cost, late, section::ENUM('utils', 'python') AS section,
            make_timestamp(seen) AS seen, NULL AS note
        FROM frame
    """
    for codec in ("snappy", "brotli", "lz4_raw"):
        duckdb.sql(f"COPY ({query}) TO '{HERE / f'duckdb-{codec}.parquet'}' (FORMAT parquet, COMPRESSION {codec})")


def of_pyarrow():
    schema = pyarrow.schema(
        {
            "id": pyarrow.int64(),
            "embedding": pyarrow.list_(pyarrow.float16(), 3),
            "lang": pyarrow.large_list(pyarrow.large_string()),
            "year": pyarrow.dictionary(pyarrow.int8(), pyarrow.int32()),
            "owner": pyarrow.int64(),
            "price": pyarrow.float64(),
            "late": pyarrow.bool_(),
            "section": pyarrow.string_view(),
            "seen": pyarrow.timestamp("us"),
            "note": pyarrow.null(),
        }
    )
    values = {name: column(name) for name in ITEMS[0]} | {"note": [None] * COUNT}
    values["year"] = pyarrow.array(values["year"], pyarrow.int32()).dictionary_encode().cast(schema.field("year").type)
    table = pyarrow.table({name: values[name] for name in schema.names}, schema=schema)
    pyarrow.parquet.write_table(table, HERE / "pyarrow")


def of_spark():
    schema = pyarrow.schema(
        {
            "id": pyarrow.int64(),
            "embedding": pyarrow.list_(pyarrow.float64()),
            "lang": pyarrow.list_(pyarrow.string()),
            "year": pyarrow.int32(),
            "owner": pyarrow.int64(),
            "price": pyarrow.float64(),
            "cost": pyarrow.decimal128(38, 18),
            "late": pyarrow.bool_(),
            "section": pyarrow.string(),
            "seen": pyarrow.timestamp("us"),
        }
    )
    folder = HERE / "spark"
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    for number, rows in enumerate((slice(0, 4), slice(4, COUNT))):
        values = {name: column(name)[rows] for name in schema.names} | {"cost": costs()[rows]}
        values["cost"] = pyarrow.array(values["cost"], pyarrow.decimal128(38, 18))
        path = folder / f"part-0000{number}-4f3a-c000.snappy.parquet"
        pyarrow.parquet.write_table(
            pyarrow.table(values, schema=schema), path, flavor="spark", use_deprecated_int96_timestamps=True
        )


def of_lines():
    lines = []
    for item in ITEMS:
        attributes = {name: value for name, value in item.items() if name not in ("id", "embedding")}
        attributes |= {"note": None, "cost": float(attributes["cost"])}
        lines.append(json.dumps({"id": item["id"], "embedding": item["embedding"], "attributes": attributes}) + "\n")
    text = "".join(lines).encode()
    (HERE / "lines.jsonl").write_bytes(b"\xef\xbb\xbf" + text)
    with open(HERE / "lines.jsonl.gz", "wb") as out, gzip.GzipFile(fileobj=out, mode="wb", mtime=0) as packed:
        packed.write(text)


def main():
    shutil.rmtree(HERE, ignore_errors=True)
    HERE.mkdir(parents=True)
    (HERE / "expected.json").write_text(json.dumps(ITEMS, indent=1) + "\n")
    for write in (of_pandas, of_polars, of_duckdb, of_pyarrow, of_spark, of_lines):
        write()


if __name__ == "__main__":
    main()
