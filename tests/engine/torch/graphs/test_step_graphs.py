"""Steps from buffers give what steps computed anew give, replayed or not, filled up or not."""

import gc
import logging
import random
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import transformers

import services.engine.torch.model.packed_model as packed_model
import services.engine.torch.pools as runner_pools
from bench.families import FAMILIES, fill_family
from engine.torch.attention.kernels.plain_parts import attend_parts_plainly
from engine.torch.attention.plain_prompts import attend_rows_plainly, gather_plainly, varlen_plainly
from engine.torch.graphs import tape
from engine.torch.sequences import Carried, Guessing, PageTables, generate
from exactness.checkpoints import tiny_checkpoint
from exactness.reference import count_near_ties, random_prompt, reference_generation
from services.cli.model.make_model import Family
from services.engine.paged.model_runner import Chunk, TailPages
from services.engine.torch import runner as torch_runner
from services.engine.torch import step_graphs, step_sizes
from services.engine.torch.attention import prompts
from services.engine.torch.attention.page_pieces import OnDevice
from services.engine.torch.attention.prompts import Packing
from services.engine.torch.checkpoint import load_model, open_checkpoint
from services.engine.torch.model.fused.fuse import fuse
from services.engine.torch.model.fused.plain_kernels import PLAIN
from services.engine.torch.model.fused.residuals import Residuals
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.pools import Pools
from services.engine.torch.runner import TorchRunner
from services.engine.torch.step_buffers import StepBuffers
from services.engine.torch.step_graphs import StepGraphs
from services.engine.torch.step_sizes import bucket_rows, run_steps
from services.kv.tails import PoolSizes
from services.values.errors import ProtocolError
from services.values.request import SamplingParams

