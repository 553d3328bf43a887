#!/bin/bash
# venv.sh VENV [PYTHON]: install the locked packages with the given Python, else with the first 3.11 found.
set -euo pipefail
venv=$1
python=${2:-}
if [[ -z $python ]]; then
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [[ -z $python ]]; then
    echo "set-up: no Python 3.11 found; install it, or name it: make venv PYTHON=/path/to/python3.11" >&2
    exit 1
fi
exec "$python" -m launch.setup --venv "$venv"
