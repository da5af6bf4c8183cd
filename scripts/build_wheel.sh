#!/usr/bin/env bash
# Makes the wheel of the Python package with the server in it, for any Linux on x86-64 with glibc 2.28 or later:
#     scripts/build_wheel.sh [FOLDER, target/wheels]
# It is made on a system with such an old glibc (the image quay.io/pypa/manylinux_2_28_x86_64 is one): where the program asks for a later one, or for a
# library that manylinux_2_28 (PEP 600) does not promise, this says so and makes nothing. STERLING_PROGRAM names a program that is built already,
# STERLING_GLIBC another version (a wheel for the systems of its builder).
set -euo pipefail
cd "$(dirname "$0")/.."
wheels="${1:-target/wheels}"
glibc="${STERLING_GLIBC:-2.28}"

if [ -z "${STERLING_PROGRAM:-}" ]; then
    cargo build --release --locked --features full
    STERLING_PROGRAM=target/release/sterling
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
