"""These tests show which model of an alias answers a conversation."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.models import side_key, sides
from services.wire.isthmus.v1.generation_pb2 import ChatMessage, GenerateRequest

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100), min_size=1, max_size=6).filter(
    lambda weights: any(weights.values())
)
KEYS = [number.to_bytes(2) for number in range(600)]


@settings(max_examples=30, deadline=None)
@given(WEIGHTS)
def test_models_are_first_for_their_shares(weights: dict[str, int]) -> None:
    firsts = [sides(weights, key)[0] for key in KEYS]
    for model, weight in weights.items():
        share = weight / sum(weights.values())
        noise = 5 * (share * (1 - share) / len(KEYS)) ** 0.5
        assert abs(firsts.count(model) / len(KEYS) - share) <= noise, (model, weights)


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.data())
def test_a_higher_weight_moves_conversations_to_its_model_alone(weights: dict[str, int], data) -> None:
    raised = data.draw(st.sampled_from(sorted(weights)))
    more = {**weights, raised: weights[raised] + data.draw(st.integers(1, 100))}
    scaled = {model: 3 * weight for model, weight in weights.items()}
    for key in KEYS[:100]:
        before, after = sides(weights, key), sides(more, key)
        assert after[0] in (before[0], raised)
        assert [model for model in after if model != raised] == [model for model in before if model != raised]
        assert sides(scaled, key) == before
        assert sides({model: weights[model] for model in before[1:]}, key) == before[1:], "the next take over"


def chat(*turns: tuple[str, str], **fields: str) -> GenerateRequest:
    request = GenerateRequest(model="both", tenant="t", **fields)
    for role, content in turns:
        request.chat.messages.add(role=role, content=content)
    return request


def test_what_a_conversation_keeps() -> None:
    opening = (("system", "Be brief"), ("user", "Hi"))
    first = side_key(chat(*opening))
    assert side_key(chat(*opening, ("assistant", "Hello"), ("user", "Bye"))) == first
    assert side_key(chat(("system", "It is noon"), ("user", "Hi"))) == first, "instructions may change"
    past = [ChatMessage(role="user", content="Hi")]
    assert side_key(chat(("user", "Bye")), lambda: past) == first, "stored turns are a part of it"
    assert side_key(chat(("user", "Bye"))) != first
    other = chat(*opening)
    other.tenant = "u"
    assert side_key(other) != first
    named = side_key(chat(*opening, conversation_id="c"))
    assert side_key(chat(("user", "Bye"), conversation_id="c", request_id="r")) == named != first
    text = GenerateRequest(model="both", text="Hi", request_id="r")
    assert side_key(text) == side_key(text)
    text.request_id = ""
    assert side_key(text) != side_key(text), "nothing tells whose it is"