PAGE_SIZE, NUM_PAGES, NUM_SLOTS, MAX_ROWS = 16, 96, 8, 5
GREEDY = SamplingParams(temperature=0)
GRAPHED = [name for name in ("llama", "qwen3", *FAMILIES) if name != "jamba"]
QUICK = ("gpt_oss", "falcon_h1", "deepseek_v3")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Nothing is computed by numpy, single tokens attend by parts.

    No garbage is collected before a capture: with all that tests import that takes as long as the capture.
    Nor is there room for as many tokens of contexts, each of which is computed.
    """
    monkeypatch.setattr(step_graphs, "_frozen", nullcontext)
    monkeypatch.setattr(step_sizes, "_LATENT_SEEN", (512, 2048, 4096))
    monkeypatch.setattr(step_sizes, "_LEAST_SEEN", 1024)
    for name in ("even_activations", "fuse_norms"):
        monkeypatch.setattr(packed_model, name, lambda model: None)
    monkeypatch.setattr(packed_model, "forward_in_place", lambda *_: None)
    attend = tape.recorded(attend_parts_plainly)
    gather, by_rows = tape.recorded(gather_with_room), tape.recorded(attend_rows_plainly)
    monkeypatch.setattr(prompts, "varlen_attn", tape.recorded(varlen_with_room))

    def choose_packings(pools, num_heads, are_capped):
        return tuple(Packing(gather, attend=by_rows if is_capped else None) for is_capped in are_capped)

    monkeypatch.setattr(runner_pools, "choose_packings", choose_packings)

    def choose(pools, num_heads):
        return tuple(
            None if kv.is_latent else OnDevice(attend, max(heads), num_programs=8)
            for kv, heads in zip(pools, num_heads, strict=True)
        )

    monkeypatch.setattr(runner_pools, "choose_in_place", choose)


def gather_with_room(reads, num_tokens, kv, layer):
    """Reads without slots are none; what nobody reads is NaN."""
    return gather_plainly(reads[reads[:, 2] > reads[:, 1]], num_tokens, kv, layer)


def varlen_with_room(query, key, value, row_starts, seen_starts, longest, most_seen, **settings):
    """As flash attention does: keys may be more than are seen, and sequences shorter than the longest."""
    assert max(row_starts.diff().tolist()) <= longest
    assert max(seen_starts.diff().tolist()) <= most_seen
    num_seen = int(seen_starts[-1])
    lengths = row_starts.diff().max().item(), seen_starts.diff().max().item()
    of_seen = key[:num_seen], value[:num_seen], row_starts, seen_starts
    return varlen_plainly(query, *of_seen, *lengths, **settings)


class Made:
    def __init__(
        self, family, capture, max_rows=MAX_ROWS, num_pages=NUM_PAGES, page_size=PAGE_SIZE, **limits
    ):
        model = load_model(open_checkpoint(tiny_checkpoint(family), "float32"), torch.device("cpu"))
        self.model = PackedModel(model)
        self.model.scan_tokens = None
        self.pools = Pools(
            self.model.probed,
            num_pages=num_pages,
            page_size=page_size,
            sizes=PoolSizes(num_window_pages=num_pages, num_slots=NUM_SLOTS),
            model_fingerprint=0,
            device=torch.device("cpu"),
        )
        self.graphs = StepGraphs(self.model, self.pools, max_rows, capture, **limits)

    def memory(self):
        states = [] if self.pools.slots is None else list(self.pools.slots.of_state.values())
        return [kv.numbers for kv in self.pools.layers.pools] + states

    def randomize(self, seed):
        generator = torch.Generator().manual_seed(seed)
        for numbers in self.memory():
            numbers.copy_(torch.randn(numbers.shape, generator=generator) / 4)

    def step(self, num_rows, seed):
        """Rows share pages, and each writes one of its own."""
        chance = random.Random(seed)
        tails = len(self.pools.layers.pools) - 1
        chunks = []
        for row in range(num_rows):
            pages = [*range(chance.randrange(4)), *range(20 + 4 * row, 21 + 4 * row + chance.randrange(3))]
            start = chance.randrange((len(pages) - 1) * PAGE_SIZE, len(pages) * PAGE_SIZE)
            slot = row if self.pools.slots is not None else None
            views = (TailPages(0, pages),) * tails
            token_id = chance.randrange(5, 500)
            chunks.append(Chunk([token_id], start, pages, True, GREEDY, tails=views, slot=slot))
        return chunks

    def prompts(self, lengths, seed):
        """Prompts go on behind pages that all share, and write some of their own."""
        chance, next_page, chunks = random.Random(seed), 44, []
        tails = len(self.pools.layers.pools) - 1
        for length in lengths:
            start = chance.randrange(4 * PAGE_SIZE)
            shared, end_page = start // PAGE_SIZE, -(-(start + length) // PAGE_SIZE)
            pages = [*range(shared), *range(next_page, next_page + end_page - shared)]
            next_page += end_page - shared
            ids = [chance.randrange(5, 500) for _ in range(length)]
            chunks.append(Chunk(ids, start, pages, True, GREEDY, tails=(TailPages(0, pages),) * tails))
        return chunks


def computed(made, chunks, by, rows=None):
    """The logits, the most probable ids, and what the step left in memory."""
    rows = range(sum(len(chunk.token_ids) for chunk in chunks)) if rows is None else rows
    with torch.inference_mode():
        step = by(chunks, rows)
        assert step is not None
        return step.logits.clone(), step.most_probable, [numbers.clone() for numbers in made.memory()]


def check_family(family):
    made = Made(family, either := tape.Either())
    assert made.graphs._buckets, family
    # Graphs of 1, 4 and 5 rows, each more than once, so that one finds what its last step has left.
    for seed, num_rows in enumerate((1, 3, 5, 4, 5, 1)):
        chunks = made.step(num_rows, seed)
        made.randomize(seed)
        replayed, most_probable, left = computed(made, chunks, made.graphs.compute)
        made.randomize(seed)
        with either.computing():
            fresh, _, left_fresh = computed(made, chunks, made.graphs.compute)
        assert torch.equal(replayed, fresh)
        assert all(map(torch.equal, left, left_fresh))
        assert torch.equal(most_probable, replayed.argmax(1))
        made.randomize(seed)
        anew, _, left_anew = computed(
            made, chunks, lambda chunks, rows: made.model.compute(made.pools, chunks, rows)
        )
        torch.testing.assert_close(replayed, anew, atol=2e-3, rtol=1e-3)
        for own, other in zip(left, left_anew, strict=True):
            torch.testing.assert_close(own, other, atol=2e-3, rtol=1e-3)
    assert made.graphs.counts == {"graph": 12}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_replayed_step_is_a_fresh_one_to_the_bit(subtests):
    for family in QUICK:
        with subtests.test(family):
            check_family(family)


@pytest.mark.exact
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", [name for name in GRAPHED if name not in QUICK])
def test_a_replayed_step_is_a_fresh_one_in_every_family(family):
    check_family(family)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_drafts_are_rows(subtests):
    made = Made("llama", tape.capture)
    made.randomize(1)
    [first, second] = made.step(2, 1)
    drafting = replace(first, token_ids=[*first.token_ids, 7, 8], num_drafts=2, start=20, pages=[1, 2])
    chunks = [second, drafting]
    replayed, _, _ = computed(made, chunks, made.graphs.compute)
    anew, _, _ = computed(made, chunks, lambda c, rows: made.model.compute(made.pools, c, rows))
    torch.testing.assert_close(replayed, anew, atol=2e-3, rtol=1e-3)
    recurrent = Made("falcon_h1", tape.computed_again)
    with subtests.test("states of drafts wait"):
        drafting = replace(drafting, slot=3, tails=second.tails)
        assert recurrent.graphs.compute([drafting], range(3)) is None


def kept_by(made, chunks, by, counts):
    """The logits of a step with drafts, what it left in memory, and that once `counts` tokens are kept."""
    rows = range(sum(len(chunk.token_ids) for chunk in chunks))
    with torch.inference_mode():
        step = by(chunks, rows)
        assert step is not None
        logits, before = step.logits.clone(), [numbers.clone() for numbers in made.memory()]
        step.keep(counts)
    return [logits, *before, *(numbers.clone() for numbers in made.memory())]


def check_drafts(family):
    made = Made(family, either := tape.Either(), max_rows=12, max_drafts=2)
    runs = [each.buffers.room.runs for each in made.graphs._buckets if each.buffers.room.runs]
    assert {(each.num_runs, each.num_tokens) for each in runs} == {(n, k) for n in (1, 2, 4) for k in (2, 3)}
    for nth, (lengths, counts) in enumerate(
        [([3], [3]), ([3], [1]), ([1, 2], [2]), ([2, 1, 3], [1, 2]), ([3, 3, 3, 2], [3, 2, 1, 2])]
    ):
        chunks = [
            replace(chunk, token_ids=[*chunk.token_ids, 7, 8][:length], num_drafts=length - 1, pages=pages)
            for chunk, length in zip(made.step(len(lengths), nth), lengths, strict=True)
            for pages in [[*chunk.pages, 60 + chunk.slot]]
        ]
        chunks = [replace(c, tails=(TailPages(0, c.pages),) * len(c.tails)) for c in chunks]
        chunks[0] = replace(chunks[0], start=0 if nth == 1 else chunks[0].start)
        made.randomize(nth)
        replayed = kept_by(made, chunks, made.graphs.compute, counts)
        made.randomize(nth)
        with either.computing():
            fresh = kept_by(made, chunks, made.graphs.compute, counts)
        assert all(map(torch.equal, replayed, fresh))
        made.randomize(nth)
        anew = kept_by(made, chunks, lambda c, rows: made.model.compute(made.pools, c, rows), counts)
        of_states = slice(1 + len(made.pools.layers.pools), 1 + len(made.memory()))
        for what, (own, other) in enumerate(zip(replayed, anew, strict=True)):
            if what not in range(of_states.start, of_states.stop):  # A graph stores no state until then.
                torch.testing.assert_close(own, other, atol=2e-3, rtol=1e-3)
    assert made.graphs.counts == {"graph": 10}
    prompt = Chunk(
        range(5, 9), 0, [9], True, GREEDY, slot=7, tails=(TailPages(0, [9]),) * len(chunks[0].tails)
    )
    assert made.graphs.compute([*chunks, prompt], range(15)) is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "falcon_h1" else pytest.mark.exact)
        for name in ("falcon_h1", "qwen3_5", "qwen3_next", "nemotron_h", "bamba")
    ],
)
def test_drafts_of_recurrent_layers_are_replayed(family):
    check_drafts(family)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_states_that_drafts_leave_wrong_are_refused(monkeypatch, caplog, subtests):
    own = StepBuffers.keep
    monkeypatch.setattr(StepBuffers, "keep", lambda self, counts: own(self, [3 - each for each in counts]))
    for page_size in (PAGE_SIZE, 1):
        with subtests.test(page_size=page_size):
            caplog.clear()
            made = Made("falcon_h1", tape.computed_again, max_rows=12, max_drafts=2, page_size=page_size)
            assert made.graphs._buckets
            assert {each.buffers.room.runs for each in made.graphs._buckets} == {None}
            assert caplog.text.count("reason='states differ by") == 6


def check_scans(family):
    made = Made(family, either := tape.Either(), max_rows=2, max_prompt_tokens=70)
    assert [each.size[:2] for each in made.graphs._buckets] == [(0, 1), (0, 2), (70, 0)]
    for nth, start in enumerate((0, 33)):
        [chunk] = made.prompts([70], nth)
        end_page = -(-(start + 70) // PAGE_SIZE)
        pages = list(range(20, 20 + end_page))
        tails = (TailPages(0, pages),) * len(chunk.tails)
        chunks = [replace(chunk, start=start, pages=pages, tails=tails, slot=3)]
        left = []
        anew = lambda c, rows: made.model.compute(made.pools, c, rows)  # noqa: E731
        graphs = made.graphs.compute
        for way, by in [(nullcontext(), graphs), (either.computing(), graphs), (nullcontext(), anew)]:
            made.randomize(nth)
            with way:
                logits, _, memory = computed(made, chunks, by, [69])
            left.append([logits, *memory])
        assert all(map(torch.equal, left[0], left[1]))
        for replayed, other in zip(left[0], left[2], strict=True):
            torch.testing.assert_close(replayed, other, atol=2e-3, rtol=1e-3)
    assert made.graphs.counts == {"graph": 4}
    other = replace(
        chunks[0], slot=4, pages=list(range(50, 57)), tails=(TailPages(0, range(50, 57)),) * len(tails)
    )
    for others in (
        [replace(chunks[0], token_ids=chunks[0].token_ids[:-1])],
        [chunks[0], other],
        made.step(2, 1) + chunks,
    ):
        assert made.graphs.compute(others, [0]) is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "qwen3_5" else pytest.mark.exact)
        for name in ("qwen3_5", "falcon_h1", "qwen3_5_moe", "qwen3_next", "nemotron_h", "bamba")
    ],
)
def test_whole_chunks_are_scanned_in_a_graph(family):
    check_scans(family)


def kimi_linear(sizes):
    """Delta nets behind layers with latents."""
    return transformers.KimiLinearConfig(
        **sizes.common | dict(num_key_value_heads=sizes.num_heads, num_hidden_layers=4),
        layer_types=["full_attention", "linear_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        kv_lora_rank=sizes.hidden_size // 2,
        qk_rope_head_dim=sizes.head_dim // 2,
        qk_nope_head_dim=sizes.head_dim,
        v_head_dim=sizes.head_dim,
        linear_head_dim=sizes.head_dim,
        linear_num_heads=sizes.num_heads,
    )


@pytest.mark.skipif(not hasattr(transformers, "KimiLinearConfig"), reason="transformers is too old")
@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_that_pad_leave_the_first_ones_state_behind_latents_too(monkeypatch):
    """A copy of the first row has its slot, and attends to nothing where contexts are expanded."""
    monkeypatch.setitem(FAMILIES, "kimi_linear", Family(kimi_linear, 4, fill_family))
    made = Made("kimi_linear", tape.computed_again, max_prompt_tokens=70)
    [prompt] = made.prompts([70], 1)
    for chunks in [made.step(3, 1), made.step(1, 2), [replace(prompt, slot=3)]]:
        left = []
        for by in (made.graphs.compute, lambda c, rows: made.model.compute(made.pools, c, rows)):
            made.randomize(1)
            logits, _, memory = computed(made, chunks, by, [sum(len(c.token_ids) for c in chunks) - 1])
            left.append([logits, *memory])
        for own, other in zip(*left, strict=True):
            torch.testing.assert_close(own, other, atol=2e-3, rtol=1e-3)
    assert made.graphs.counts == {"graph": 3}


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_scan_takes_no_more_memory_than_is_left(monkeypatch, caplog):
    monkeypatch.setattr(step_graphs, "_peak_bytes", lambda device, compute: 1000)
    for budget, sizes in ((1000, [(0, 1), (70, 0)]), (999, [(0, 1)])):
        made = Made("falcon_h1", tape.computed_again, max_rows=1, max_prompt_tokens=70, budget=budget)
        assert [each.size[:2] for each in made.graphs._buckets] == sizes
    assert caplog.text.count("a scan takes 1000 bytes of the 999 left for graphs") == 1


@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_no_bucket_takes_is_computed_anew(subtests):
    made = Made("llama", tape.computed_again)
    prompt = Chunk([5, 6], 0, [1], True, GREEDY)
    unstored = replace(made.step(1, 1)[0], store_from=99)
    cases = {
        "a prompt": [prompt],
        "more rows than the largest": made.step(6, 1),
        "none is stored": [unstored],
    }
    for name, chunks in cases.items():
        with subtests.test(name):
            assert made.graphs.compute(chunks, range(len(chunks))) is None
    assert made.graphs.counts == {"eager": 3}
    with torch.inference_mode():
        some = made.graphs.compute(made.step(3, 1), [0, 2])
    assert some is not None and some.logits.shape[0] == 2


def refused(monkeypatch, caplog, forward=None, capture=tape.capture):
    """Return which buckets are left, and what the log says."""
    if forward is not None:
        own = packed_model.PackedModel.logits_of
        monkeypatch.setattr(packed_model.PackedModel, "logits_of", lambda *args: forward(own(*args), args[0]))
    made = Made("llama", capture)
    return [each.buffers.num_rows for each in made.graphs._buckets], caplog.text


def keeping(logits, packed):
    packed.model.model.kept = {"of a step": [logits]}
    return logits


def branching(logits, packed):
    return logits if logits[0, 0] > 0 else logits + 1


def finding(logits, packed):
    return logits if len((logits > 0).nonzero()) else logits + 1


def asking(logits, packed):
    return logits / max(1.0, logits.abs().max().item())


def wrong(compute):
    compute()
    return lambda: None


def short_of_memory(compute):
    if compute.args[0].num_rows > 2:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return tape.capture(compute)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_graph_that_would_be_wrong_is_refused(monkeypatch, caplog, subtests):
    cases = {
        "keeps a tensor": (keeping, tape.capture, [], "keeps a tensor"),
        "branches on a value": (branching, tape.capture, [], "is_nonzero waits for the device"),
        "asks for places": (finding, tape.capture, [], "nonzero waits for the device"),
        "asks for a number": (asking, tape.capture, [], "item waits for the device"),
        "differs": (None, wrong, [], "graph_wrong"),
        "memory is short": (None, short_of_memory, [1, 2], "out of memory"),
    }
    for name, (forward, capture, kept, said) in cases.items():
        with subtests.test(name), monkeypatch.context() as patching:
            caplog.clear()
            left, log = refused(patching, caplog, forward, capture)
            assert left == kept
            assert said in log


class Stream:
    """It is a stream, or a capture on one, of a torch whose captures are broken when they end."""

    current = "the default one"

    def __init__(self, stream, *_args, **_settings):
        self._stream, self._before = stream, None

    def wait_stream(self, other):
        pass

    def __enter__(self):
        self._before, Stream.current = Stream.current, self._stream

    def __exit__(self, *_):
        Stream.current = self._before


class BrokenCapture(Stream):
    def __init__(self, graph, pool, stream, **_settings):
        super().__init__(stream)

    def __exit__(self, *_):
        raise RuntimeError("cudaErrorStreamCaptureInvalidated")


def leave_nothing(monkeypatch, allocator_knows):
    under_way = []

    def end(device_index, pool):
        under_way.append((device_index, pool))
        if allocator_knows:
            raise RuntimeError("not currently recording to mempool_id")

    of_cuda = dict(
        graph_pool_handle=lambda: "pool", Stream=Stream, stream=Stream, graph=BrokenCapture, CUDAGraph=object
    )
    for name, own in of_cuda.items():
        monkeypatch.setattr(torch.cuda, name, own)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(Stream.current))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(step_graphs, "_no_waiting", nullcontext)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    capture = step_graphs.CudaCapture(torch.device("cuda", 3))
    with pytest.raises(RuntimeError, match="Invalidated"):
        capture(lambda: None)
    while isinstance(Stream.current, Stream):
        Stream.current = Stream.current._stream
    assert Stream.current == "the default one"
    assert under_way == [(3, "pool")]


def test_a_capture_that_is_broken_leaves_nothing(monkeypatch, subtests):
    """The capture here ends as torch's does, which raises before the rest of it is undone."""
    for allocator_knows in (True, False):
        with subtests.test(allocator_knows=allocator_knows), monkeypatch.context() as patching:
            leave_nothing(patching, allocator_knows)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_every_bucket_is_tried_itself(monkeypatch, caplog, subtests):
    """Though a step as large as the trial's would be computed in a smaller one, or without any."""

    def wrong_if_large(compute):
        buffers = compute.args[0]
        is_large = buffers.num_rows > 300 or buffers.room.num_seen == 20_000
        return wrong(compute) if is_large else tape.computed_again(compute)

    with subtests.test("prompts of a small pool"):
        made = Made("llama", wrong_if_large, max_rows=0, max_prompt_tokens=600, num_pages=6)
        assert [bucket.size[0] for bucket in made.graphs._buckets] == [64, 128, 256]
        assert caplog.text.count("graph_wrong") == 3
    caplog.clear()
    with subtests.test("contexts of latents"):
        monkeypatch.setattr(step_sizes, "_LATENT_SEEN", (4096, 20_000))
        made = Made("deepseek_v3", wrong_if_large, max_rows=4)
        assert [bucket.size[1:] for bucket in made.graphs._buckets] == [(1, 4096), (4, 4096)]
        assert caplog.text.count("graph_wrong") == 2


