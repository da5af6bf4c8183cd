#!/usr/bin/env bash
# The tests of the Python package, in an environment of their own under target/; those that need PyTorch are skipped where it is
# not in that environment. PYTHON names another interpreter to make it with.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=target/python
if [ ! -x "$environment/bin/pytest" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q --disable-pip-version-check numpy xxhash pytest safetensors httpx
fi
cargo build --locked --quiet
cd python
PYTHONPATH=. "../$environment/bin/python" -m pytest -q -p no:cacheprovider "$@"
