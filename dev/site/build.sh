#!/bin/sh
# build.sh - makes build/site of the documents, the sources and build/plan's numbers; `make site` calls it. Status 3: the
# Python packages cannot be had.
set -eu
cd "$(dirname "$0")/../.."
sh dev/venv.sh build/site_venv dev/site/requirements.txt
NO_MKDOCS_2_WARNING=1 build/site_venv/bin/mkdocs build --quiet --clean --config-file dev/site/mkdocs.yml
echo "build/site/index.html: $(find build/site -name '*.html' | wc -l) pages; open it in a browser"