def test_captures_collect_no_garbage():
    with step_graphs._frozen():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_buckets_reach_the_largest_step():
    assert bucket_rows(0) == ()
    assert bucket_rows(1) == (1,)
    assert bucket_rows(64)[0] == 64
    assert bucket_rows(70)[:2] == (70, 64)
    assert len(bucket_rows(512)) <= 20 and bucket_rows(512)[-1] == 1
    rooms = [(room.num_singles, room.runs.num_runs, room.runs.num_tokens) for room in run_steps(21, 5)]
    assert rooms == [(18, 3, 6), (12, 3, 4), (6, 3, 2)] + [
        (num_runs * tokens, num_runs, tokens) for num_runs in (2, 1) for tokens in (6, 4, 2)
    ]
    assert not [*run_steps(64, 0), *run_steps(5, 5)]


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_rank_that_only_prefills(subtests):
    for family, sizes in {"llama": [(50, 0)], "falcon_h1": [(50, 0)], "deepseek_v3": [(50, 0)]}.items():
        with subtests.test(family):
            made = Made(family, tape.computed_again, max_rows=0, max_prompt_tokens=50)
            assert [bucket.size[:2] for bucket in made.graphs._buckets] == sizes
            assert all(not numbers.any() for numbers in made.memory())


@pytest.mark.usefixtures("as_on_a_gpu")
def test_steps_that_no_graph_is_for_are_named(monkeypatch, caplog, subtests):
    caplog.set_level(logging.INFO)

    def left_out(family):
        caplog.clear()
        made = Made(family, tape.computed_again, max_rows=1, max_prompt_tokens=16)
        said = [record.getMessage() for record in caplog.records if "graphs_left_out" in record.getMessage()]
        return [bucket.size[:2] for bucket in made.graphs._buckets], said

    with subtests.test("none"):
        assert left_out("llama") == ([(0, 1), (16, 0), (16, 1)], [])
    with subtests.test("parts of a chunk"):
        sizes, [said] = left_out("falcon_h1")
        assert sizes == [(0, 1), (16, 0)] and "a scan that is padded leaves another state" in said
    monkeypatch.setattr(runner_pools, "choose_packings", lambda pools, *_: [None] * len(pools))
    with subtests.test("prompts"):
        sizes, [said] = left_out("llama")
        assert sizes == [(0, 1)] and "steps=prompts reason='they attend one by one'" in said
    with subtests.test("all"):
        sizes, [said] = left_out("deepseek_v3")
        assert sizes == [] and "steps=all" in said


