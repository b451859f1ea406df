"""What is packed comes back, however it was split."""

import math
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from services.values.prompt_logprobs import PromptLogprobs, ScoredToken

logprobs = st.floats(max_value=0, allow_nan=False, width=32)
ids = st.integers(0, 2**32 - 1)


def packed(tokens: list[ScoredToken], num_top: int) -> PromptLogprobs:
    others = [(*token.top, *[(7, math.nan)] * (num_top - len(token.top))) for token in tokens]
    return PromptLogprobs(
        num_top,
        b"".join(pack("<f", token.logprob) for token in tokens),
        b"".join(pack("<I", token.rank) for token in tokens),
        b"".join(pack("<I", token_id) for top in others for token_id, _ in top),
        b"".join(pack("<f", logprob) for top in others for _, logprob in top),
    )


@given(st.data(), st.integers(0, 3))
def test_tokens_come_back_with_those_of_the_others_that_there_are(data, num_top):
    top = st.lists(st.tuples(ids, logprobs), max_size=num_top).map(tuple)
    tokens = data.draw(st.lists(st.builds(ScoredToken, logprobs, ids, top), max_size=6))
    cut = data.draw(st.integers(0, len(tokens)))
    joined = PromptLogprobs.joined([packed(tokens[:cut], num_top), packed(tokens[cut:], num_top)])
    assert joined == packed(tokens, num_top)
    assert list(joined.tokens()) == tokens
    assert len(joined) == len(tokens)
    assert joined.num_bytes == sum(
        map(len, (joined.logprobs, joined.ranks, joined.top_ids, joined.top_logprobs))
    )


def test_of_no_pieces_it_is_known_how_many_others_were_asked_for():
    assert PromptLogprobs.joined([], 3) == PromptLogprobs(3)
