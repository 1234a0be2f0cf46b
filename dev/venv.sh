#!/bin/sh
# venv.sh FOLDER REQUIREMENTS - makes a virtual environment with these packages, which come from PyPI once, or keeps the
# one that has them. Status 3: they cannot be had. PYTHON: whose environment it is.
set -u
cmp -s "$2" "$1/requirements.txt" && exit
fail() { echo "error: $*" >&2; exit 3; }
rm -rf "$1"
"${PYTHON:-python3}" -m venv "$1" ||
    fail "python3 cannot make a virtual environment; sh dev/setup.sh installs what is missing"
"$1/bin/pip" install --quiet --disable-pip-version-check -r "$2" ||
    fail "the packages of $2 could not be installed; they come from PyPI, which needs a network once"
cp "$2" "$1/requirements.txt"