@pytest.mark.usefixtures("as_on_a_gpu")
def test_prompts_alone_are_wrong(monkeypatch, caplog):
    """Beside many right rows."""
    own = packed_model.PackedModel.logits_of

    def spoiled(self, pools, buffers):
        logits = own(self, pools, buffers).clone()
        if buffers.prompts is not None:
            logits[buffers.num_singles :] += 100 * torch.randn_like(logits[buffers.num_singles :])
        return logits

    monkeypatch.setattr(packed_model.PackedModel, "logits_of", spoiled)
    made = Made("llama", tape.computed_again, max_prompt_tokens=40)
    assert {bucket.size[0] for bucket in made.graphs._buckets} == {0}
    assert caplog.text.count("graph_wrong") == 2


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_trial_that_fails_ends_no_start(monkeypatch, caplog):
    def compute(*_args, **_settings):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(packed_model.PackedModel, "compute", compute)
    made = Made("llama", tape.computed_again)
    assert not made.graphs._buckets
    assert caplog.text.count("out of memory") == len(bucket_rows(MAX_ROWS))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_takes_no_bucket_of_many_times_its_rows(monkeypatch):
    monkeypatch.setattr(step_sizes, "_PROMPT_TOKENS", step_sizes._PROMPT_TOKENS[-1:])
    made = Made("llama", tape.computed_again, max_rows=0, max_prompt_tokens=600)
    assert [bucket.size[:2] for bucket in made.graphs._buckets] == [(600, 0)]
    with torch.inference_mode():
        assert made.graphs.compute(made.prompts([120], 1), [119]) is None
        assert made.graphs.compute(made.prompts([210], 1), [209]) is not None


