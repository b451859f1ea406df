"""One answer: its tokens, over as many ranks as it takes, as responses."""

import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.router.cluster import Cluster
from services.router.request.answer_text import Said
from services.router.request.answers.prompt_scores import PromptScores
from services.router.request.failover import FailoverStream
from services.router.request.finish import finish_of
from services.router.request.parsers import Parsers
from services.router.request.progress import Checked, Progress, Served
from services.router.request.telemetry.metrics import RouterMetrics
from services.router.request.telemetry.stages import Stages, stages_of
from services.router.text.chats.conversations import ConversationMemory, drift_tokens
from services.router.text.chats.own_ids import until_stop_string, without_stop_token
from services.router.text.chats.past_answers import PastAnswers
from services.router.text.tokenizer import Tokenizer
from services.values.request import Admitted, FinishReason, Output
from services.wire import convert_request
from services.wire.isthmus.v1 import generation_pb2
from services.wire.packed_ids import PackedIds

_THINKING_ENDS = "</think>"  # in content: nothing has told it apart, but templates do


@dataclass(frozen=True, slots=True)
class Means:
    """What all answers of a router are made with. `allowed_wait_s`: how long a request may wait for its turn,
    of the seconds that it has left."""

    cluster: Cluster
    tokenizer: Tokenizer
    memory: ConversationMemory
    metrics: RouterMetrics
    parsers: Parsers
    max_attempts: int
    allowed_wait_s: Callable[[Checked, float], float]
    clock: Callable[[], float]


