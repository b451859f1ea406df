"""What SGLang's own code says of its radix trees, in a process of its own: importing it takes its time."""

import json
import os
import subprocess
import sys

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.service import settings
from services.engine.sglang.service.tree_events import TreeEventRebuilder
from services.kv.block_hash import scope_seed, sequence_hashes
from services.values.kv import CacheEvents

PAGE = 4
TOKENS = list(range(100, 117))
SCRIPT = f"""
import array, json, msgspec
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import _RESERVED_ALIASES

def events(is_eagle):
    tree = RadixCache.create_simulated(page_size={PAGE}, enable_kv_cache_events=True)
    tree.is_eagle = is_eagle
    tree.insert(InsertParams(key=RadixKey(array.array("q", {TOKENS}))))
    return [msgspec.to_builtins(event) for event in tree.take_events()]

paired = [algorithm.name for algorithm in SpeculativeAlgorithm if algorithm.is_eagle()]
print(json.dumps([paired + sorted(_RESERVED_ALIASES), events(False), events(True)]))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Names of the algorithms; events of a tree of tokens, and of one of pairs."""
    environment = sglang_settings(tmp_path_factory.mktemp("model")).environment(os.environ)
    command = [sys.executable, "-c", SCRIPT]
    asked = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(asked.stdout.splitlines()[-1])


def test_every_kind_of_speculation_whose_keys_are_pairs_is_refused(told):
    assert set(told[0]) == set(settings._KEYED_BY_PAIRS)


def test_a_tree_of_tokens_has_the_hashes_of_the_index(told):
    tree = TreeEventRebuilder("m", PAGE, 2 * PAGE)
    assert list(tree.rebuild(told[1]).stored) == sequence_hashes(TOKENS, 2 * PAGE, scope_seed("m"))
    assert not tree.unreadable


def test_a_tree_of_pairs_has_none_and_is_counted(told):
    tree = TreeEventRebuilder("m", PAGE, 2 * PAGE)
    assert tree.rebuild(told[2]) == CacheEvents(cleared=True)  # SGLang begins so
    assert tree.unreadable.total() == 1
