#!/bin/sh
# Compares our files and tokens with Hugging Face's libraries, in a virtual environment (build/venv; needs PyPI once).
set -eu
cd "$(dirname "$0")/../.."
wanted=test/interop/requirements.txt
if ! cmp -s "$wanted" build/venv/requirements.txt; then
    rm -rf build/venv
    python3 -m venv build/venv || { echo "python3 cannot make a virtual environment; apt-get install python3-venv" >&2; exit 1; }
    build/venv/bin/pip install --quiet --disable-pip-version-check -r "$wanted"
    cp "$wanted" build/venv/requirements.txt
fi
exec prove --exec build/venv/bin/python "$@" test/interop/*.py :: build
