from typing import Literal

from checks import BASE, MODEL, QUESTION, is_weather, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model=MODEL,
    api_base=f"{BASE}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    max_tokens=500,
    context_window=4096,
)


def weather(city: Literal["Corinth", "Athens"], unit: Literal["C", "F"]) -> str:
    """Of a city."""
    return "21"


def chat():
    assert model.chat([ChatMessage(role="user", content=QUESTION)], max_tokens=8).message is not None


def stream():
    assert list(model.stream_chat([ChatMessage(role="user", content=QUESTION)], max_tokens=8))


def tools():
    answer = model.chat_with_tools(
        [FunctionTool.from_defaults(weather)],
        user_msg=QUESTION,
        tool_required=True,
        allow_parallel_tool_calls=False,
    )
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather" and is_weather(call.tool_kwargs)


run(chat, stream, tools)
