import importlib.util

import pytest

from services.cli.bench.bench import BenchConfig, open_side, run
from services.cli.bench.sides import Url
from services.values.errors import ConfigError

pytestmark = pytest.mark.long


def test_a_picture_without_its_library_says_what_to_install(monkeypatch, capsys, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "matplotlib" else found(name, *of)
    )
    with pytest.raises(SystemExit) as ended:
        run([f"--plot={tmp_path / 'x.png'}"])
    assert ended.value.code == 2
    assert "pip install 'isthmus[plots]'" in capsys.readouterr().err


def test_settings_and_addresses_that_cannot_be(subtests, tmp_path_factory):
    for wrong in [{"workload": "trace"}, {"trace": "t"}, {"rate": 0.0}, {"range_ratio": 2.0}]:
        with subtests.test("settings", wrong=wrong), pytest.raises(ConfigError, match="--"):
            BenchConfig(**wrong)
    with subtests.test("what loop it is"):
        tmp_path = tmp_path_factory.mktemp("case")
        assert not BenchConfig().is_open and BenchConfig(rate=1.0, concurrency=2).is_open
        traced = {"workload": "trace", "trace": tmp_path}
        assert BenchConfig(**traced).is_open and not BenchConfig(**traced, concurrency=2).is_open
    with subtests.test("where http is"):
        assert Url.parse("http://r:8000/v1/") == Url("r", 8000, False, "")
        assert Url.parse("https://r/models") == Url("r", 443, True, "/models")
        assert Url.parse("r:8000") == Url("r", 8000, False, "")
        for wrong in ("ftp://r", "http://r:port", "http://"):
            with pytest.raises(ConfigError, match="--http"):
                Url.parse(wrong)
    with subtests.test("an authority that is not there"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="--tls-ca"):
            open_side(BenchConfig(http="https://r", tls_ca=tmp_path / "none"))
