from struct import pack

from services.router.request.response_stream import PromptScores
from services.values.prompt_logprobs import PromptLogprobs


def told(num_tokens, num_top):
    others = b"".join(pack("<I", i) for i in range(num_tokens * num_top))
    return PromptLogprobs(
        num_top,
        b"".join(pack("<f", -i) for i in range(num_tokens)),
        b"".join(pack("<I", i + 1) for i in range(num_tokens)),
        others,
        pack("<f", -0.5) * num_tokens * num_top,
    )


def test_a_response_has_no_more_than_it_should(subtests):
    for num_tokens, num_top, sizes in [
        (0, 3, [0]),
        (5, 3, [5]),
        (8_192, 0, [8_192]),
        (8_193, 0, [8_192, 1]),
        (1_000, 20, [390, 390, 220]),
    ]:
        with subtests.test(num_tokens=num_tokens, num_top=num_top, sizes=sizes):
            ids = range(7, 8 + num_tokens)
            scores, pieces = PromptScores(ids, told(num_tokens, num_top)), []
            while not scores.is_last:
                pieces.append(scores.next_piece())
            pieces.append(scores.next_piece())
            assert [len(piece) for piece in pieces] == sizes
            tokens = [token for piece in pieces for token in piece]
            assert [token.chosen.token_id for token in tokens] == list(ids)[1:]
            assert [token.chosen.logprob for token in tokens] == [-i for i in range(num_tokens)]
            assert [token.chosen.rank for token in tokens] == list(range(1, num_tokens + 1))
            assert [other.token_id for token in tokens for other in token.top] == list(
                range(num_tokens * num_top)
            )
            assert {tuple(other.rank for other in token.top) for token in tokens} <= {
                tuple(range(1, num_top + 1))
            }
