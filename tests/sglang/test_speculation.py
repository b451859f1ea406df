"""These tests show what SGLang's own code says of speculation, in a process such as it starts: no algorithm
runs on a CPU.

Its names after aliases, the slots that a step keeps for drafts, and our manager over buffers as it lists them
where it speculates.
"""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.service import speculation_flags

PAGE = 16
STEPS = [(5, 4, 8), (3, 1, 4), (1, 1, 6), (7, 8, 64), (2, 2, 40)]
PAGES = [1, 16, 64]
DRAFTS = ["LlamaForCausalLMEagle3", *speculation_flags._GEMMA_4_ASSISTANTS]
SCRIPT = f"""
import json
from types import SimpleNamespace as Of

import sglang.srt.utils.hf_transformers_utils as hf
from sglang.srt.arg_groups.speculative_hook import _resolve_speculative_algorithm_alias
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.mem_cache import allocation_sizing
from services.engine.sglang.inside import kv_classes as ours
from services.engine.sglang.inside.process_memory import Posted

def alias(name, draft):
    hf.get_config = lambda *args, **kwargs: Of(architectures=[draft])
    return _resolve_speculative_algorithm_alias(name, "draft" if draft else None)

def reserve(steps, top_k, draft_tokens, page_size):
    spec = Of(speculative_algorithm="EAGLE", speculative_num_steps=steps, speculative_eagle_topk=top_k)
    allocation_sizing.get_spec = lambda: spec
    allocation_sizing.max_speculative_num_draft_tokens = lambda: draft_tokens
    allocation_sizing.get_alloc_page_size = lambda: page_size
    return allocation_sizing.get_alloc_reserve_per_decode()

def manager(own, of_draft):
    made, args = object.__new__(ours.IsthmusKVManager), KVArgs()
    args.page_size, args.kv_layer_ids, args.state_types = {PAGE}, [], []
    args.kv_item_lens, args.num_draft_entries = own + of_draft, len(of_draft)
    args.kv_data_lens = [9 * size for size in args.kv_item_lens]
    made.kv_args, made.attn_tp_size, made.attn_tp_rank = args, 1, 0
    made.kv_cache_dtype_str, made.is_mla_backend = "float32", False
    made._settings = Of(num_kv_heads=2, head_dim=16, model_fingerprint=7, draft_fingerprint=8)
    made._settings.draft_kv_heads, made._settings.draft_head_dim = 1, 64
    made._settings.draft_is_latent = False
    made._posted, made._posting = {{}}, Of(transfer_id=3)
    return made

def written(own, of_draft, peer):
    made = manager(own, of_draft)
    made.decode_kv_args_table = {{"d": Of(dst_kv_item_lens=peer, decode_tp_rank=0, decode_tp_size=1)}}
    made._count("d", 5)
    posted = made._posted.get(3, Posted())
    return posted.num_pages, posted.size_bytes, posted.carried_bytes

names = ("NEXTN", "EAGLE", "DSPARK", "DFLASH", "STANDALONE", "NGRAM")
draft = manager([4096] * 4, [1024] * 2)._layout.draft
print(json.dumps({{
    "aliases": [[name, of, alias(name, of)] for name in names for of in [None, *{DRAFTS}]],
    "reserves": [[*of, page, reserve(*of, page)] for of in {STEPS} for page in {PAGES}],
    "page_bytes": [manager([4096] * 4, more)._layout.page_bytes for more in ([], [1024] * 2)],
    "draft": [draft.model_fingerprint, draft.group.num_kv_heads, draft.group.unit_bytes],
    "alone": written([4096] * 4, [], [4096] * 4 + [1024] * 2),
    "both": written([4096] * 4, [1024] * 2, [4096] * 4 + [1024] * 2),
}}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    environment = sglang_settings(tmp_path_factory.mktemp("model")).environment(os.environ)
    asked = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=500
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    return SimpleNamespace(**json.loads(asked.stdout.splitlines()[-1]))


def test_names_after_aliases_are_sglangs(told, tmp_path):
    for name, draft, alias in told.aliases:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [draft]}))
        path = {speculation_flags.DRAFT_PATHS[0]: str(tmp_path)} if draft else {}
        assert speculation_flags.algorithm({speculation_flags.ALGORITHM: name.lower(), **path}) == alias


def test_the_slots_kept_for_drafts_are_sglangs_in_whole_pages(told):
    for steps, top_k, draft_tokens, page_size, reserve in told.reserves:
        values = {
            speculation_flags.ALGORITHM: "EAGLE",
            speculation_flags._STEPS: steps,
            speculation_flags._TOP_K: top_k,
        }
        values = {flag: str(value) for flag, value in values.items()}
        slots = speculation_flags.draft_slots(
            {**values, speculation_flags._DRAFT_TOKENS: str(draft_tokens)}, page_size
        )
        assert slots == -(-reserve // page_size) * page_size + page_size


def test_a_draft_is_not_a_part_of_the_models_page(told):
    assert told.page_bytes == [4 * 4096] * 2
    assert told.draft == [8, 1, 2 * 1024]


def test_a_drafts_pages_are_counted_apart_and_only_where_they_are_written(told):
    assert told.alone == [5, 5 * 4 * 4096, {}]
    assert told.both == [5, 5 * 4 * 4096, {"draft": 5 * 2 * 1024}]
