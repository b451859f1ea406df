import json
from typing import Literal

from checks import BASE, MODEL, QUESTION, SCHEMA, is_weather, run
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=f"{BASE}/v1", api_key="none")
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Weather(BaseModel):
    city: Literal["Corinth", "Athens"]
    unit: Literal["C", "F"]


def models():
    assert MODEL in [model.id for model in client.models.list()]


def completions():
    answer = client.completions.create(model=MODEL, prompt=QUESTION, max_tokens=8)
    assert answer.usage.completion_tokens <= 8 and answer.choices[0].finish_reason


def chat():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=1)
    assert answer.choices[0].finish_reason in ("length", "stop") and answer.usage.total_tokens > 8


def chat_stream():
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=12, seed=1)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=12,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def tools():
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=500,
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    assert call.function.name == "weather" and is_weather(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "21"}
    again = client.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, message, result], tools=[TOOL], max_tokens=8
    )
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def tools_stream():
    with client.chat.completions.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[pydantic_function_tool(Weather, name="weather")],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        parallel_tool_calls=False,
        max_tokens=500,
    ) as stream:
        for _ in stream:
            pass
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def json_schema():
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True},
        },
        max_tokens=500,
    )
    assert is_weather(json.loads(answer.choices[0].message.content))


def parse():
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=500
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
    assert answer.status in ("completed", "incomplete") and answer.usage.output_tokens <= 8
    again = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=answer.id, max_output_tokens=8
    )
    assert again.usage.input_tokens > answer.usage.input_tokens


def responses_by_reference():
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=8)
    user = {"role": "user", "content": QUESTION}
    references = [{"type": "item_reference", "id": item.id} for item in answer.output]
    again = client.responses.create(model=MODEL, input=[user, *references, user], max_output_tokens=8)
    chained = client.responses.create(
        model=MODEL, input=QUESTION, previous_response_id=answer.id, max_output_tokens=8
    )
    assert again.usage.input_tokens == chained.usage.input_tokens


def responses_stream():
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def responses_tools():
    tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
    answer = client.responses.create(
        model=MODEL,
        input=QUESTION,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=500,
    )
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert is_weather(json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    client.responses.create(
        model=MODEL,
        input=[result],
        previous_response_id=answer.id,
        tools=[tool],
        tool_choice="none",
        max_output_tokens=8,
    )


def responses_parse():
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=500)
    assert isinstance(answer.output_parsed, Weather)


run(
    *(models, completions, chat, chat_stream, tools, tools_stream, json_schema, parse),
    *(responses, responses_by_reference, responses_stream, responses_tools, responses_parse),
)
