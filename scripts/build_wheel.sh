#!/usr/bin/env bash
# Builds the wheel of the Python package including the server, for any Linux on x86-64 with glibc 2.28 or later:
#     scripts/build_wheel.sh [FOLDER, target/wheels]
# Run it on a system with such an old glibc (for example the image quay.io/pypa/manylinux_2_28_x86_64). If the program needs a
# later glibc, or a library that manylinux_2_28 (PEP 600) does not guarantee, the script reports that and builds nothing.
# STERLING_PROGRAM names a program that is already built, STERLING_GLIBC another glibc version (a wheel for systems like the build
# machine).
set -euo pipefail
cd "$(dirname "$0")/.."
wheels="${1:-target/wheels}"
glibc="${STERLING_GLIBC:-2.28}"

if [ -z "${STERLING_PROGRAM:-}" ]; then
    cargo build --profile dist --locked --features full
    STERLING_PROGRAM=target/dist/sterling
fi
program="$(mktemp -d)/sterling"
trap 'rm -r "$(dirname "$program")"' EXIT
strip -o "$program" "$STERLING_PROGRAM"

asked="$(objdump -T "$program" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1)"
if [ "$(printf '%s\n' "$asked" "$glibc" | sort -V | tail -1)" != "$glibc" ]; then
    echo "the program asks for glibc $asked, expected at most $glibc: build it on a system with that one" >&2
    exit 1
fi
others="$(objdump -p "$program" | awk '$1 == "NEEDED" {print $2}' |
    grep -Ev '^(libc|libm|libdl|librt|libpthread|libgcc_s|ld-linux-x86-64)\.so\.' || true)"
if [ -n "$others" ]; then
    echo "the program asks for libraries that manylinux does not promise:" $others >&2
    exit 1
fi
STERLING_PROGRAM="$program" STERLING_PLATFORM="manylinux_${glibc/./_}_x86_64" "${PYTHON:-python3}" -m pip wheel --quiet --no-deps --wheel-dir "$wheels" ./python
ls "$wheels"/sterling-*-manylinux_"${glibc/./_}"_x86_64.whl
