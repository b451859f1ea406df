import json
import os

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import litellm
from checks import BASE, MODEL, QUESTION, SCHEMA, is_weather, run

WHERE = dict(model=f"openai/{MODEL}", api_base=f"{BASE}/v1", api_key="none")
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def chat():
    answer = litellm.completion(**WHERE, messages=MESSAGES, max_tokens=8)
    assert answer.usage.completion_tokens <= 8


def stream():
    assert list(litellm.completion(**WHERE, messages=MESSAGES, max_tokens=8, stream=True))


def tools():
    answer = litellm.completion(
        **WHERE,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=500,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert is_weather(json.loads(call.function.arguments))


def json_schema():
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    answer = litellm.completion(**WHERE, messages=MESSAGES, response_format=form, max_tokens=500)
    assert is_weather(json.loads(answer.choices[0].message.content))


def anthropic_messages():
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=BASE, api_key="none", messages=MESSAGES, max_tokens=8
    )
    assert answer.usage.completion_tokens <= 8


run(chat, stream, tools, json_schema, anthropic_messages)
