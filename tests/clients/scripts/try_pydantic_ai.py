from typing import Literal

from checks import BASE, MODEL, QUESTION, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{BASE}/v1", api_key="none"))
SETTINGS = {"max_tokens": 500, "parallel_tool_calls": False}


class Weather(BaseModel):
    city: Literal["Corinth", "Athens"]
    unit: Literal["C", "F"]


def text():
    assert isinstance(
        Agent(model, model_settings={"max_tokens": 8}, retries=0).run_sync(QUESTION).output, str
    )


def output_by_tool():
    agent = Agent(model, output_type=ToolOutput(Weather), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


def output_by_schema():
    agent = Agent(model, output_type=NativeOutput(Weather), model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, Weather)


run(text, output_by_tool, output_by_schema)
