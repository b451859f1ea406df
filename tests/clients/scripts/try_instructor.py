from typing import Literal

import instructor
from checks import BASE, MODEL, QUESTION, run
from openai import OpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    city: Literal["Corinth", "Athens"]
    unit: Literal["C", "F"]


def ask(mode):
    client = instructor.from_openai(OpenAI(base_url=f"{BASE}/v1", api_key="none"), mode=mode)
    weather = client.chat.completions.create(
        model=MODEL,
        response_model=Weather,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=500,
        parallel_tool_calls=False,
        max_retries=0,
    )
    assert isinstance(weather, Weather)


def tools():
    ask(instructor.Mode.TOOLS)


def json_schema():
    ask(instructor.Mode.JSON_SCHEMA)


run(tools, json_schema)
