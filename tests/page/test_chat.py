"""The chat: typing, streaming, stopping, thinking, calls, errors."""

import json

import pytest
from playwright.sync_api import expect

from page.visitor import LONG_MS

CHATS = "**/v1/chat/completions"


def test_an_answer_comes_as_it_is_written_and_can_be_stopped(visit):
    person = visit()
    person.set_up(max_tokens=3000)
    person.page.route(CHATS, for_long)
    person.box.fill("Hello")
    person.box.press("Shift+Enter")
    person.box.press_sequentially("there")
    person.box.press("Enter")
    expect(person.page.locator(".said.user")).to_have_text("Hello\nthere", use_inner_text=True)
    answer = person.answers.first
    expect(answer).to_have_attribute("data-state", "streaming", timeout=LONG_MS)
    before = len(answer.text_content())
    person.page.wait_for_timeout(300)
    assert len(answer.text_content()) > before
    assert answer.get_attribute("data-state") == "streaming"
    expect(person.rank("decode/0").or_(person.rank("decode/1")).get_by_text("1", exact=True)).to_be_visible()
    person.box.press("Escape")
    expect(answer).to_have_attribute("data-state", "stopped")
    # The rank has stopped as well.
    for name in ("decode/0", "decode/1"):
        expect(person.rank(name).locator('[data-label="running"]')).to_have_text("0")
    expect(person.page.get_by_role("button", name="Send")).to_be_visible()


def test_thinking_is_folded(visit):
    person = visit()
    person.set_up(max_tokens=60)
    person.ask("What is an isthmus?")
    fold = person.answers.first.locator("details.fold").first
    expect(fold.locator("summary")).to_have_text("Thinking")
    expect(fold.locator(".text")).to_be_hidden()
    fold.locator("summary").press("Enter")
    expect(fold.locator(".text")).to_be_visible()
    assert fold.locator(".text").text_content()


def test_a_call_is_folded_and_its_result_goes_back(visit):
    person = visit()
    person.page.get_by_role("button", name="Settings").click()
    person.page.get_by_role("button", name="Example tool").click()
    person.page.get_by_label("Calls").select_option("required")
    person.page.get_by_label("Max tokens").fill("600")
    person.page.get_by_role("button", name="Settings").click()
    person.ask("Is it warm in Corinth?")
    call = person.answers.first.locator("details.fold", has_text="Calls weather").first
    expect(call.locator("pre")).to_be_hidden()
    call.locator("summary").click()
    assert "city" in json.loads(call.locator("pre").text_content())
    while person.box.get_attribute("aria-label") == "What weather came to":
        person.say("21")
    # It went on by itself, with the call and its result in the prompt.
    expect(person.answers).to_have_count(2)
    expect(person.answers.last).to_have_attribute("data-state", "done", timeout=LONG_MS)
    expect(call.locator("summary")).to_contain_text("answered")


def test_what_a_model_says_is_text(visit):
    said = '<img src=x onerror="document.title=1"><script>document.title=1</script><b>bold</b> ' + "x" * 500
    person = visit()
    person.page.route(CHATS, lambda route: route.fulfill(**stream(said, reasoning=said)))
    person.say(said)
    answer = person.answers.first
    expect(answer).to_have_attribute("data-state", "done")
    expect(answer.locator("> .text")).to_have_text(said)
    expect(person.page.locator(".said.user .text")).to_have_text(said)
    assert person.page.locator("main :is(img, script, b:text('bold'))").count() == 0
    assert person.page.title() == "Isthmus"
    assert not sideways(person)  # long words are broken


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"status": 503, "body": json.dumps({"error": {"message": "no decode rank is registered"}})},
            "no decode rank is registered",
        ),
        ({"status": 502, "body": "<h1>Bad gateway</h1>"}, "<h1>Bad gateway</h1>"),
        (
            {"status": 200, "body": 'data: {"choices": [{"delta": {"content": "A"}}]}\n\n'},
            "the connection was lost",
        ),
        ({"status": 200, "body": 'data: {"error": {"message": "the rank died"}}\n\n'}, "the rank died"),
    ],
)
def test_an_error_is_shown_in_its_place_and_the_question_can_be_asked_again(visit, answer, message):
    person = visit()
    person.set_up(max_tokens=20)
    headers = {"content-type": "text/event-stream"}
    person.page.route(CHATS, lambda route: route.fulfill(headers=headers, **answer))
    person.say("Hello")
    expect(person.answers.first.get_by_role("alert")).to_contain_text(message)
    person.page.unroute(CHATS)
    person.page.get_by_role("button", name="Try again").click()
    expect(person.answers.first).to_have_attribute("data-state", "done", timeout=LONG_MS)
    assert (person.answers.count(), person.page.locator(".said.user").count()) == (1, 1)


def test_a_new_chat_is_another_conversation(visit):
    person = visit()
    person.set_up(max_tokens=20)
    bodies = []
    person.page.on("request", lambda asked: bodies.append(asked.post_data_json) if asked.post_data else None)
    person.ask("Hello")
    person.ask("And now?")
    person.page.get_by_role("button", name="New chat").click()
    expect(person.answers).to_have_count(0)
    person.ask("Hello")
    first, second, third = bodies
    assert first["conversation_id"] == second["conversation_id"] != third["conversation_id"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert len(third["messages"]) == 1
    # The conversation before is now one of the others.
    expect(person.page.get_by_label("Other requests").locator("button.request")).not_to_have_count(0)


def stream(content, reasoning=""):
    deltas = [{"reasoning_content": reasoning}, {"content": content}]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": body}


def for_long(route):
    """The model would end its answers soon."""
    route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))


def sideways(person):
    """Tell whether anything is wider than the window."""
    return person.script("document.documentElement.scrollWidth > innerWidth")