@pytest.mark.usefixtures("as_on_a_gpu")
def test_slots_are_checked(subtests):
    made = Made("falcon_h1", tape.computed_again)
    first, second = made.step(2, 1)
    for slots in [(None, 1), (1, 1), (-1, 0), (NUM_SLOTS, 0)]:
        with subtests.test(slots=slots), pytest.raises(ProtocolError, match="slots of their own"):
            chunks = [replace(chunk, slot=slot) for chunk, slot in zip((first, second), slots, strict=True)]
            made.graphs.compute(chunks, [0, 1])


def check_prompts(family):
    made = Made(family, either := tape.Either(), max_prompt_tokens=100)
    sizes = [bucket.size[:2] for bucket in made.graphs._buckets if bucket.size[0]]
    assert sizes == [(64, 0), (64, MAX_ROWS), (100, 0), (100, MAX_ROWS)]
    for num_rows, lengths in ((0, [2]), (0, [40, 21]), (3, [64]), (5, [2, 3, 70]), (2, [65])):
        chunks = [*made.step(num_rows, 7), *made.prompts(lengths, num_rows)]
        random.Random(num_rows).shuffle(chunks)
        made.randomize(1)
        ends = list(accumulate(len(chunk.token_ids) for chunk in chunks))
        rows = [end - 1 for end in ends]
        with torch.inference_mode():
            replayed, most_probable, left = computed(made, chunks, made.graphs.compute, rows)
            made.randomize(1)
            with either.computing():
                fresh, _, left_fresh = computed(made, chunks, made.graphs.compute, rows)
            assert torch.equal(replayed, fresh)
            assert all(map(torch.equal, left, left_fresh))
            assert torch.equal(most_probable, replayed.argmax(1))
            made.randomize(1)
            anew, _, left_anew = computed(
                made, chunks, lambda chunks, rows: made.model.compute(made.pools, chunks, rows), rows
            )
        torch.testing.assert_close(replayed, anew, atol=2e-3, rtol=1e-3)
        for own, other in zip(left, left_anew, strict=True):
            torch.testing.assert_close(own, other, atol=2e-3, rtol=1e-3)
    assert made.graphs.counts == {"graph": 10}
    assert made.graphs.compute(made.prompts([101], 1), [100]) is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        *(
            pytest.param(name, marks=pytest.mark.exact)
            for name in ("deepseek_v3", "llama4", "gemma2", "llama", "qwen3", "gemma3", "qwen3_moe", "gemma4")
        ),
    ],
)
def test_prompts_are_replayed_too(family):
    check_prompts(family)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_contexts_of_latents_have_rooms(monkeypatch, subtests):
    monkeypatch.setattr(step_sizes, "_LATENT_SEEN", (64, 128, 500))
    made = Made("deepseek_v3", tape.computed_again, max_rows=4)
    assert [each.size[1:] for each in made.graphs._buckets] == [
        (rows, seen) for rows in (1, 4) for seen in (64, 128, 500)
    ]
    [chunk] = made.step(1, 1)
    pages = list(range(40))
    for end, num_seen in {1: 64, 64: 64, 65: 128, 166: None, 167: 500, 500: 500, 501: None}.items():
        with subtests.test(end=end):
            bucket = made.graphs._bucket_for(
                step_graphs._Step.of([replace(chunk, start=end - 1, pages=pages)])
            )
            assert (bucket and bucket.size[2]) == num_seen
    with subtests.test("no more than half of the budget"):
        rooms = step_sizes.latent_steps(3, num_heads=2, itemsize=4, budget=2 * 128 * 2 * 512 * 4 - 1)
        assert [(room.num_singles, room.num_seen) for room in rooms] == [(3, 64), (1, 64)]


