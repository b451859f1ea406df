"""A small checkpoint drafts for another one."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from engine.torch.sequences import GREEDY, PageTables, Sequence
from exactness.checkpoints import tiny_checkpoint
from exactness.draft_checkpoints import grown_checkpoint
from exactness.reference import random_prompt
from services.engine.paged.model_runner import Chunk
from services.engine.torch import draft as draft_module
from services.engine.torch import runner as runner_module
from services.engine.torch.draft import DraftModelSettings
from services.engine.torch.model.packed_model import PackedModel
from services.engine.torch.runner import TorchRunner
from services.values.errors import ConfigError
from services.values.request import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3, logprobs=2)


def make_runner(target=None, draft=None, fuses=True, **settings):
    draft = DraftModelSettings(draft or tiny_checkpoint(), self_check=False, **settings)
    target = target or grown_checkpoint()
    return TorchRunner(target, num_pages=64, page_size=16, self_check=False, draft=draft, fuses=fuses)


@pytest.fixture(scope="module")
def runner():
    runner = make_runner(catch_up_tokens=24)
    yield runner
    runner.close()


class Drafting(Sequence):
    """A decode rank's sequence has drafts of the runner's own."""

    def __init__(self, runner, prompt, tables, *, num_drafts=3, spare=60, sampling=GREEDY):
        super().__init__(prompt, tables.take(len(prompt) + spare), 20, sampling=sampling)
        runner.draft.lent(self.pages)
        self.num_drafts, self.drafted, self.accepted, self.proposals = num_drafts, 0, 0, []

    def take(self, chunk, sampled):
        self.drafted += chunk.num_drafts
        self.accepted += max(0, len(sampled) - 1)
        super().take(chunk, sampled)


def step(runner, sequences):
    chunks = [sequence.next_chunk() for sequence in sequences]
    decoding = [i for i, sequence in enumerate(sequences) if sequence.start == len(sequence.ids) - 1]
    page_size = runner.layout.page_size
    asked = [
        replace(chunks[i], pages=chunks[i].pages[: -(-chunks[i].end // page_size)]) for i in decoding
    ]  # as the core does: pages for what is there
    counts = [sequences[i].num_drafts for i in decoding]
    for i, drafts in zip(decoding, runner.draft.propose(asked, counts) if asked else [], strict=True):
        sequences[i].proposals.append(drafts)
        chunks[i] = replace(chunks[i], token_ids=[*chunks[i].token_ids, *drafts], num_drafts=len(drafts))
    for sequence, chunk, sampled in zip(sequences, chunks, runner.run(chunks), strict=True):
        sequence.take(chunk, sampled)


def run(runner, sequences, max_tokens):
    while any(len(sequence.output_ids) < max_tokens for sequence in sequences):
        step(runner, [s for s in sequences if len(s.output_ids) < max_tokens])


def plain(runner, prompt, max_tokens, sampling=GREEDY):
    sequence = Drafting(runner, prompt, PageTables(runner), num_drafts=0, sampling=sampling)
    run(runner, [sequence], max_tokens)
    return sequence.output_ids[:max_tokens]


def test_output_is_that_without_drafts_and_many_come_true(subtests, runner):
    for sampling in [GREEDY, SAMPLED]:
        with subtests.test(sampling=sampling):
            prompts = [random_prompt(length, seed=length) for length in (5, 33, 61)]
            tables = PageTables(runner)
            sequences = [Drafting(runner, prompt, tables, sampling=sampling) for prompt in prompts]
            run(runner, sequences, 40)
            for sequence, prompt in zip(sequences, prompts, strict=True):
                assert sequence.output_ids[:40] == plain(runner, prompt, 40, sampling)
            accepted, drafted = (sum(getattr(s, name) for s in sequences) for name in ("accepted", "drafted"))
            assert accepted / drafted > (0.75 if sampling is GREEDY else 0.5)


def test_drafts_are_what_the_small_model_says_within_its_windows(subtests):
    with subtests.test("drafts are what the small model says"):
        # Its own greedy continuation, whether its KV is of the prompt, of drafts that came true, or late.
        runner, draft = make_runner(catch_up_tokens=24), make_runner(tiny_checkpoint())
        prompt = random_prompt(50, seed=1)
        tables = PageTables(runner)
        sequence = Drafting(runner, prompt, tables, num_drafts=4)
        run(runner, [sequence], 30)
        for ids, drafts in zip(starts(sequence), sequence.proposals, strict=True):
            assert list(drafts) == plain(draft, ids, 4)
    with subtests.test("windows are kept whole"):
        runner = make_runner(tiny_checkpoint("gemma3"), tiny_checkpoint("gemma3"))
        assert len(runner.layout.groups) == 2 and runner.layout.draft.group.layer_ids == (0, 1, 2, 3)
        runner.close()
    with subtests.test("a draft of windows sees what it is to see"):
        draft = tiny_checkpoint("mistral", window=24)
        runner, small = make_runner(draft=draft), make_runner(draft)
        sequence = Drafting(runner, random_prompt(60, seed=1), PageTables(runner))
        run(runner, [sequence], 8)
        for ids, drafts in zip(starts(sequence), sequence.proposals, strict=True):
            assert list(drafts) == plain(small, ids, 3)


def starts(sequence):
    """The ids before each of its proposals."""
    ids, length = sequence.ids, sequence.prompt_len + 1
    for drafts in sequence.proposals:
        yield ids[:length]
        length += 1 + common(drafts, ids[length:])


def common(drafts, ids):
    pairs = enumerate(zip(drafts, ids, strict=False))
    return next((i for i, (draft, token_id) in pairs if draft != token_id), len(drafts))


def test_what_is_missing_is_caught_up_with(subtests, runner):
    with subtests.test("what is missing is caught up with by slices"):
        prompt = random_prompt(60, seed=9)
        sequence = Drafting(runner, prompt, PageTables(runner))
        run(runner, [sequence], 1)
        runner.draft.lent(
            sequence.pages
        )  # as if the target's KV had come from elsewhere, without the draft's
        run(runner, [sequence], 12)
        assert sequence.output_ids[:12] == plain(runner, prompt, 12)
        assert [len(drafts) for drafts in sequence.proposals[:4]] == [0, 0, 3, 3]  # 24, 24, the rest
        assert sequence.accepted >= 3
    with subtests.test("who lacks much does not keep others from drafting"):
        tables = PageTables(runner)
        long, short = (Drafting(runner, random_prompt(n, seed=n), tables) for n in (100, 6))
        run(runner, [long, short], 1)
        runner.draft.lent(long.pages)
        step(runner, [long, short])
        assert [len(long.proposals[-1]), len(short.proposals[-1])] == [0, 3]


def test_drafts_are_of_their_own_sequence_whatever_pages_they_have(subtests, runner):
    with subtests.test("drafts go past the pages"):
        # They are as many at the end of a page, and what is behind it is computed again.
        prompt = random_prompt(15, seed=4)
        sequence = Drafting(runner, prompt, PageTables(runner), num_drafts=5)
        run(runner, [sequence], 40)
        assert {len(drafts) for drafts in sequence.proposals} == {5}
        assert sequence.output_ids[:40] == plain(runner, prompt, 40)
        assert sequence.accepted / sequence.drafted > 0.75
    with subtests.test("nobodys kv is taken for ones own"):
        # The same pages, lent to one after the other: what is drafted does not depend on who had them.
        prompts = [random_prompt(30, seed=seed) for seed in range(3)]
        alone, after = [], []
        for prompt in prompts:
            fresh = make_runner()
            sequence = Drafting(fresh, prompt, PageTables(fresh))
            run(fresh, [sequence], 20)
            alone.append(sequence.proposals)
            fresh.close()
            sequence = Drafting(runner, prompt, PageTables(runner, seed=5))
            run(runner, [sequence], 20)
            after.append(sequence.proposals)
        assert after == alone


def test_nothing_is_drafted_behind_what_bans_leave_nothing_of(runner):
    tables = PageTables(runner)
    sequences = [Drafting(runner, random_prompt(n, seed=n), tables) for n in (20, 30)]
    run(runner, sequences, 1)
    banned, free = (sequence.next_chunk() for sequence in sequences)
    bans = SamplingParams(temperature=0, bad_token_ids=tuple((token_id,) for token_id in range(512)))
    [none, three] = runner.draft.propose([replace(banned, sampling=bans), free], [3, 3])
    assert none == () and len(three) == 3


class Computing:
    """A draft's model, whose calls take as long on a clock as `seconds` says of their tokens."""

    def __init__(self, runner, monkeypatch, seconds=len):
        self.now, self.spans = 0.0, []
        compute, perf_counter = runner.draft._compute, "services.engine.torch.draft.time.perf_counter"

        def timed(chunks, rows):
            self.spans += [(chunk.start, chunk.end) for chunk in chunks]
            self.now += seconds([token_id for chunk in chunks for token_id in chunk.token_ids])
            return compute(chunks, rows)

        monkeypatch.setattr(runner.draft, "_compute", timed)
        monkeypatch.setattr(perf_counter, lambda: self.now)


