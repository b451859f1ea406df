#!/usr/bin/env bash
# With pytest 9.2 pytest-xdist's `--dist loadgroup` keeps no group together, and says nothing: tests of one
# `xdist_group` run on several workers. xdist writes the group into an attribute of the item (`_nodeid`) that pytest 9.2
# does not read any more. Fixtures that a group was to share are made once a worker.
#
# Seen with pytest-xdist 3.8.0 on Python 3.11, 12 tests of one group and two workers:
#   pytest 9.2.0, pytest-xdist 3.8.0: 12 tests of one group ran on 2 workers
#   pytest 9.0.2, pytest-xdist 3.8.0: 12 tests of one group ran on 1 worker
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/test_group.py" <<'PYTHON'
import os
import time

import pytest

pytestmark = pytest.mark.xdist_group("one")


@pytest.mark.parametrize("number", range(12))
def test_each(number):
    time.sleep(0.1)
    with open(os.environ["WORKERS"], "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\n")
PYTHON
workers() {
  python3 -m venv "$folder/$1"
  "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "pytest==$1" pytest-xdist==3.8.0
  (cd "$folder" && WORKERS="$folder/$1.txt" "$folder/$1/bin/python" -m pytest -q -n 2 --dist loadgroup test_group.py >/dev/null)
  sort -u "$folder/$1.txt" | wc -l
}
now=$(workers 9.2.0)
before=$(workers 9.0.2)
echo "pytest 9.2.0, pytest-xdist 3.8.0: 12 tests of one group ran on $now workers"
echo "pytest 9.0.2, pytest-xdist 3.8.0: 12 tests of one group ran on $before worker"
[[ $now == 2 && $before == 1 ]]