def check_runner(family, monkeypatch):
    """Sequences draft right and wrong tokens; some of their steps have prompts."""

    def open_graphs(model, pools, max_rows, budget, *limits):
        return StepGraphs(model, pools, max_rows, tape.capture, None, *limits)

    monkeypatch.setattr(torch_runner, "open_graphs", open_graphs)
    monkeypatch.setattr(PackedModel, "pack", lambda *_: None)  # A kernel of the CPU's is on no tape.
    directory, sizes = tiny_checkpoint(family), PoolSizes(max_running_requests=6, chunk_size=64)
    limits = dict(max_rows=12, max_prompt_tokens=40, max_drafts=3)
    runner = TorchRunner(directory, num_pages=96, page_size=16, sizes=sizes, self_check=False, **limits)
    tables, chance, sequences = PageTables(runner), random.Random(1), []
    for length in (37, 21, 5):
        prompt = random_prompt(length, seed=length)
        expected = reference_generation(directory, tuple(prompt), 24).token_ids

        def guess(done, expected=expected):
            right = list(expected[done : done + chance.randrange(1, 4)])
            cut = chance.randrange(len(right) + 1)
            return right[:cut] + [token_id ^ 1 for token_id in right[cut:]]

        carried, pages = Carried(tables), tables.take(length + 24)
        sequences.append(Guessing(prompt, pages, 17, carried=carried, guess=guess))
    generate(runner, sequences, 16)
    for each in sequences:
        reference = reference_generation(directory, tuple(each.ids[: each.prompt_len]), 16)
        assert count_near_ties(reference, each.output_ids[:16]) == 0
        assert max(each.step_sizes) > 1 and 1 in each.step_sizes
    counts = runner.steps_by_way
    runner.close()
    return counts


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "falcon_h1" else pytest.mark.exact)
        for name in ("falcon_h1", "deepseek_v3", "gemma2", "llama4", "gpt_oss", "qwen3_5", "nemotron_h")
    ],
)
def test_what_a_runner_replays_is_what_transformers_generates(family, monkeypatch):
    counts = check_runner(family, monkeypatch)
    assert counts["graph"] > 2 * counts["eager"]


