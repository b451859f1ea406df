"""Chat completions and completions, each asked for and answered: one object, or chunks and [DONE]."""

from collections.abc import Callable, Mapping

from services.router.dialects.answer import Event, Json
from services.router.dialects.dialect import Envelope
from services.router.dialects.openai.choice import AnswerFormat, Piece, TokenBytes, TokenText, finish_reason
from services.router.dialects.openai.errors import error_json
from services.router.dialects.openai.openai_call import OpenAiCall
from services.router.dialects.openai.usage import isthmus_json, usage_json
from services.router.dialects.sampling_defaults import SamplingDefaults
from services.wire.isthmus.v1.generation_pb2 import GenerateResponse

_ReadCall = Callable[[Mapping[str, object], Mapping[str, str], SamplingDefaults], OpenAiCall]
_MakeFormat = Callable[[TokenText, TokenBytes], AnswerFormat]


class OpenAiDialect:
    def __init__(
        self,
        name: str,
        read_call: _ReadCall,
        make_format: _MakeFormat,
        defaults: SamplingDefaults,
        token_text: TokenText,
        token_bytes: TokenBytes,
    ) -> None:
        self.name = name
        self._read_call = read_call
        self._make_format = make_format
        self._defaults = defaults
        self._token_text, self._token_bytes = token_text, token_bytes

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> OpenAiCall:
        return self._read_call(fields, headers, self._defaults)

    def answer(self, call: OpenAiCall, envelope: Envelope) -> "OpenAiAnswer":
        return OpenAiAnswer(call, self._make_format(self._token_text, self._token_bytes), envelope)


class OpenAiAnswer:
    """No [DONE] follows an error. Its id is the request's."""

    def __init__(self, call: OpenAiCall, answer_format: AnswerFormat, envelope: Envelope) -> None:
        self.request = call.request
        self._call = call
        self._format = answer_format
        self._said = envelope
        self._started = False

    def whole(self, joined: GenerateResponse) -> Json:
        return {
            **self._envelope(self._format.object_name, joined, [self._format.whole(self._piece(joined))]),
            "usage": usage_json(joined.finish.usage),
            "isthmus": isthmus_json(joined.finish),
        }

    def events(self, response: GenerateResponse) -> list[Event]:
        events = [Event(chunk) for chunk in self._chunks(response)]
        self._started = self._started or bool(events)
        return [*events, Event("[DONE]")] if response.HasField("finish") else events

    def failure(self, error: Exception) -> list[Event]:
        return [Event(error_json(error))]

    def _chunks(self, response: GenerateResponse) -> list[Json]:
        piece = self._piece(response)
        choices = [] if self._started else [self._format.opening()]
        if not piece.is_empty:
            choices.append(self._format.delta(piece))
        chunks = [self._chunk(response, [choice]) for choice in choices if choice is not None]
        if response.HasField("finish"):
            chunks[-1]["isthmus"] = isthmus_json(response.finish)
            if self._call.include_usage:
                chunks.append({**self._chunk(response, []), "usage": usage_json(response.finish.usage)})
        return chunks

    def _chunk(self, response: GenerateResponse, choices: list[Json]) -> Json:
        chunk = self._envelope(self._format.chunk_object_name, response, choices)
        return {**chunk, "usage": None} if self._call.include_usage else chunk

    def _envelope(self, object_name: str, response: GenerateResponse, choices: list[Json]) -> Json:
        return {
            "id": self._format.id_prefix + response.request_id,
            "object": object_name,
            "created": self._said.created,
            "model": self._said.model,
            "choices": choices,
        }

    def _piece(self, response: GenerateResponse) -> Piece:
        return Piece(
            response.text,
            token_ids=response.token_ids if self._call.return_token_ids else None,
            logprobs=response.logprobs if self._call.wants_logprobs else None,
            finish_reason=finish_reason(response.finish) if response.HasField("finish") else None,
            reasoning=response.reasoning,
            calls=response.tool_calls,
        )
