"""`--engine=sglang` where SGLang is not installed."""

from contextlib import ExitStack

import pytest

from services.engine.choose import decode_engines, prefill_engines
from services.rank.main import rank_configs
from services.rank.rank_config import RankConfig
from services.values.errors import ConfigError
from services.values.rank import Generation, RankId, Role


@pytest.fixture
def config(tmp_path):
    return RankConfig(worker="w", engine="sglang", model=str(tmp_path), dp_size=3, etcd=("e:1",))


def test_a_missing_sglang_is_said_in_a_sentence(subtests, config, monkeypatch):
    for role, make_engines in [(Role.DECODE, decode_engines), (Role.PREFILL, prefill_engines)]:
        with subtests.test(role=role, make_engines=make_engines):
            monkeypatch.setattr("services.engine.choose.find_spec", lambda name: None)
            with pytest.raises(ConfigError, match="SGLang is not installed"):
                make_engines(config, [RankId("w", 0, Generation(1))])


def test_processes_and_their_ranks(subtests, config, tmp_path):
    with subtests.test("all ranks are in one process each with its port"):
        with ExitStack() as held:
            ranks = rank_configs(config, held)
        assert config.ranks_per_process == 3
        assert [rank.rank_index for rank in ranks] == [0, 1, 2]
        assert len({rank.port for rank in ranks}) == 3
    with subtests.test("other engines have a process for each rank"):
        config = RankConfig(
            worker="w", engine="torch", model=str(tmp_path), dp_size=3, rank_index=1, etcd=("e:1",)
        )
        assert rank_configs(config, ExitStack()) == [config]


def test_engine_arguments_are_for_sglang_and_may_hold_commas(tmp_path):
    with pytest.raises(ConfigError, match="--engine-arg"):
        RankConfig(worker="w", engine="torch", model=str(tmp_path), engine_arg=("--x",), etcd=("e:1",))
    argument = '--json-model-override-args={"a": 1, "b": 2}'
    config = RankConfig(worker="w", engine="sglang", model="m", engine_arg=(argument,), etcd=("e:1",))
    assert config.engine_arg == (argument,)
