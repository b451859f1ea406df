"""These tests show what the next turn's request holds."""

from itertools import count

import pytest

from cli.chat.turns import answered, finish, plain_answer
from services.cli.chat import ChatConfig, _sampling
from services.cli.conversation import ChatTurn, Conversation
from services.wire.isthmus.v1 import common_pb2

pytestmark = pytest.mark.long


def conversation(**fields):
    numbers = count(1)
    return Conversation(lambda: f"c{next(numbers)}", **fields)


def roles(request):
    return [(message.role, message.content) for message in request.chat.messages]


def test_what_a_turn_sends(subtests):
    with subtests.test("the history goes with every turn"):
        talk = conversation(
            system="Be brief.", model="m", tenant="t", sampling=common_pb2.SamplingParams(seed=3)
        )
        talk.turns.append(ChatTurn("Hello", plain_answer()))
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
    with subtests.test("a question without an answer is not asked again"):
        talk = conversation()
        talk.turns.append(ChatTurn("Hello", answered({"finish": finish()})))
        assert roles(talk.request("Again")) == [("user", "Again")]
    with subtests.test("a new conversation keeps the system message alone"):
        talk = conversation(system="Be brief.")
        talk.turns.append(ChatTurn("Hello", plain_answer()))
        talk.reset()
        assert roles(talk.request("Again")) == [("system", "Be brief."), ("user", "Again")]
        assert talk.id == "c2"
    with subtests.test("what is not said is left to the model"):
        assert not _sampling(ChatConfig()).HasField("temperature")
        assert _sampling(ChatConfig(temperature=0)).HasField("temperature")
