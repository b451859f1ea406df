import pytest

from services.router.request.unread import refuse_unread
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.common_pb2 import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, GenerateRequest


@pytest.mark.parametrize(
    ("request_", "name"),
    [
        (GenerateRequest(chat=Chat(continue_final_message=True)), "chat.continue_final_message"),
    ],
)
def test_what_is_not_acted_on_is_refused_by_name(request_: GenerateRequest, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is not supported yet"):
        refuse_unread(request_)


def test_nothing_else_is_refused() -> None:
    refuse_unread(GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="a")])))
    refuse_unread(GenerateRequest(text="a", sampling=SamplingParams(top_k=3)))
