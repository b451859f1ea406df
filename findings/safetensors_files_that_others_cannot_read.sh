#!/usr/bin/env bash
# safetensors 0.8.0 writes files of mode 0600 whatever the umask is, and also turns a file of mode 0644 that it writes
# over into one of 0600. 0.7.0 and earlier followed the umask and kept the mode. What save_pretrained or a fine-tuning
# wrote on one account then has a config.json that another account can read and weights that it cannot
# (safetensors/safetensors#782, open).
#
# Seen with umask 0022 on Python 3.11:
#   safetensors 0.7.0: new file 644, over a file of 644: 644
#   safetensors 0.8.0: new file 600, over a file of 644: 600
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
umask 0022
cat >"$folder/modes.py" <<'PYTHON'
import os
import sys
from importlib.metadata import version

import numpy
from safetensors.numpy import save_file


def mode_after_writing(path):
    save_file({"weight": numpy.zeros(4, numpy.float32)}, path)
    return oct(os.stat(path).st_mode & 0o777)[2:]


path = sys.argv[1]
new = mode_after_writing(path)
os.chmod(path, 0o644)
over = mode_after_writing(path)
found = f"safetensors {version('safetensors')}: new file {new}, over a file of 644: {over}"
print(found)
expected = {"0.7.0": ("644", "644"), "0.8.0": ("600", "600")}
sys.exit((new, over) != expected[version("safetensors")])
PYTHON
python3 -m venv "$folder/venv"
for version in 0.7.0 0.8.0; do
  "$folder/venv/bin/pip" install --quiet numpy==2.4.6 "safetensors==$version"
  "$folder/venv/bin/python" "$folder/modes.py" "$folder/$version.safetensors"
done
