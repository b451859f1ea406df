import torch

from services.engine.paged.model_runner import Chunk
from services.engine.torch.draft_tokens import DraftedHistory, single_tokens
from services.engine.torch.sampling.adjusting import adjust
from services.values.request import SamplingParams

SAMPLING = SamplingParams(seed=3)


def test_each_token_is_as_plain_decoding_would_have_it(subtests):
    with subtests.test("a chunk without drafts stays whole"):
        chunk = Chunk([4, 5], 8, [1], True, SAMPLING, [4, 5])
        assert single_tokens(chunk) == (chunk,)
    with subtests.test("each token has the position and the history that plain decoding would give it"):
        ids = [7, 8, 9]
        chunk = Chunk([9, 20, 21], 2, [1, 3], True, SAMPLING, ids, 1, (0,), slot=5, num_drafts=2)
        tokens = single_tokens(chunk)
        assert [(each.token_ids, each.start, each.end) for each in tokens] == [
            ([9], 2, 3),
            ([20], 3, 4),
            ([21], 4, 5),
        ]
        assert [(len(each.history), each.num_output_ids) for each in tokens] == [(3, 1), (4, 2), (5, 3)]
        assert [list(each.history) for each in tokens] == [ids, [*ids, 20], [*ids, 20, 21]]
        assert all(
            (each.slot, each.pages, each.sample, each.num_drafts) == (5, [1, 3], True, 0) for each in tokens
        )
    with subtests.test("each token is banned by the drafts before it"):
        bad = ((20, 21), (9, 20, 5), (8, 9, 7), (30,))
        chunk = Chunk([9, 20], 2, [1, 3], True, SamplingParams(bad_token_ids=bad), [7, 8, 9], 1, num_drafts=1)
        assert [each.banned_ids for each in single_tokens(chunk)] == [{30}, {30, 21, 5}]


def test_a_history_with_drafts_is_as_a_list(subtests):
    with subtests.test("a history is not copied until it is read"):
        ids = [1, 2, 3]
        history = DraftedHistory(ids, [9])
        ids.append(4)
        assert len(history) == 5
        assert list(history) == [1, 2, 3, 4, 9]
        assert history[-2:] == [4, 9]
    with subtests.test("penalties go through a history once"):
        params = SamplingParams(temperature=0, repetition_penalty=2.0, frequency_penalty=0.5)
        history = DraftedHistory(ids := Counting([1, 2, 3, 3]), [5])
        logits = torch.ones(1, 8, dtype=torch.float64)
        adjust(logits, [Chunk([5], 4, [], True, params, history, 3)])
        assert logits.tolist() == [[1, 0.5, 0.5, 0.5 - 1.0, 1, 0.5 - 0.5, 1, 1]]
        assert ids.times == 1
    with subtests.test("a part of a history is as of a list"):
        history, both = DraftedHistory([1, 2, 3], [8, 9]), [1, 2, 3, 8, 9]
        bounds = (None, *range(-6, 7))
        for part in (slice(start, stop) for start in bounds for stop in bounds):
            assert history[part] == both[part], part
        assert history[::2] == both[::2]
        assert [history[i] for i in range(-5, 5)] == both + both


class Counting(list):
    """It counts how often all of it is gone through."""

    times = 0

    def __iter__(self):
        self.times += 1
        return super().__iter__()