def fused_by(monkeypatch, kernels):
    own = packed_model.PackedModel.__init__

    def fuse_it(self, *args):
        own(self, *args)
        self.fused = fuse(self.model, self.probed.read_linears, kernels)

    monkeypatch.setattr(packed_model.PackedModel, "__init__", fuse_it)


def check_sums(family, monkeypatch):
    """Sums that norms compute have the bits that they have elsewhere."""
    with monkeypatch.context() as patching:
        fused_by(patching, PLAIN)
        made = Made(family, tape.capture, max_rows=2)
        patching.setattr(Residuals, "fusing", lambda self: nullcontext())
        apart = Made(family, tape.capture, max_rows=2)
    assert len(made.graphs._buckets) == len(apart.graphs._buckets) > 0 and made.model.fused.adds
    for seed in (1, 2):
        chunks = made.step(2, seed)
        made.randomize(seed)
        together, _, left = computed(made, chunks, made.graphs.compute)
        apart.randomize(seed)
        alone, _, left_alone = computed(apart, chunks, apart.graphs.compute)
        assert torch.equal(together, alone)
        assert all(map(torch.equal, left, left_alone))


@pytest.mark.exact
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_sums_that_norms_compute_have_the_same_bits(family, monkeypatch):
    check_sums(family, monkeypatch)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_sums_that_are_wrong_in_a_step_are_given_up(monkeypatch, caplog):
    """In the trial at the model's start they were right."""

    def wrong(first, second, total, weight, form):
        normed = PLAIN.add_and_normalize(first, second, total, weight, form)
        return normed if first.shape[1] == 7 else normed.flip(-1)

    fused_by(monkeypatch, PLAIN._replace(add_and_normalize=wrong))
    made = Made("llama", tape.capture, max_rows=2)
    assert not made.model.fused.adds
    assert [bucket.size for bucket in made.graphs._buckets] == [(0, 1, 0), (0, 2, 0)]
    assert caplog.text.count("graph_wrong") == caplog.text.count("fused_kernels_unusable of=sums") == 1
