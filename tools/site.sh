#!/usr/bin/env bash
# site.sh build|serve: the site of the documents, by the MkDocs in .venv, without a warning.
set -eu
cd "$(dirname "$0")/.."
# With --quiet, MkDocs would not count warnings. Its theme prints news about MkDocs 2, which
# pyproject.toml excludes.
export NO_MKDOCS_2_WARNING=1
case ${1:-} in
  build) exec .venv/bin/python -B -m mkdocs build --strict ;;
  serve)
    exec .venv/bin/python -B -m mkdocs serve --strict --watch README.md --watch include \
      --watch python --watch src --watch tools/website
    ;;
  *)
    echo "site.sh: expected build or serve, got '${1:-}'" >&2
    exit 2
    ;;
esac
