#!/usr/bin/env python3
"""Reads the data of the demo from Debian's package indexes.

    python extract_debian.py OUT [--suite bookworm] [--architecture amd64] [--mirror URL]

Runs on Debian with apt, as any user, with the standard library and pyarrow only: apt fetches and verifies the indexes of `main`
into OUT/apt, a separate root, so no file of the system changes. The default mirror is that of this machine's apt.

    items.parquet   binary packages; `id` is the position in the Packages index
    users.parquet   source packages; `id` is the position in the Sources index
    edges.parquet   user, item, labels: bit 0 build-depends, bit 1 depends, bit 2 recommends, bit 3 suggests or enhances

An edge means that a source package, or a binary package built from it, declares the item. Of alternatives (`a | b`) the first
counts; a virtual package stands for the first package that provides it; relations of a source to its own binaries are left out,
as are packages that the suite does not contain. Of several versions of a package the first listed counts.
"""
import argparse
import pathlib
import re
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq

BUILD, DEPENDS, RECOMMENDS, SUGGESTS = 1, 2, 4, 8
SOURCE_FIELDS = {"Build-Depends": BUILD, "Build-Depends-Indep": BUILD, "Build-Depends-Arch": BUILD}
BINARY_FIELDS = {"Pre-Depends": DEPENDS, "Depends": DEPENDS, "Recommends": RECOMMENDS, "Suggests": SUGGESTS, "Enhances": SUGGESTS}
SIZE_BUCKETS = [(100, "<100K"), (1_000, "<1M"), (10_000, "<10M"), (100_000, "<100M")]
ITEMS = pa.schema(
    [("id", pa.int64())]
    + [(name, pa.string()) for name in ("name", "source", "short", "long", "section", "priority", "architecture", "multi_arch", "maintainer", "size_bucket")]
    + [("installed_kb", pa.int64()), ("tags", pa.list_(pa.string())), ("essential", pa.string())]
)
USERS = pa.schema(
    [("id", pa.int64()), ("source", pa.string()), ("section", pa.string()), ("maintainer", pa.string())]
    + [("binaries", pa.list_(pa.int64())), ("main_item", pa.int64()), ("testsuite", pa.string()), ("uploaders", pa.list_(pa.string()))]
)
EDGES = pa.schema([("user", pa.int32()), ("item", pa.int32()), ("labels", pa.uint8())])


