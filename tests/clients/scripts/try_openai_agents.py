import os
from typing import Literal

os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1"}

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)
from checks import BASE, MODEL, QUESTION, run
from openai import AsyncOpenAI
from pydantic import BaseModel

client = AsyncOpenAI(base_url=f"{BASE}/v1", api_key="none")
asked = []


class Weather(BaseModel):
    city: Literal["Corinth", "Athens"]
    unit: Literal["C", "F"]


@function_tool
def weather(city: Literal["Corinth", "Athens"], unit: Literal["C", "F"]) -> str:
    """Of a city."""
    asked.append((city, unit))
    return "21"


def loop(model):
    """A tool that is required, and an answer that a schema binds."""
    asked.clear()
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=500)
    agent = Agent(
        "tool",
        tools=[weather],
        model=model,
        model_settings=settings,
        tool_use_behavior="stop_on_first_tool",
    )
    assert Runner.run_sync(agent, QUESTION).final_output == "21" and asked
    agent = Agent("typed", model=model, model_settings=ModelSettings(max_tokens=500), output_type=Weather)
    assert isinstance(Runner.run_sync(agent, QUESTION).final_output, Weather)


def chat_completions():
    loop(OpenAIChatCompletionsModel(MODEL, client))


def responses():
    loop(OpenAIResponsesModel(MODEL, client))


run(chat_completions, responses)
