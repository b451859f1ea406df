from typing import Literal

from checks import BASE, MODEL, QUESTION, is_weather, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

model = ChatOpenAI(base_url=f"{BASE}/v1", api_key="none", model=MODEL, max_tokens=500)


class Weather(BaseModel):
    """Of a city."""

    city: Literal["Corinth", "Athens"]
    unit: Literal["C", "F"]


@tool
def weather(city: Literal["Corinth", "Athens"], unit: Literal["C", "F"]) -> str:
    """Of a city."""
    return "21"


def stream():
    assert list(model.bind(max_tokens=8).stream(QUESTION))


def batches():
    short = model.bind(max_tokens=8)
    questions = [f"{QUESTION} On day {day}?" for day in range(8)]
    answers = short.batch(questions, config={"max_concurrency": 4})
    assert len(answers) == 8 and all(answer.usage_metadata["output_tokens"] for answer in answers)
    greedy = OpenAI(base_url=f"{BASE}/v1", api_key="none", model=MODEL, max_tokens=8, temperature=0)
    assert greedy.batch(questions) == [greedy.invoke(question) for question in questions]
    several = OpenAI(base_url=f"{BASE}/v1", api_key="none", model=MODEL, max_tokens=8, n=2, best_of=2)
    told = several.generate(questions)
    assert [len(answers) for answers in told.generations] == [2] * 8


def bind_tools():
    bound = model.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and is_weather(call["args"])
    history = [HumanMessage(QUESTION), answer, ToolMessage("21", tool_call_id=call["id"])]
    model.bind_tools([weather], tool_choice="none").bind(max_tokens=8).invoke(history)


def with_structured_output_by_schema():
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)


def with_structured_output_by_tool():
    asked = model.with_structured_output(Weather, method="function_calling")
    assert isinstance(asked.invoke(QUESTION), Weather)


run(stream, batches, bind_tools, with_structured_output_by_schema, with_structured_output_by_tool)
