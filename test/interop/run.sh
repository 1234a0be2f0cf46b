#!/bin/sh
# Compares with Hugging Face's libraries, in a virtual environment of their own (build/venv; needs PyPI once).
set -eu
cd "$(dirname "$0")/../.."
wanted=test/interop/requirements.txt
if ! cmp -s "$wanted" build/venv/requirements.txt; then
    rm -rf build/venv
    python3 -m venv build/venv || { echo "python3 with venv is needed: apt-get install python3-venv" >&2; exit 1; }
    build/venv/bin/pip install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" build/venv/requirements.txt
fi
exec prove --exec build/venv/bin/python "$@" test/interop/*.py :: build
