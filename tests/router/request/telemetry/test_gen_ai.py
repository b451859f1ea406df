"""A request in the words of OpenTelemetry's conventions."""

from dataclasses import dataclass

from opentelemetry import trace
from prometheus_client import CollectorRegistry

from services.router.request import story
from services.router.request.client_request import ClientRequest
from services.router.request.progress import Progress
from services.values.request import FinishReason, SamplingParams
from services.wire.isthmus.v1 import common_pb2, generation_pb2

CHAT = generation_pb2.Chat(messages=[generation_pb2.ChatMessage(role="user", content="a secret")])


def test_what_was_asked_without_what_was_said():
    request = generation_pb2.GenerateRequest(
        chat=CHAT,
        conversation_id="c",
        sampling=common_pb2.SamplingParams(
            max_tokens=7, top_k=3, presence_penalty=0.5, stop=["secret"], seed=2**63
        ),
    )
    assert story.request_attributes(request, "m") == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "isthmus",
        "gen_ai.request.model": "m",
        "gen_ai.conversation.id": "c",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.presence_penalty": 0.5,
    }


def test_json_and_completions_are_said_to_be_that_and_long_names_are_cut(subtests):
    for constraint, output_type in [
        ({"json_object": True}, "json"),
        ({"json_schema": "{}"}, "json"),
        ({"regex": "a"}, None),
        ({}, None),
    ]:
        with subtests.test(constraint=constraint, output_type=output_type):
            sampling = common_pb2.SamplingParams(constraint=common_pb2.Constraint(**constraint))
            told = story.request_attributes(generation_pb2.GenerateRequest(sampling=sampling), "m")
            assert told.get("gen_ai.output.type") == output_type
    for prompt in [{"text": "t"}, {"token_ids": generation_pb2.TokenIds(ids=[1])}, {}]:
        with subtests.test(prompt=prompt):
            request = generation_pb2.GenerateRequest(**prompt, model="x" * 9999, conversation_id="y" * 9999)
            told = story.request_attributes(request, "m")
            assert told["gen_ai.operation.name"] == "text_completion"
            assert len(told["gen_ai.request.model"]) == len(told["gen_ai.conversation.id"]) == 128


def test_of_a_request_that_no_rank_took_nothing_is_made_up():
    progress = Progress(ClientRequest("r", SamplingParams()), 0.0, trace.INVALID_SPAN)
    assert story.answer_attributes(progress, "m") == {
        "gen_ai.response.id": "r",
        "gen_ai.response.model": "m",
        "gen_ai.usage.output_tokens": 0,
    }


@dataclass
class Observed:
    registry: CollectorRegistry

    def __call__(self, name, **labels):
        labels = {"gen_ai_provider_name": "isthmus", "gen_ai_request_model": "m", **labels}
        return self.registry.get_sample_value(
            f"gen_ai_server_{name}", {"gen_ai_operation_name": "chat", **labels}
        )


def test_durations_by_error_and_tokens_of_those_that_finished_only():
    observed = Observed(CollectorRegistry())
    metrics = story.GenAiMetrics(observed.registry, "m")
    asked = ClientRequest("r", SamplingParams(), operation="chat")
    progress = Progress(asked, 0.0, trace.INVALID_SPAN, finish_reason=FinishReason.LENGTH)
    metrics.ended(progress, "Unavailable", 4.0)
    progress.first_token_s, progress.output_ids = 1.0, [1, 2, 3, 4, 5]
    metrics.first_token(progress)
    metrics.ended(progress, "finished", 3.0)
    metrics.ended(progress, "cancelled", 3.0)
    assert observed("request_duration_seconds_sum", error_type="Unavailable") == 4.0
    assert observed("request_duration_seconds_count", error_type="") == 2
    assert observed("time_to_first_token_seconds_sum") == 1.0
    assert observed("time_per_output_token_seconds_count") == 1
    assert observed("time_per_output_token_seconds_sum") == 0.5  # two seconds for four tokens
