"""SGLang's speculation as stories, from what its processes say to what routers promise and usage tells. No
algorithm of it starts on a CPU: its trees are key_tree.py's, and its buffers what it lists for a transfer.

A page and an index block have two tokens. A page of the model is 128 bytes, of a draft 32.

    flag ALGORITHM [assistant=]            given to decode with its cache; assistant: the draft is Gemma 4's
    rank NAME [keys=] [draft=] [tp=]       p0, d0, ...; keys=pairs as with EAGLE; draft: whose weights
    caches NAME TOKENS, evicts NAME        its tree takes a sequence in, or gives its first leaf away
    asks TOKENS                            what each tree finds of a prompt, and what the index promises of it
    pairs PREFILL DECODE                   their handshake
    moves PREFILL DECODE prompt= [from=]   what all of prefill's processes write and count, and what is due
"""

import json
from collections import Counter
from dataclasses import replace

import pytest

from engine.sglang.key_tree import KeyTree
from plugins.transcripts import stem, transcripts_beside
from services.engine.sglang.inside.process_memory import (
    AttentionHeads,
    Buffers,
    Draft,
    ProcessMemory,
    TpPlace,
    check_drafts,
    check_tensor_parallel,
)
from services.engine.sglang.service import speculation_flags
from services.engine.sglang.service.scheduler_reports import TreeEventRebuilder
from services.index.read.prefix_index import PrefixIndex
from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.ticket import check_layouts
from services.kv.transfer_plan import carried_by_kind, moved_bytes
from services.values.kv import DRAFT
from services.values.rank import Generation, RankId

PAGE = 2
SEED = scope_seed("m")
HEADS, DRAFT_HEADS = AttentionHeads(4, 4, "float16"), AttentionHeads(2, 4, "float16")
ITEM, DRAFT_ITEM = 64, 16  # a page of one layer's keys, of all heads


def buffers_of(item_bytes, heads, tp_size):
    """One layer's keys and values, in each of the processes: one head at least."""
    return Buffers((item_bytes // min(heads.num_kv_heads, tp_size),) * 2, heads)


class Rank:
    def __init__(self, name, keys, draft, tp_size):
        self.id = RankId(name[0], int(name[1:]), Generation(1))
        self.tp_size = tp_size
        self.tree = KeyTree(PAGE, keys == "pairs")
        self.rebuilder = TreeEventRebuilder("m", PAGE, PAGE)
        buffers = buffers_of(ITEM, HEADS, tp_size)
        of_draft = Draft(buffers_of(DRAFT_ITEM, DRAFT_HEADS, tp_size), int(draft)) if draft else None
        self.memory = ProcessMemory(PAGE, 99, tp_size, buffers, (), (), draft=of_draft)
        self.layout = self.memory.layout(7)
        self.item_bytes = (*buffers.item_bytes, *(of_draft.buffers.item_bytes if of_draft else ()))


class Story:
    def __init__(self, folder):
        self.folder = folder
        self.ranks = {}
        self.index = PrefixIndex()

    def perform(self, command):
        return getattr(self, f"do_{command.name}")(*command.words, **command.options) or ()

    def do_flag(self, algorithm, assistant=""):
        architecture = "Gemma4AssistantForCausalLM" if assistant else "LlamaForCausalLMEagle3"
        (self.folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        values = {speculation_flags.ALGORITHM: algorithm, speculation_flags.DRAFT_PATHS[0]: str(self.folder)}
        speculation_flags.check_decode_cache(values)
        yield f"runs as {speculation_flags.algorithm(values)}"

    def do_rank(self, name, keys="tokens", draft="", tp="1"):
        rank = self.ranks[name] = Rank(name, keys, draft, int(tp))
        self.index.apply_snapshot(rank.id, ())

    def do_caches(self, name, tokens):
        rank = self.ranks[name]
        return self.told(rank, lambda: rank.tree.insert(ids_of(tokens)))

    def do_evicts(self, name):
        rank = self.ranks[name]
        return self.told(rank, lambda: rank.tree.evict(0))

    def told(self, rank, change):
        before = set(rank.tree.pages)
        news = rank.rebuilder.rebuild(change())
        self.index.apply_delta(rank.id, news.stored, news.removed)
        for verb, pages in (("takes", rank.tree.pages - before), ("gives away", before - rank.tree.pages)):
            for page in sorted(pages):
                yield f"{verb} a page: {shown(page[-PAGE:])}"
        yield f"index: {len(news.stored)} more, {len(news.removed)} less"

    def do_asks(self, tokens):
        ids = ids_of(tokens)
        for name, rank in self.ranks.items():
            promised = self.index.match(rank.id.key, sequence_hashes(ids, PAGE, SEED)) * PAGE
            yield f"{name}: finds {rank.tree.matched(ids)} of {len(ids)} tokens, promised {promised}"

    def do_pairs(self, prefill, decode):
        layouts = self.ranks[prefill].layout, self.ranks[decode].layout
        check_layouts(*layouts)
        check_tensor_parallel(*layouts)
        check_drafts(*layouts)
        yield "they pair"

    def do_moves(self, prefill, decode, prompt, **options):
        writer, reader, total = self.ranks[prefill], self.ranks[decode], Counter()
        start, end = int(options.get("from", 0)), int(prompt)
        for here, there in process_pairs(writer.tp_size, reader.tp_size):
            places = TpPlace(here, writer.tp_size), TpPlace(there, reader.tp_size)
            of_model, of_draft = writer.memory.written_bytes(reader.item_bytes, *places)
            yield f"{prefill}.{here} counts {of_model} + {of_draft} bytes a page, written to {decode}.{there}"
            total += Counter(model=of_model, draft=of_draft)
        num_pages = -(-end // PAGE) - start // PAGE
        landed = num_pages * total.total()
        layouts = reader.layout, replace(reader.layout, draft=None)
        due = {sum(moved_bytes(start, end, layout)): layout for layout in layouts}
        yield f"in all {num_pages} x {total.total()} = {landed} bytes, due are {' or '.join(map(str, due))}"
        of_draft = carried_by_kind(due[landed], moved_bytes(start, end, due[landed])).get(DRAFT, 0)
        yield f"usage: {of_draft} bytes of a draft's"


def process_pairs(writer_tp, reader_tp):
    wider = max(writer_tp, reader_tp)
    return [(rank * writer_tp // wider, rank * reader_tp // wider) for rank in range(wider)]


def shown(keys):
    return " ".join(":".join(map(str, key)) if isinstance(key, tuple) else str(key) for key in keys)


def ids_of(tokens):
    """1-4,9 is 1 2 3 4 9."""
    spans = [list(map(int, span.split("-"))) for span in tokens.split(",")]
    return [token for span in spans for token in range(span[0], span[-1] + 1)]


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_speculation(path, play, tmp_path):
    play(path, Story(tmp_path).perform)
