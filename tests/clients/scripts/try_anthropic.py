from anthropic import Anthropic
from checks import BASE, MODEL, QUESTION, SCHEMA, is_weather, run

client = Anthropic(base_url=BASE, api_key="none")
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}


def messages():
    answer = client.messages.create(model=MODEL, max_tokens=8, messages=MESSAGES)
    assert answer.stop_reason in ("max_tokens", "end_turn") and answer.usage.output_tokens <= 8


def messages_stream():
    with client.messages.stream(model=MODEL, max_tokens=8, messages=MESSAGES) as stream:
        for _ in stream:
            pass
        answer = stream.get_final_message()
    assert answer.stop_reason in ("max_tokens", "end_turn") and answer.usage.output_tokens <= 8


def tools():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = client.messages.create(
        model=MODEL, max_tokens=500, messages=MESSAGES, tools=[TOOL], tool_choice=choice
    )
    assert answer.stop_reason == "tool_use"
    (use,) = [block for block in answer.content if block.type == "tool_use"]
    assert is_weather(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "21"}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    again = client.messages.create(
        model=MODEL, max_tokens=8, messages=history, tools=[TOOL], tool_choice={"type": "none"}
    )
    assert again.stop_reason


def tools_stream():
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=MODEL, max_tokens=500, messages=MESSAGES, tools=[TOOL], tool_choice=choice
    ) as stream:
        answer = stream.get_final_message()
    assert any(block.type == "tool_use" and is_weather(block.input) for block in answer.content)


def count_tokens():
    short = client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens
    longer = client.messages.count_tokens(model=MODEL, messages=MESSAGES, tools=[TOOL]).input_tokens
    assert 0 < short < longer


run(messages, messages_stream, tools, tools_stream, count_tokens)