class Apt:
    """apt on a separate root: its indexes, verified by apt with the archive's signature."""

    def __init__(self, root, suite, architecture, mirror):
        self.root = root
        mirror = mirror or self.mirror_in_use()
        for folder in ("lists/partial", "cache/archives/partial"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        (root / "sources.list").write_text(f"deb {mirror} {suite} main\ndeb-src {mirror} {suite} main\n")
        own = {"Dir::Etc::sourcelist": root / "sources.list", "Dir::Etc::sourceparts": "/dev/null", "Dir::State::lists": root / "lists", "Dir::Cache": root / "cache",
               "APT::Architecture": architecture, "APT::Architectures": architecture, "Acquire::Languages": "en"}
        self.options = [word for name, value in own.items() for word in ("-o", f"{name}={value}")]

    @staticmethod
    def mirror_in_use():
        lines = subprocess.run(["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, check=True, text=True).stdout.split()
        if not lines:
            raise SystemExit("this machine's apt has no package indexes: name a mirror with --mirror")
        return lines[0]

    def update(self):
        subprocess.run(["apt-get", "--quiet", *self.options, "update"], check=True)

    def index(self, created_by):
        """Returns the text of apt's index for `Packages`, `Sources` or `Translations`, with any compression."""
        listed = subprocess.run(["apt-get", *self.options, "indextargets", "--format", "$(FILENAME)", f"Created-By: {created_by}"], capture_output=True, check=True, text=True).stdout.split()
        if len(listed) != 1:
            raise SystemExit(f"apt lists {len(listed)} {created_by} indexes, expected 1: {listed}")
        return subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", listed[0]], capture_output=True, check=True).stdout.decode("utf-8", "replace")


def stanzas(text):
    """Yields the paragraphs of a control file as dictionaries; a folded field keeps its line breaks."""
    for paragraph in text.split("\n\n"):
        fields, name = {}, None
        for line in paragraph.split("\n"):
            if line[:1] in (" ", "\t"):
                fields[name] += "\n" + line.strip()
            elif line:
                name, _, value = line.partition(":")
                fields[name] = value.strip()
        if "Package" in fields:
            yield fields


def first_of_each(text):
    """Maps package names to their first stanza, in the order of the index."""
    found = {}
    for fields in stanzas(text):
        found.setdefault(fields["Package"], fields)
    return found


def package_names(field):
    """Returns the names in a relation field: the first alternative of each, without version, architecture and build profile."""
    for relation in field.replace("\n", " ").split(","):
        name = re.match(r"\s*([^\s(\[<:|]+)", relation)
        if name:
            yield name[1]


def person(field):
    """Returns the name in `Name <address>`."""
    return field.partition("<")[0].strip().strip('"')


def people(field):
    """Returns the names in a comma-separated list of `Name <address>`, where a name may contain a comma."""
    return [person(one) for one in re.split(r">\s*,", field.replace("\n", " ")) if one.strip()]


def tags(field):
    """Returns debtags; `facet::{a,b}` stands for two of them."""
    found = []
    for tag in re.findall(r"[^\s,{]+(?:\{[^}]*\})?", field):
        stem, brace, choices = tag.partition("{")
        found += [stem + choice.strip() for choice in choices.rstrip("}").split(",")] if brace else [stem]
    return found


def long_text(description):
    """Returns a long description on one line; the first line is the short one, a lone dot an empty line."""
    return " ".join(line for line in description.split("\n")[1:] if line and line != ".")


def size_bucket(installed_kb):
    return next((name for limit, name in SIZE_BUCKETS if installed_kb < limit), ">=100M")


def item_rows(binaries, translations):
    long_of = {(fields["Package"], fields.get("Description-md5")): fields.get("Description-en", "") for fields in stanzas(translations)}
    for number, (name, fields) in enumerate(binaries.items()):
        installed_kb = int(fields.get("Installed-Size", 0))
        yield {
            "id": number,
            "name": name,
            "source": fields.get("Source", name).partition(" ")[0],
            "short": fields.get("Description", "").partition("\n")[0],
            "long": long_text(long_of.get((name, fields.get("Description-md5")), "")),
            "section": fields["Section"].rpartition("/")[2],
            "priority": fields["Priority"],
            "architecture": fields["Architecture"],
            "multi_arch": fields.get("Multi-Arch", "no"),
            "maintainer": person(fields["Maintainer"]),
            "size_bucket": size_bucket(installed_kb),
            "installed_kb": installed_kb,
            "tags": tags(fields.get("Tag", "")),
            "essential": fields.get("Essential", "no"),
        }


def user_rows(sources, items, built_from):
    for number, (name, fields) in enumerate(sources.items()):
        own = built_from.get(name, [])
        yield {
            "id": number,
            "source": name,
            "section": fields.get("Section", "").rpartition("/")[2],
            "maintainer": person(fields.get("Maintainer", "")),
            "binaries": own,
            "main_item": next((b for b in own if items[b]["name"] == name), own[0] if own else -1),
            "testsuite": fields.get("Testsuite", ""),
            "uploaders": people(fields.get("Uploaders", "")),
        }


def label_edges(sources, binaries, built_from):
    """Maps (user, item) to label bits."""
    number_of = {name: number for number, name in enumerate(binaries)}
    stands_for = {}
    for name, fields in binaries.items():
        for virtual in package_names(fields.get("Provides", "")):
            stands_for.setdefault(virtual, number_of[name])
    stands_for.update(number_of)
    stanza_of, edges = list(binaries.values()), {}
    for user, (name, fields) in enumerate(sources.items()):
        own = built_from.get(name, [])
        declared = [(fields, SOURCE_FIELDS)] + [(stanza_of[b], BINARY_FIELDS) for b in own]
        for stanza, bits in declared:
            for field, bit in bits.items():
                for package in package_names(stanza.get(field, "")):
                    item = stands_for.get(package)
                    if item is not None and item not in own:
                        edges[user, item] = edges.get((user, item), 0) | bit
    return edges


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--suite", default="bookworm")
    parser.add_argument("--architecture", default="amd64")
    parser.add_argument("--mirror")
    options = parser.parse_args()
    out = options.out.resolve()
    apt = Apt(out / "apt", options.suite, options.architecture, options.mirror)
    apt.update()

    binaries, sources = first_of_each(apt.index("Packages")), first_of_each(apt.index("Sources"))
    items = list(item_rows(binaries, apt.index("Translations")))
    built_from = {}
    for item in items:
        built_from.setdefault(item["source"], []).append(item["id"])
    users = list(user_rows(sources, items, built_from))
    labels = label_edges(sources, binaries, built_from)
    edges = [{"user": user, "item": item, "labels": bits} for (user, item), bits in sorted(labels.items())]

    for name, rows, schema in (("items", items, ITEMS), ("users", users, USERS), ("edges", edges, EDGES)):
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), out / f"{name}.parquet", compression="zstd")
        print(f"{name}.parquet: {len(rows)} rows")
    for name, bit in (("build", BUILD), ("depends", DEPENDS), ("recommends", RECOMMENDS), ("suggests", SUGGESTS)):
        print(f"    {name}: {sum(1 for bits in labels.values() if bits & bit)} edges")


if __name__ == "__main__":
    main()
