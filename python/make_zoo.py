#!/usr/bin/env python3
"""Trains the models of the zoo and writes their packages with golden answers.

    pip install './python[export]'
    python python/make_zoo.py models [dcn deepfm ...] [--program target/debug/sterling]

With the program each package is also served and compared with PyTorch. All of them take about four minutes on one core.
"""

import argparse
import importlib
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))

NAMES = ["dcn", "deepfm", "xdeepfm", "dlrm", "sasrec", "bert4rec", "gru4rec", "hstu", "llm", "mol", "din", "tags"]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--program", type=pathlib.Path)
    options = parser.parse_args()
    for name in options.names:
        importlib.import_module(f"zoo.{name}").make(options.out / name, options.program)
