from router.http.backend import HI, FakeBackend, chat, complete

BEGUN = {"role": "assistant", "content": "I"}


async def test_an_answer_goes_on_where_that_is_asked_for(subtests):
    for body, continues in [
        ({"messages": [*HI, BEGUN]}, False),
        ({"messages": [*HI, BEGUN], "add_generation_prompt": True}, False),
        ({"messages": [*HI, {**BEGUN, "prefix": False}]}, False),
        ({"messages": [*HI, BEGUN], "continue_final_message": True}, True),
        (
            {"messages": [*HI, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
            True,
        ),
        ({"messages": [*HI, {**BEGUN, "prefix": True}]}, True),
        ({"messages": [*HI, {**BEGUN, "partial": True}], "add_generation_prompt": False}, True),
    ]:
        with subtests.test(body=body):
            backend = FakeBackend()
            assert (await chat(backend, **body)).status_code == 200
            (request,) = backend.requests
            assert request.chat.continue_final_message is continues
    for more in [{"continue_final_message": True}, {"add_generation_prompt": False}]:
        with subtests.test(more=more):
            answer = await complete(FakeBackend(), **more)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, *more)
