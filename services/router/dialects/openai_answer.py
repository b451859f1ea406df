"""Chat completions and completions are answered as one object, or as chunks and [DONE]."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from json import JSONEncoder

from services.router.dialects.choice_formats import (
    FINISH_REASONS,
    AnswerFormat,
    ChoicePiece,
    cut,
    prompt_text,
    vllm_prompt_logprobs,
)
from services.router.dialects.dialect import Envelope, Event, Json, Words, json_text
from services.router.dialects.http_errors import error_json
from services.router.dialects.openai_call import OpenAiCall
from services.router.dialects.usage_json import answers_json, isthmus_json, usage_json, word_of
from services.wire.isthmus.v1.generation_pb2 import Finish, GenerateResponse

_json_of = JSONEncoder(ensure_ascii=False).encode
_MARK = "\0text\0"  # No id has a NUL.


class TextChunk:
    """A TextChunk serializes a chunk of text once and then only fills in the text: most chunks of a stream
    hold nothing else. `chunk_of` makes the chunk of a text."""

    def __init__(self, chunk_of: Callable[[str], Json]) -> None:
        self._head, self._tail = json_text(chunk_of(_MARK)).split(_json_of(_MARK))

    def filled(self, text: str) -> str:
        return f"{self._head}{_json_of(text)}{self._tail}"


def is_text_alone(response: GenerateResponse) -> bool:
    """Return whether the response has text alone. It must not be its answer's first, and no ids or
    log-probabilities may be requested."""
    has_more = response.reasoning or response.tool_calls or response.HasField("finish")
    return bool(response.text) and not has_more


class OpenAiAnswer:
    """Each answer is a choice. No [DONE] follows an error. The answer's id is the request's id."""

    ping = None

    def __init__(
        self,
        call: OpenAiCall,
        envelope: Envelope,
        make_format: Callable[[Words], AnswerFormat],
        words: Words,
    ) -> None:
        self.request = call.request
        self._call = call
        self._formats = [make_format(words) for _ in range(call.num_answers)]
        self._envelope = envelope
        self._words = words
        self._prompts: dict[int, list[int]] = {}  # This holds the ids of prompts where they are requested.
        self._so_far = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        self._started: set[int] = set()
        self._text_chunks: dict[int, TextChunk] = {}  # These are of the choices that have started.
        self._finished: dict[int, Finish] = {}

    def whole(self, answers: Sequence[GenerateResponse]) -> Json:
        for answer in answers:
            self._note_prompt(answer)
        finishes = [answer.finish for answer in answers]
        each = self._call.answers_each  # The first answer to a prompt reports on the prompt.
        choices = [
            answer_format.whole(self._piece(answer, answers[place // each * each]))
            for place, (answer_format, answer) in enumerate(zip(self._formats, answers, strict=True))
        ]
        return {
            **self._enveloped(self._formats[0].object_name, answers[0], self._with_prompts(choices)),
            **self._of_prompt(0),
            **self._formats[0].beside(self._piece(answers[0], answers[0])),
            "usage": self._usage(finishes),
            "isthmus": answers_json(finishes),
        }

    def events(self, response: GenerateResponse) -> list[Event]:
        if response.index in self._text_chunks and is_text_alone(response):
            return [Event(self._text_chunks[response.index].filled(response.text))]
        events = [Event(chunk) for chunk in self._chunks(response)]
        return [*events, Event("[DONE]")] if self._is_over else events

    def failure(self, error: Exception) -> list[Event]:
        return [Event(error_json(error))]

    @property
    def _is_over(self) -> bool:
        return len(self._finished) == self._call.num_answers

    def _chunks(self, response: GenerateResponse) -> list[Json]:
        self._note_prompt(response)
        self._count(response)
        piece, answer_format = self._piece(response, response), self._formats[response.index]
        choices = [] if response.index in self._started else [answer_format.opening(response.index)]
        if not piece.is_empty:
            choices.append(answer_format.delta(piece))
        chunks = [self._chunk(response, [choice]) for choice in choices if choice is not None]
        if chunks and response.index not in self._started:
            self._with_prompts(chunks[0]["choices"])
            chunks[0] |= self._of_prompt(response.index)
            self._started.add(response.index)
            if self._call.streams_text_alone:
                self._text_chunks[response.index] = self._text_chunk(response)
        if response.HasField("finish"):
            chunks[-1]["isthmus"] = isthmus_json(response.finish)
            self._finished[response.index] = response.finish
            if self._is_over and self._call.include_usage:
                finishes = [self._finished[index] for index in range(self._call.num_answers)]
                chunks.append({**self._chunk(response, []), "usage": self._usage(finishes)})
        return chunks

    def _count(self, response: GenerateResponse) -> None:
        """Count the tokens so far. The router reports every prompt's ids only to a call that wants usage with
        each chunk."""
        prompt, answer = len(response.prompt_token_ids), len(response.token_ids)
        for name, count in zip(self._so_far, (prompt, answer, prompt + answer), strict=True):
            self._so_far[name] += count

    def _text_chunk(self, response: GenerateResponse) -> TextChunk:
        index = response.index
        delta = self._formats[index].delta
        return TextChunk(lambda text: self._chunk(response, [delta(ChoicePiece(text, index=index))]))

    def _usage(self, finishes: Sequence[Finish]) -> Json:
        usage = usage_json(finishes, self._call.answers_each)
        if not self._call.echo.only:
            return usage
        return usage | {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}

    def _note_prompt(self, response: GenerateResponse) -> None:
        if response.prompt_token_ids and self._call.return_token_ids:
            self._prompts[response.index // self._call.answers_each] = list(response.prompt_token_ids)

    def _with_prompts(self, choices: list[Json]) -> list[Json]:
        if self._prompts and self._formats[0].has_prompts:
            for choice in choices:
                choice["prompt_token_ids"] = self._prompts[choice["index"] // self._call.answers_each]
        return choices

    def _of_prompt(self, index: int) -> Json:
        if not self._prompts or self._formats[0].has_prompts:
            return {}
        return {"prompt_token_ids": self._prompts[index // self._call.answers_each]}

    def _chunk(self, response: GenerateResponse, choices: list[Json]) -> Json:
        chunk = self._enveloped(self._formats[0].chunk_object_name, response, choices)
        if not self._call.include_usage:
            return chunk
        return {**chunk, "usage": dict(self._so_far) if self._call.usage_in_chunks else None}

    def _enveloped(self, object_name: str, response: GenerateResponse, choices: list[Json]) -> Json:
        return {
            "id": self._formats[0].id_prefix + response.request_id,
            "object": object_name,
            "created": self._envelope.created,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _piece(self, response: GenerateResponse, about_prompt: GenerateResponse) -> ChoicePiece:
        """Return the piece. `about_prompt` is the response that reports on its prompt."""
        call = self._call
        piece = ChoicePiece(
            response.text,
            token_ids=response.token_ids if call.return_token_ids else None,
            logprobs=response.logprobs if call.wants_logprobs else None,
            finish_reason=word_of(response.finish, FINISH_REASONS) if response.HasField("finish") else None,
            reasoning=response.reasoning,
            calls=response.tool_calls,
            index=response.index,
        )
        if call.echo.echoes:
            piece = self._echoing(piece, about_prompt)
        if call.echo.num_top is None:
            return piece
        prompt = vllm_prompt_logprobs(about_prompt.prompt_logprobs, call.echo.num_top, self._words)
        return replace(piece, prompt_logprobs=prompt)

    def _echoing(self, piece: ChoicePiece, about_prompt: GenerateResponse) -> ChoicePiece:
        call, text, logprobs, token_ids = self._call, piece.text, piece.logprobs, piece.token_ids
        if call.echo.only:
            text, token_ids = "", token_ids if token_ids is None else ()
            logprobs = logprobs if logprobs is None else ()
            piece = replace(piece, finish_reason=piece.finish_reason and "length")
        if piece.index not in self._started:
            request = call.requests[piece.index // call.answers_each]
            text = prompt_text(request, self._words) + text
        if logprobs is None:
            return replace(piece, text=text, token_ids=token_ids)
        logprobs = [*cut(about_prompt.prompt_logprobs, call.request.sampling.logprobs), *logprobs]
        first_id = about_prompt.prompt_token_ids[0] if about_prompt.prompt_token_ids else None
        return replace(piece, text=text, token_ids=token_ids, logprobs=logprobs, first_id=first_id)
