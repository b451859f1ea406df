"""These tests show what one message to a router holds."""

from hypothesis import given
from hypothesis import strategies as st

from services.decode import decode_service
from services.decode.decode_service import Outbox
from services.values.prompt_logprobs import PromptLogprobs
from services.values.request import FinishReason, Output, TokenLogprobs
from services.wire import convert_request
from services.wire.isthmus.v1.common_pb2 import PackedLogprobs
from services.wire.isthmus.v1.decode_pb2 import RequestOutput

PLAIN = Output((1, 2))


def test_outputs_that_tell_of_long_prompts_take_messages_of_their_own(monkeypatch):
    monkeypatch.setattr(decode_service, "MAX_PROMPT_BYTES", 250)
    sizes = [0, 100, 100, 100, 0, 900, 100, 100]
    box = Outbox()
    for nth, size in enumerate(sizes):
        output = RequestOutput(request_id=str(nth))
        if size:
            output.prompt_logprobs.CopyFrom(PackedLogprobs(logprobs=bytes(size)))
        box.put_message(output)
    messages = []
    while box:
        messages.append([output.request_id for output in box.take().outputs])
    assert messages == [["0", "1", "2"], ["3", "4"], ["5"], ["6", "7"]]


def test_tokens_alone_are_two_numbers_each_where_the_request_has_a_number(subtests):
    with subtests.test("tokens alone are two numbers each"):
        box = Outbox()
        box.put("a", PLAIN, 7)
        box.put("b", Output((3,)), 9)
        box.put("a", Output((4,)), 7)
        message = box.take()
        assert not message.outputs and not box
        assert (list(message.numbers), list(message.token_ids)) == ([7, 7, 9, 7], [1, 2, 3, 4])
        assert not box.take().token_ids

    with subtests.test("a request without a number has outputs alone"):
        box = Outbox()
        box.put("a", PLAIN)
        (output,) = box.take().outputs
        assert list(output.token_ids) == [1, 2]


outputs = st.one_of(
    st.builds(Output, st.lists(st.integers(0, 99), max_size=3).map(tuple)),
    st.just(Output((5,), (TokenLogprobs(5, -1.0),))),
    st.just(Output((6, 7), drafted_tokens=2, accepted_draft_tokens=1)),
    st.just(Output((8,), finished=FinishReason.STOP)),
    st.just(Output((9,), prompt_logprobs=PromptLogprobs(0, bytes(400), bytes(400)))),
)


@given(st.lists(st.one_of(st.none(), st.tuples(st.sampled_from([1, 2, 3]), outputs)), max_size=40))
def test_each_request_is_told_in_order_and_whole(puts):
    """None: the writer takes a message. Within one, tokens come before outputs."""
    box, sent, told = Outbox(), {}, {}

    def take():
        message = box.take()
        for number, token_id in zip(message.numbers, message.token_ids, strict=True):
            told.setdefault(number, []).append((token_id, None, None))
        for output in message.outputs:
            told.setdefault(int(output.request_id), []).extend(
                said(convert_request.output_from_proto(output))
            )

    for put in [*puts, None]:
        if put is None:
            take()
        else:
            number, output = put
            box.put(str(number), output, number)
            sent.setdefault(number, []).extend(said(output))
    while box:
        take()
    assert {number: of for number, of in told.items() if of} == {n: of for n, of in sent.items() if of}


def said(output):
    beside = (bool(output.logprobs), output.drafted_tokens, output.finished, output.prompt_logprobs)
    each = [(token_id, None, None) for token_id in output.token_ids]
    return each if not any(beside) else [*each, beside]
