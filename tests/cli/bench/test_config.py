import importlib.util

import pytest

from services.cli.bench.bench import open_side, run
from services.cli.bench.config import BenchConfig
from services.cli.bench.sides.over_http import Url
from services.values.errors import ConfigError


def test_a_picture_without_its_library_says_what_to_install(monkeypatch, capsys, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "matplotlib" else found(name, *of)
    )
    with pytest.raises(SystemExit) as ended:
        run([f"--plot={tmp_path / 'x.png'}"])
    assert ended.value.code == 2
    assert "pip install 'isthmus[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [{"workload": "trace"}, {"trace": "t"}, {"rate": 0.0}, {"range_ratio": 2.0}]
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match="--"):
        BenchConfig(**wrong)


def test_what_loop_it_is(tmp_path):
    assert not BenchConfig().is_open and BenchConfig(rate=1.0, concurrency=2).is_open
    traced = {"workload": "trace", "trace": tmp_path}
    assert BenchConfig(**traced).is_open and not BenchConfig(**traced, concurrency=2).is_open


def test_where_http_is():
    assert Url.parse("http://r:8000/v1/") == Url("r", 8000, False, "")
    assert Url.parse("https://r/models") == Url("r", 443, True, "/models")
    assert Url.parse("r:8000") == Url("r", 8000, False, "")
    for wrong in ("ftp://r", "http://r:port", "http://"):
        with pytest.raises(ConfigError, match="--http"):
            Url.parse(wrong)


def test_an_authority_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="--tls-ca"):
        open_side(BenchConfig(http="https://r", tls_ca=tmp_path / "none"))
