"""These tests show what SGLang's own code says of its radix trees, in a process of its own: importing it
takes its time."""

import json
import os
import subprocess
import sys

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.service.scheduler_reports import TreeEventRebuilder
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.values.rank import Generation, RankId

PAGE = 4
TOKENS = list(range(100, 117))
TREES = ("radix", "rust", "python")
SCRIPT = f"""
import array, json, msgspec, random, torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

class Pool:
    device, page_size = torch.device("cpu"), {PAGE}

    def free(self, *indices, **where):
        pass

    free_segment = free

def made(kind, is_eagle):
    unified = kind != "radix"
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=Pool(),
        page_size={PAGE},
        is_eagle=is_eagle,
        enable_kv_cache_events=True,
        tree_components=(ComponentType.FULL,) if unified else None,
        tree_core_backend=kind if unified else None,
    )
    return UnifiedRadixCache(params) if unified else RadixCache(params)

def key(tokens):
    return RadixKey(array.array("q", tokens))

def grow(tree, tokens):
    tree.insert(InsertParams(key=key(tokens), value=torch.arange(len(tokens))))

def matched(tree, tokens):
    return int(tree.match_prefix(MatchPrefixParams(key=key(tokens))).device_prefix_len)

def events(tree):
    return [msgspec.to_builtins(event) for event in tree.take_events()]

def drawn(rng, most):
    return [rng.randrange(2) for _ in range(rng.randrange(2, most))]

def lived(kind, is_eagle):
    # Steps of growth and eviction: what was told, and what prompts find then.
    rng, tree, steps = random.Random(7), made(kind, is_eagle), []
    for _ in range(60):
        if rng.random() < 0.4:
            tree.evict(EvictParams(num_tokens=rng.randrange(1, 20)))
        else:
            grow(tree, drawn(rng, 40))
        told = events(tree)
        prompts = [drawn(rng, 45) for _ in range(20)]
        steps.append([told, [[prompt, matched(tree, prompt)] for prompt in prompts]])
    return steps

def one(kind, is_eagle):
    tree = made(kind, is_eagle)
    grow(tree, {TOKENS})
    return [bool(getattr(tree, "tree_core", tree).is_eagle), events(tree)]

cases = {{kind: [[one(kind, e), lived(kind, e)] for e in (False, True)] for kind in {TREES}}}
print(json.dumps(cases))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """By kind of tree, with tokens and with pairs for keys: what one tells, once and over its life."""
    environment = sglang_settings(tmp_path_factory.mktemp("model")).environment(os.environ)
    command = [sys.executable, "-c", SCRIPT]
    asked = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(asked.stdout.splitlines()[-1])


def rebuilder(index_block=2 * PAGE):
    return TreeEventRebuilder("m", PAGE, index_block)


def test_trees_of_tokens_and_of_pairs_have_the_hashes_of_the_index(told, subtests):
    for kind in TREES:
        for paired in (False, True):
            with subtests.test(kind=kind, paired=paired):
                is_eagle, events = told[kind][paired][0]
                tree = rebuilder()
                stored = tree.rebuild(events).stored
                assert list(stored) == sequence_hashes(TOKENS[:16], 2 * PAGE, scope_seed("m"))
                assert is_eagle is paired and not tree.unreadable


def test_the_index_promises_what_the_tree_finds(told, subtests):
    """Over growth and eviction: none less, and where keys are pairs at most a page more."""
    for kind in TREES:
        for paired in (False, True):
            for index_block in (PAGE, 2 * PAGE):
                with subtests.test(kind=kind, paired=paired, index_block=index_block):
                    check_promises(told[kind][paired][1], index_block, more_tokens=PAGE * paired)


def check_promises(steps, index_block, more_tokens):
    tree, index, rank = rebuilder(index_block), PrefixIndex(), RankId("d", 0, Generation(1))
    index.apply_snapshot(rank, ())
    seen = set()
    for events, probes in steps:
        news = tree.rebuild(events)
        if news.cleared:
            index.apply_snapshot(rank, ())
        index.apply_delta(rank, news.stored, news.removed)
        for prompt, matched in probes:
            promised = index.match(rank.key, sequence_hashes(prompt, index_block, scope_seed("m")))
            most = (matched + more_tokens) // index_block
            assert matched // index_block <= promised <= most
            seen.add(matched)
    assert not tree.unreadable and len(seen) > 3
