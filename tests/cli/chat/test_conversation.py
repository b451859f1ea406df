"""What the next turn's request holds."""

from itertools import count

from cli.chat.turns import answered, finish, plain_answer
from services.cli.chat.chat import ChatConfig, _sampling
from services.cli.chat.conversation import Conversation, Turn
from services.wire.isthmus.v1 import common_pb2


def conversation(**fields):
    numbers = count(1)
    return Conversation(lambda: f"c{next(numbers)}", **fields)


def roles(request):
    return [(message.role, message.content) for message in request.chat.messages]


def test_the_history_goes_with_every_turn():
    talk = conversation(system="Be brief.", model="m", tenant="t", sampling=common_pb2.SamplingParams(seed=3))
    talk.turns.append(Turn("Hello", plain_answer()))
    request = talk.request("And now?", "r1")
    assert roles(request) == [
        ("system", "Be brief."),
        ("user", "Hello"),
        ("assistant", "Hi"),
        ("user", "And now?"),
    ]
    assert list(request.chat.messages[2].token_ids) == [7, 8, 9, 10, 11]
    assert (request.request_id, request.model, request.tenant) == ("r1", "m", "t")
    assert (request.conversation_id, request.sampling.seed) == ("c1", 3)


def test_a_question_without_an_answer_is_not_asked_again():
    talk = conversation()
    talk.turns.append(Turn("Hello", answered({"finish": finish()})))
    assert roles(talk.request("Again")) == [("user", "Again")]


def test_a_new_conversation_keeps_the_system_message_alone():
    talk = conversation(system="Be brief.")
    talk.turns.append(Turn("Hello", plain_answer()))
    talk.reset()
    assert roles(talk.request("Again")) == [("system", "Be brief."), ("user", "Again")]
    assert talk.id == "c2"


def test_what_is_not_said_is_left_to_the_model():
    assert not _sampling(ChatConfig()).HasField("temperature")
    assert _sampling(ChatConfig(temperature=0)).HasField("temperature")