def test_a_draft_knows_what_it_takes_and_how_far_it_goes(subtests, tmp_path_factory):
    with (
        subtests.test("the first rounds and those that catch up do not tell what a draft takes"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        runner, compiles = make_runner(), iter([800.0, 600.0])
        Computing(runner, monkeypatch, lambda ids: next(compiles, len(ids)))
        assert runner.draft.step_s == 0
        sequence = Drafting(runner, random_prompt(30, seed=2), PageTables(runner), num_drafts=3)
        run(runner, [sequence], 1)
        run(runner, [sequence], 6)
        assert runner.draft.step_s == 1
        for _ in range(9):
            sequence.num_drafts = 1
            runner.draft.lent(sequence.pages)
            step(runner, [sequence])
        assert runner.draft.step_s == 1
        runner.close()
    with subtests.test("none are drafted past its context"), pytest.MonkeyPatch.context() as monkeypatch:
        # And nothing is computed there: it may have no such positions.
        tmp_path = tmp_path_factory.mktemp("own")
        draft = edited(tmp_path, max_position_embeddings=40)
        runner = make_runner(draft=draft)
        computing = Computing(runner, monkeypatch)
        sequence = Drafting(runner, random_prompt(60, seed=2), PageTables(runner))
        run(runner, [sequence], 3)
        assert max(end for _, end in computing.spans) == 40
        sequence = Drafting(runner, random_prompt(34, seed=2), PageTables(runner))
        run(runner, [sequence], 20)
        assert sequence.output_ids[:20] == plain(runner, random_prompt(34, seed=2), 20)
        assert len(sequence.proposals[0]) == 3 and sequence.proposals[-1] == ()


def test_a_draft_computes_prompts_or_catches_up_with_them(subtests, caplog):
    with (
        subtests.test("a prompt is computed though its draft fails"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        # What that lacks then it catches up with.
        caplog.clear()
        runner, prompt = make_runner(), random_prompt(50, seed=2)
        sequence = Drafting(runner, prompt, PageTables(runner))
        with monkeypatch.context() as patch:
            patch.setattr(runner.draft, "_compute", lambda chunks, rows: 1 / 0)
            run(runner, [sequence], 1)
        assert "draft_failed what=prompts" in caplog.text
        run(runner, [sequence], 20)
        assert sequence.output_ids[:20] == plain(runner, prompt, 20)
        assert sequence.accepted / sequence.drafted > 0.75
        runner.close()
    with subtests.test("a prompt in one chunk of one token is computed where nobody decodes"):
        chunk = Chunk([7], 0, [3], True, GREEDY, [7])
        for every_chunk, valid in ((True, 1), (False, 0)):
            runner = make_runner(every_chunk=every_chunk)
            runner.run([chunk])
            assert runner.draft.validity.valid_len([3]) == valid


def test_a_draft_is_fused_only_if_its_runner_fuses(monkeypatch):
    fused = []

    class Model(PackedModel):
        def __init__(self, model, num_threads, *others, fuses):
            fused.append(fuses)
            super().__init__(model, num_threads, *others, fuses=fuses)

    for module in (runner_module, draft_module):
        monkeypatch.setattr(module, "PackedModel", Model)
    for fuses in (True, False):
        make_runner(fuses=fuses).close()
    assert fused == [True, True, False, False]


def test_its_pages_lie_behind_the_last_groups(runner):
    kv = runner.layout.draft
    assert kv.group.unit_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert runner.layout.unit_bytes == (2 * kv.group.unit_bytes, kv.group.unit_bytes)  # of 4 layers, and of 2
    assert runner.draft.memory.num_pages == runner.memory.num_pages
    sequence = Drafting(runner, random_prompt(20, seed=3), PageTables(runner))
    step(runner, [sequence])
    page = next(runner.read_pages(sequence.pages[:1], 1))
    assert len(page) == kv.group.unit_bytes
    layers = np.frombuffer(page, np.float32).reshape(2, -1)
    of_target = np.frombuffer(next(runner.read_pages(sequence.pages[:1])), np.float32).reshape(4, -1)
    assert np.abs(layers - of_target[:2]).max() < 1e-3  # the grown one has its layers


def edited(tmp_path, **changes):
    directory = shutil.copytree(tiny_checkpoint(), tmp_path / "draft")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def test_a_draft_that_does_not_fit_is_refused(subtests, tmp_path_factory):
    with (
        subtests.test("a draft of another vocabulary is refused"),
        pytest.raises(ConfigError, match="cannot draft: its vocabulary has 259 ids, the model's 512"),
    ):
        make_runner(draft=tiny_checkpoint(tokenizer="bytes"))
    with subtests.test("a draft whose tokens are others is refused"):
        tmp_path = tmp_path_factory.mktemp("own")
        directory = edited(tmp_path)
        tokenizer = json.loads((directory / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        first, second = list(vocab)[40:42]
        vocab[first], vocab[second] = vocab[second], vocab[first]
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigError, match="cannot draft: token 40 is another one than the model's"):
            make_runner(draft=directory)
        (directory / "tokenizer.json").unlink()
        make_runner(draft=directory).close()
    with (
        subtests.test("a recurrent draft is refused"),
        pytest.raises(ConfigError, match="cannot draft: it has recurrent layers"),
    ):
        make_runner(draft=tiny_checkpoint("qwen3_5"))
