from hypothesis import given
from hypothesis import strategies as st

from router.dialects.answers import agents_answer, ended
from services.router.dialects.answer_parts import Closed, Grown, Kind, Opened, Part, Parts, parts_of
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse, ToolCallDelta

Said = tuple[Kind, str]
_TEXT = st.text("ab", min_size=1, max_size=3)
_THINKING, _SPEECH = (st.tuples(st.just(kind), _TEXT) for kind in (Kind.THINKING, Kind.TEXT))
_CALL = st.tuples(st.just(Kind.CALL), st.text("ab", max_size=3))


def test_an_answer_is_told_part_by_part() -> None:
    parts = Parts()
    steps = [step for response in agents_answer() for step in parts.take(response)]
    told = [(type(step).__name__[0], step.part.index, step.part.kind.value) for step in steps]
    assert told == [
        ("O", 0, "thinking"), ("G", 0, "thinking"), ("G", 0, "thinking"), ("C", 0, "thinking"),
        ("O", 1, "text"), ("G", 1, "text"), ("G", 1, "text"), ("C", 1, "text"),
        ("O", 2, "call"), ("G", 2, "call"), ("G", 2, "call"), ("C", 2, "call"),
        ("O", 3, "call"), ("G", 3, "call"), ("C", 3, "call"),
    ]  # fmt: skip
    assert [step.part for step in steps if isinstance(step, Closed)] == [
        Part(0, Kind.THINKING, text="Hmm."),
        Part(1, Kind.TEXT, text="Let me look."),
        Part(2, Kind.CALL, "call_a", "weather", '{"city": "Bern"}'),
        Part(3, Kind.CALL, "call_b", "time", "{}"),
    ]


def test_an_answer_that_says_nothing_is_an_empty_text() -> None:
    assert parts_of(ended()) == [Part(0, Kind.TEXT)]
    assert [part.kind for part in parts_of(agents_joined(), shows_thinking=False)] == [
        Kind.TEXT,
        Kind.CALL,
        Kind.CALL,
    ]


def agents_joined() -> GenerateResponse:
    joined = GenerateResponse(reasoning="Hmm.", text="Let me look.", finish=ended().finish)
    for response in agents_answer():
        joined.tool_calls.extend(response.tool_calls)
    return joined


@given(st.lists(st.one_of(_THINKING, _SPEECH, _CALL), max_size=8), st.data())
def test_however_it_is_cut_the_parts_are_what_was_said(said: list[Said], data: st.DataObject) -> None:
    responses, calls = [], 0
    for kind, text in said:
        cut = data.draw(st.integers(0, len(text)))
        for first, piece in ((True, text[:cut]), (False, text[cut:])):
            if kind is Kind.CALL:
                head = {"id": f"c{calls}", "name": "f"} if first else {}
                delta = ToolCallDelta(index=calls, arguments=piece, **head)
                responses.append(GenerateResponse(tool_calls=[delta]))
            else:
                field = {"reasoning" if kind is Kind.THINKING else "text": piece}
                responses.append(GenerateResponse(**field))
        calls += kind is Kind.CALL
    parts = Parts()
    steps = [step for response in [*responses, ended()] for step in parts.take(response)]
    closed = [step.part for step in steps if isinstance(step, Closed)]
    assert [(part.kind, part.text) for part in closed] == (merged(said) or [(Kind.TEXT, "")])
    for part in closed:  # each is told in one run: opened, grown, closed
        own = [step for step in steps if step.part.index == part.index]
        first = steps.index(own[0])
        assert own == steps[first : first + len(own)]
        assert isinstance(own[0], Opened)
        assert isinstance(own[-1], Closed)
        assert "".join(step.delta for step in own if isinstance(step, Grown)) == part.text


def merged(said: list[Said]) -> list[Said]:
    """Neighbours of one kind are one part; a call is one of its own."""
    result: list[Said] = []
    for kind, text in said:
        if result and kind is not Kind.CALL and result[-1][0] is kind:
            result[-1] = (kind, result[-1][1] + text)
        else:
            result.append((kind, text))
    return result
