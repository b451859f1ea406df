"""These tests show who asks, whom, and in which conversation: alike in all bodies."""

import hashlib

import pytest

from services.router.dialects.dialect import SESSION_HEADERS, read_addressee
from services.router.dialects.json_body import Body, InvalidParameter
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest


def test_which_conversation_it_is(subtests: pytest.Subtests) -> None:
    for fields, headers, hint, conversation in [
        ({}, {}, "", ""),
        ({}, {}, "key", "key"),
        ({}, {"session-id": "s"}, "", "s"),
        ({}, {"session-id": "s"}, "key", "key"),
        ({"conversation_id": "c"}, {"session-id": "s"}, "key", "c"),
        ({"conversation_id": "c"}, {"x-isthmus-conversation": "h"}, "key", "h"),
        ({}, {}, "k" * 129, hashlib.sha256(b"k" * 129).hexdigest()),
        ({}, {}, "two\nlines", hashlib.sha256(b"two\nlines").hexdigest()),
    ]:
        with subtests.test(fields=fields):
            request = GenerateRequest()
            read_addressee(Body(fields), headers, request, hint)
            assert request.conversation_id == conversation
    with subtests.test("the session of an agent is the conversation"):
        for place, name in enumerate(SESSION_HEADERS):
            later = dict.fromkeys(SESSION_HEADERS[place + 1 :], "later") | {name: "s"}
            request = GenerateRequest()
            read_addressee(Body({}), later, request)
            assert request.conversation_id == "s", name
            read_addressee(Body({}), later | {"x-isthmus-conversation": "own"}, request)
            assert request.conversation_id == "own", name


def test_who_asks_whom() -> None:
    request = GenerateRequest()
    read_addressee(Body({"model": "m", "cache_salt": "t"}), {"x-request-id": "r"}, request)
    assert request == GenerateRequest(request_id="r", model="m", tenant="t")
    with pytest.raises(InvalidParameter, match="cache_salt differs"):
        read_addressee(Body({"cache_salt": "t"}), {"x-isthmus-tenant": "u"}, request)
    read_addressee(Body({}), {"x-isthmus-priority": "-7"}, request)
    assert request.priority == -7
    for value in ("high", "1.5", "", str(2**31)):
        with pytest.raises(InvalidParameter, match=r"^x-isthmus-priority must be"):
            read_addressee(Body({}), {"x-isthmus-priority": value}, request)
