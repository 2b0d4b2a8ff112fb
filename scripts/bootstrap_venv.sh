#!/usr/bin/env bash
# Make a virtual environment: bootstrap_venv.sh PYTHON FOLDER. Says what to install when it cannot.
set -euo pipefail
python="$1"
venv="$2"

if "$venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    exit 0
fi
if ! command -v "$python" >/dev/null; then
    echo "error: no '$python' on PATH. Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: Python 3.11 or newer is needed, '$python' is $("$python" -V 2>&1)." >&2
    echo "       Name another one: make PYTHON=/path/to/python3.11" >&2
    exit 1
fi

has_ensurepip() { "$python" -c 'import ensurepip' 2>/dev/null; }
has_virtualenv() { "$python" -c 'import virtualenv' 2>/dev/null; }

if has_ensurepip; then
    "$python" -m venv "$venv"
elif has_virtualenv; then
    "$python" -m virtualenv -q "$venv"
else
    echo "error: '$python' can make no virtual environment: it has neither ensurepip nor virtualenv." >&2
    echo "       On Debian or Ubuntu: sudo apt-get install python3-venv    elsewhere: pip install virtualenv" >&2
    exit 1
fi
