import json

import pytest

from services.cli.bench.trace import count_lines, read_trace
from services.cli.bench.workload import Traced
from services.values.errors import ConfigError

LINE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_lines_are_read_as_far_as_wanted(tmp_path):
    path = written(tmp_path, LINE, "", LINE | {"timestamp": 7.5}, "not read")
    assert list(read_trace(path, 2)) == [Traced(0, 700, 5, [1, 2]), Traced(7.5, 700, 5, [1, 2])]
    assert count_lines(path, 2) == 2 and count_lines(path, None) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("{", "line 2"),
        ({"timestamp": 0}, "input_length"),
        (LINE | {"timestamp": -1}, "before"),
        (LINE | {"output_length": 0}, "1 or more"),
        (LINE | {"hash_ids": [-1]}, "0 or more"),
        (LINE | {"hash_ids": 3}, "line 2"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, wrong, says):
    with pytest.raises(ConfigError, match=says):
        list(read_trace(written(tmp_path, LINE, wrong), None))


def test_no_file(tmp_path):
    with pytest.raises(ConfigError, match="--trace"):
        count_lines(tmp_path / "none", None)
