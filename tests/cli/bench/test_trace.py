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


def test_a_trace_is_read_and_a_wrong_line_named(subtests, tmp_path_factory):
    with subtests.test("lines are read as far as wanted"):
        tmp_path = tmp_path_factory.mktemp("case")
        path = written(tmp_path, LINE, "", LINE | {"timestamp": 7.5}, "not read")
        assert list(read_trace(path, 2)) == [Traced(0, 700, 5, [1, 2]), Traced(7.5, 700, 5, [1, 2])]
        assert count_lines(path, 2) == 2 and count_lines(path, None) == 3
    for wrong, says in [
        ("{", "line 2"),
        ({"timestamp": 0}, "input_length"),
        (LINE | {"timestamp": -1}, "before"),
        (LINE | {"output_length": 0}, "1 or more"),
        (LINE | {"hash_ids": [-1]}, "0 or more"),
        (LINE | {"hash_ids": 3}, "line 2"),
    ]:
        with subtests.test("a line that is none is named", wrong=wrong, says=says):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(ConfigError, match=says):
                list(read_trace(written(tmp_path, LINE, wrong), None))
    with subtests.test("no file"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="--trace"):
            count_lines(tmp_path / "none", None)