class ResponseStream:
    """The responses of one answer, made of its tokens. `deadline` is on the clock of `means`."""

    def __init__(
        self,
        means: Means,
        checked: Checked,
        prompt: PackedIds,
        past: PastAnswers | None,
        progress: Progress,
        deadline: float,
    ) -> None:
        self._past = past
        # Of a chat's whole answer: one that goes on with a turn is a part of it.
        is_whole = past is not None and checked.tools.continued is None
        self._answer_id = secrets.token_hex(16) if is_whole else ""
        self._has_begun = False
        self._scores: PromptScores | None = None
        self._output: Output | None = None  # that comes when all is said of the prompt
        self._cluster = means.cluster
        self._tokenizer = means.tokenizer
        self._memory = means.memory
        self._metrics = means.metrics
        self._clock = means.clock
        self._checked = checked
        self._prompt = prompt
        self._progress = progress
        self._end_ids = means.parsers.end_ids(checked.tools)
        self._stream = FailoverStream(
            self._cluster,
            self._metrics,
            checked,
            prompt,
            progress,
            eos_token_ids=self._end_ids,
            deadline=deadline,
            max_attempts=means.max_attempts,
            allowed_wait_s=partial(means.allowed_wait_s, checked),
            clock=self._clock,
        )
        self._text = means.parsers.text_of(checked.tools, checked.sampling, prompt.ids)
        name = checked.conversation_id
        remembered = self._memory.recall(checked.tenant, name) if name else None
        self._drift = None if remembered is None else drift_tokens(remembered, prompt.ids)
        if checked.index == 0:
            self._metrics.drifted(self._drift or 0)

    async def aclose(self) -> None:
        """Who has made `progress` gives up what it holds."""

    async def next_response(self) -> generation_pb2.GenerateResponse:
        """The first one has the answer's id, if it is of a chat. Raises as FailoverStream.next."""
        if self._output is None:
            self._output = await self._next_output()
        if self._scores is not None and not self._scores.is_last:
            return self._of_prompt(self._scores)
        output, self._output = self._output, None
        response = self._respond(output)
        if self._scores is not None:
            response.prompt_logprobs.extend(self._scores.next_piece())
            self._scores = None
        return response

    async def _next_output(self) -> Output:
        """With tokens, or the last."""
        while True:
            output = await self._stream.next()
            if output.admitted is not None:
                self._note_admitted(output.admitted)
            if output.prompt_logprobs is not None:
                self._scores = PromptScores(self._prompt.ids, output.prompt_logprobs)
                self._progress.prompt_is_told = True
            if output.token_ids or output.finished is not None:
                return output

    def _of_prompt(self, scores: PromptScores) -> generation_pb2.GenerateResponse:
        response = self._new_response()
        response.prompt_logprobs.extend(scores.next_piece())
        return response

    def _new_response(self, **said: Any) -> generation_pb2.GenerateResponse:
        response = generation_pb2.GenerateResponse(request_id=self._checked.request_id, **said)
        if self._checked.index:
            response.index = self._checked.index
        if not self._has_begun:
            response.answer_id, self._has_begun = self._answer_id, True
        return response

    def _note_admitted(self, admitted: Admitted) -> None:
        progress = self._progress
        assert progress.placed is not None
        progress.served.append(Served(progress.placed, admitted, progress.tokens_when_placed))
        if len(progress.served) == 1:
            self._metrics.admitted(progress.placed, admitted, is_further=progress.index > 0)
        self._metrics.transferred(admitted)
        self._cluster.admitted(self._checked.answer_key, progress.placed, admitted)
        if progress.turns is not None:
            progress.turns.held(progress.index, progress.placed.decision.chosen.decode.id)

    def _note_tokens(self, num_tokens: int) -> None:
        progress, now = self._progress, self._clock()
        if progress.first_token_s is None:
            progress.first_token_s = now - progress.began_s
            progress.stages = self._stages()
            progress.note("first_token")
            if progress.index == 0:  # what the client waits for
                self._metrics.first_token(progress)
        else:
            self._metrics.next_tokens(num_tokens, now - progress.last_tokens_at_s)
        self._metrics.generated(num_tokens)
        progress.last_tokens_at_s = now

    def _stages(self) -> Stages:
        progress = self._progress
        assert progress.admitted is not None and progress.first_token_s is not None, "it comes with a token"
        return stages_of(
            tokenize_s=progress.tokenize_s,
            route_s=progress.route_s,
            sent_s=progress.sent_s,
            first_token_s=progress.first_token_s,
            admitted=progress.admitted,
        )

    def _respond(self, output: Output) -> generation_pb2.GenerateResponse:
        progress = self._progress
        said, reason, matched = self._said(output)
        num_tokens = said.num_tokens
        if num_tokens:
            self._note_tokens(num_tokens)
        if output.drafted_tokens and progress.served:  # perhaps at the end alone, without a token
            progress.served[-1].note_drafts(output)
        token_ids = output.token_ids[:num_tokens]
        progress.output_ids.extend(token_ids)
        response = self._new_response(text=said.content, token_ids=token_ids)
        # A message costs by the fields that are set, though to nothing; most have none of these.
        if said.reasoning:
            response.reasoning = said.reasoning
        if said.calls:
            response.tool_calls.extend(said.calls)
        if output.logprobs:
            response.logprobs.extend(map(convert_request.logprobs_to_proto, output.logprobs[:num_tokens]))
        if reason is not None and output.finished is None:
            assert progress.stream is not None
            progress.stream.close()  # the rank would go on
        self._note_text()
        if reason is not None:
            has_called = reason is FinishReason.STOP and self._text.num_called
            self._finish(response, FinishReason.TOOL_CALLS if has_called else reason, matched)
            if reason is not FinishReason.ABORTED and self._remember(said.matched):
                response.finish.answer_id = self._answer_id
        return response

    def _note_text(self) -> None:
        progress, text = self._progress, self._text
        progress.reasoning_tokens = text.reasoning_tokens
        progress.num_calls = text.num_called
        progress.num_broken_calls = text.num_broken

    def _said(self, output: Output) -> tuple[Said, FinishReason | None, str]:
        """What the tokens say, whether they end the answer, and the stop string or stop token that did."""
        ids, terminator = output.token_ids, ""
        if output.finished is FinishReason.STOP and ids and self._ends(ids[-1]):
            terminator = self._tokenizer.token_text(ids[-1])
            ids = ids if self._shows(ids[-1]) else ids[:-1]
        said = self._text.push(ids)
        if said.ended or output.finished is None:
            return said, FinishReason.STOP if said.ended else None, said.matched
        rest = self._text.finish()
        said.content += rest.content
        said.reasoning += rest.reasoning
        said.calls += rest.calls
        said.num_tokens = len(output.token_ids)
        if rest.ended:
            said.matched = rest.matched
            return said, FinishReason.STOP, rest.matched
        return said, output.finished, terminator

    def _ends(self, token_id: int) -> bool:
        """Whether that is what ended the answer: under a constraint it may be that nothing could follow."""
        sampling = self._checked.sampling
        return sampling.constraint is None or token_id in (*sampling.stop_token_ids, *self._end_ids)

    def _shows(self, stop_token: int) -> bool:
        """Whether its text is part of the answer."""
        wanted = self._checked.sampling.include_stop_str_in_output
        return wanted and not self._tokenizer.is_silent(stop_token)

    def _finish(self, response: generation_pb2.GenerateResponse, reason: FinishReason, matched: str) -> None:
        progress = self._progress
        progress.finish_reason = reason
        progress.finish = finish_of(progress, reason, matched, self._drift)
        response.finish.CopyFrom(progress.finish)
        all_ids = self._prompt.ids + array("I", progress.output_ids)
        if name := self._checked.conversation_id:
            # Of several answers the conversation goes on with any one: not known with which.
            known = all_ids if self._checked.answers == 1 else self._prompt.ids
            self._memory.remember(self._checked.tenant, name, known)
        if progress.placed is not None and reason is not FinishReason.ABORTED:
            self._cluster.finished(progress.placed, all_ids)

    def _remember(self, stop_string: str) -> bool:
        """Whether the answer can be found again."""
        if self._past is None or not self._answer_id:
            return False
        ids, message = self._own_ids(stop_string), self._text.message()
        is_told_apart = message.reasoning or _THINKING_ENDS not in message.content
        return bool(ids and is_told_apart) and self._past.remember(
            self._prompt.ids, array("I", ids), message, self._answer_id
        )

    def _own_ids(self, stop_string: str) -> Sequence[int]:
        ids, sampling = self._progress.output_ids, self._checked.sampling
        if stop_string:
            included = sampling.include_stop_str_in_output
            return until_stop_string(self._tokenizer, ids, stop_string, included=included)
        if ids and self._shows(ids[-1]):
            return ids
        return without_stop_token(ids, sampling.stop_token_ids, self._end_ids)
