"""A ResponseStream makes responses of one answer's tokens.

A request's last response states the reason for the end, the usage, the ranks and the time that each stage
took.
"""

import secrets
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from services.router.cluster import Placed
from services.router.request.answer_text import Said
from services.router.request.failover import AnswerContext, FailoverStream
from services.router.request.progress import Progress, Served
from services.router.text.answer_ends import until_stop_string, without_stop_token
from services.router.text.chat_memory import drift_tokens
from services.values.prompt_logprobs import PromptLogprobs, ScoredToken
from services.values.request import Admitted, FinishReason, Output, Pulled
from services.wire import convert, convert_request
from services.wire.fields import message_of
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.common_pb2 import TokenLogprob, TokenLogprobs

_NOTHING_PULLED = Pulled()
_TOTALS = tuple(field.name for field in generation_pb2.Totals.DESCRIPTOR.fields)


def finish_of(
    progress: Progress, reason: FinishReason, matched_stop: str, drift_tokens: int | None
) -> generation_pb2.Finish:
    """Return the Finish of an answer. `drift_tokens` is None where this router does not remember the
    conversation's last turn."""
    placements = list(_placements(progress))
    placement = placements[0] if placements else None
    if placement is None and progress.placed is not None:  # Without one it was aborted earlier.
        placement = _placement(progress.placed)
    usage = generation_pb2.Usage(drift_tokens=drift_tokens)
    if placements:
        usage.MergeFrom(placements[0].usage)
    usage.completion_tokens = len(progress.output_ids)
    usage.reasoning_tokens = progress.reasoning_tokens
    return generation_pb2.Finish(
        reason=convert_request.finish_reason_to_proto(reason),
        matched_stop=matched_stop,
        usage=usage,
        placement=placement,
        placements=placements,
        totals=_totals(placements),
        stages=_stages(progress),
    )


def _placements(progress: Progress) -> Iterator[generation_pb2.Placement]:
    bounds = [*(each.first_output for each in progress.served), len(progress.output_ids)]
    for each, end in zip(progress.served, bounds[1:], strict=True):
        yield _placement(each.placed, each.admitted.pulled, _usage(each, end - each.first_output))


def _placement(
    placed: Placed, pulled: Pulled | None = None, usage: generation_pb2.Usage | None = None
) -> generation_pb2.Placement:
    chosen = placed.decision.chosen
    return generation_pb2.Placement(
        decode=convert.rank_id_to_proto(chosen.decode.id),
        prefill=None if chosen.prefill is None else convert.rank_id_to_proto(chosen.prefill.id),
        plan=convert.plan_to_proto(placed.plan),
        predicted_prefix_len=chosen.decode.hit_tokens,
        predicted_reused_tokens=chosen.reused_tokens,
        reason=placed.decision.reason,
        usage=usage,
        source=None if chosen.source is None else convert.rank_id_to_proto(chosen.source.id),
        pull_refused="" if pulled is None else pulled.refused,
    )


def _usage(served: Served, completion_tokens: int) -> generation_pb2.Usage:
    admitted, pulled = served.admitted, served.admitted.pulled or _NOTHING_PULLED
    return message_of(
        generation_pb2.Usage,
        admitted,
        completion_tokens=completion_tokens,
        reused_tokens=admitted.reused_tokens,
        delta_tokens=admitted.delta_tokens,
        kv_bytes_saved=admitted.kv_bytes_saved,
        carried_bytes=admitted.carried_bytes,
        drafted_tokens=served.drafted_tokens,
        accepted_draft_tokens=served.accepted_draft_tokens,
        pulled_tokens=pulled.tokens,
        pulled_bytes=pulled.bytes,
    )


def _totals(placements: Sequence[generation_pb2.Placement]) -> generation_pb2.Totals:
    usages = [placement.usage for placement in placements]
    if len(usages) == 1:
        [usage] = usages
        return generation_pb2.Totals(**{name: getattr(usage, name) for name in _TOTALS})
    return generation_pb2.Totals(**{name: sum(getattr(each, name) for each in usages) for name in _TOTALS})


def _stages(progress: Progress) -> generation_pb2.StageTimes:
    first_token_s = progress.first_token_s or 0.0
    if progress.stages is not None:
        return generation_pb2.StageTimes(**progress.stages._asdict(), first_token_s=first_token_s)
    return generation_pb2.StageTimes(
        tokenize_s=progress.tokenize_s, route_s=progress.route_s, first_token_s=first_token_s
    )


# This many TokenLogprobs take some ten milliseconds to make, and 100 KB. A client's gRPC accepts 4 MiB.
_PIECE = 8_192
_THINKING_ENDS = "</think>"  # Where content has this, no parser has read the thinking, but templates do.


class PromptScores:
    """This splits the log-probabilities of a prompt's last tokens, as they arrive, into responses."""

    def __init__(self, prompt_ids: Sequence[int], told: PromptLogprobs) -> None:
        self._ids = iter(prompt_ids[len(prompt_ids) - len(told) :])
        self._tokens = told.tokens()
        self._num_left = len(told)
        self._size = max(1, _PIECE // (1 + told.num_top))

    @property
    def is_last(self) -> bool:
        return self._num_left <= self._size

    def next_piece(self) -> list[TokenLogprobs]:
        self._num_left -= self._size
        pairs = islice(zip(self._ids, self._tokens, strict=True), self._size)
        return [_scored_message(token_id, scored) for token_id, scored in pairs]


def _scored_message(token_id: int, scored: ScoredToken) -> TokenLogprobs:
    chosen = TokenLogprob(token_id=token_id, logprob=scored.logprob, rank=scored.rank)
    top = [
        TokenLogprob(token_id=other, logprob=logprob, rank=rank)
        for rank, (other, logprob) in enumerate(scored.top, start=1)
    ]
    return TokenLogprobs(chosen=chosen, top=top)


class ResponseStream:
    def __init__(self, context: AnswerContext, progress: Progress) -> None:
        request = progress.request
        # A chat's whole answer has an id; one that continues a turn is only a part of an answer.
        is_whole = request.past is not None and request.tools.continued is None
        self._answer_id = secrets.token_hex(16) if is_whole else ""
        self._has_begun = False
        self._scores: PromptScores | None = None
        self._output: Output | None = None  # It waits until the prompt's log-probabilities are sent.
        self._context = context
        self._tokenizer = context.tokenizer
        self._metrics = context.metrics
        self._request = request
        self._prompt_ids = request.prompt.ids
        self._progress = progress
        self._end_ids = context.parsers.end_ids(request.tools)
        self._stream = FailoverStream(context, progress, self._end_ids)
        self._text = context.parsers.text_of(request.tools, request.sampling, self._prompt_ids)
        name = request.conversation_id
        remembered = context.memory.recall(request.tenant, name) if name else None
        self._drift = None if remembered is None else drift_tokens(remembered, self._prompt_ids)
        if request.index == 0:
            self._metrics.drifted(self._drift or 0)

    async def aclose(self) -> None:
        """Do nothing, as the owner of `progress` releases it."""

    async def next_response(self) -> generation_pb2.GenerateResponse:
        """Return the next response. The first one has the answer's id, if it answers a chat. Raises as
        FailoverStream.next."""
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
        while True:
            output = await self._stream.next()
            if output.admitted is not None:
                self._note_admitted(output.admitted)
            if output.prompt_logprobs is not None:
                self._scores = PromptScores(self._prompt_ids, output.prompt_logprobs)
                self._progress.told_of_prompt()
            if output.token_ids or output.finished is not None:
                return output

    def _of_prompt(self, scores: PromptScores) -> generation_pb2.GenerateResponse:
        response = self._new_response()
        response.prompt_logprobs.extend(scores.next_piece())
        return response

    def _new_response(self, **said: Any) -> generation_pb2.GenerateResponse:
        response = generation_pb2.GenerateResponse(request_id=self._request.request_id, **said)
        if self._request.index:
            response.index = self._request.index
        if not self._has_begun:
            response.answer_id, self._has_begun = self._answer_id, True
        return response

    def _note_admitted(self, admitted: Admitted) -> None:
        progress = self._progress
        progress.admit(admitted)
        assert progress.placed is not None
        if len(progress.served) == 1:
            self._metrics.admitted(progress.placed, admitted, is_further=self._request.index > 0)
        self._metrics.transferred(progress.placed, admitted)
        if progress.account is not None:
            is_first = len(progress.served) == 1 and self._request.index == 0
            progress.account.admitted(admitted, is_further=not is_first)
        self._context.cluster.admitted(self._request.answer_key, progress.placed, admitted)

    def _note_tokens(self, token_ids: Sequence[int]) -> None:
        gap_s = self._progress.add_tokens(token_ids, self._context.clock())
        if gap_s is not None:
            self._metrics.next_tokens(len(token_ids), gap_s)
        elif self._request.index == 0:  # The client waits for this one.
            self._metrics.first_token(self._progress)
        self._metrics.generated(len(token_ids))
        if self._progress.account is not None:
            self._progress.account.generated(len(token_ids))

    def _respond(self, output: Output) -> generation_pb2.GenerateResponse:
        progress = self._progress
        said, reason, matched = self._said(output)
        token_ids = output.token_ids[: said.num_tokens]
        if token_ids:
            self._note_tokens(token_ids)
        if output.drafted_tokens:
            progress.add_drafts(output)
        response = self._new_response(text=said.content, token_ids=token_ids)
        # A message costs time for each field that is set, even to an empty value; most responses need none of
        # these.
        if said.reasoning:
            response.reasoning = said.reasoning
        if said.calls:
            response.tool_calls.extend(said.calls)
        if output.logprobs:
            response.logprobs.extend(
                map(convert_request.logprobs_to_proto, output.logprobs[: said.num_tokens])
            )
        if reason is not None and output.finished is None:
            progress.release()  # Without this the rank would continue.
        text = self._text
        progress.read(text.reasoning_tokens, text.num_called, text.num_broken)
        if reason is not None:
            has_called = reason is FinishReason.STOP and text.num_called
            self._finish(response, FinishReason.TOOL_CALLS if has_called else reason, matched)
            if reason is not FinishReason.ABORTED and self._remember(said.matched):
                response.finish.answer_id = self._answer_id
        return response

    def _said(self, output: Output) -> tuple[Said, FinishReason | None, str]:
        """Return the text of the tokens, why they end the answer, if so, and what stopped it."""
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
        """Return whether this token ended the answer, and not a constraint that allows no other after it."""
        sampling = self._request.sampling
        return sampling.constraint is None or token_id in (*sampling.stop_token_ids, *self._end_ids)

    def _shows(self, stop_token: int) -> bool:
        wanted = self._request.sampling.include_stop_str_in_output
        return wanted and not self._tokenizer.is_silent(stop_token)

    def _finish(self, response: generation_pb2.GenerateResponse, reason: FinishReason, matched: str) -> None:
        progress = self._progress
        finish = finish_of(progress, reason, matched, self._drift)
        progress.end(reason, finish)
        response.finish.CopyFrom(finish)
        all_ids = self._prompt_ids + array("I", progress.output_ids)
        if name := self._request.conversation_id:
            # The conversation may continue from any of several answers.
            known = all_ids if self._request.answers == 1 else self._prompt_ids
            self._context.memory.remember(self._request.tenant, name, known)
        if progress.placed is not None and reason is not FinishReason.ABORTED:
            self._context.cluster.finished(progress.placed, all_ids)

    def _remember(self, stop_string: str) -> bool:
        past = self._request.past
        if past is None or not self._answer_id:
            return False
        ids, message = self._own_ids(stop_string), self._text.message()
        is_parsed = message.reasoning or _THINKING_ENDS not in message.content
        return bool(ids and is_parsed) and past.remember(
            self._prompt_ids, array("I", ids), message, self._answer_id
        )

    def _own_ids(self, stop_string: str) -> Sequence[int]:
        ids, sampling = self._progress.output_ids, self._request.sampling
        if stop_string:
            included = sampling.include_stop_str_in_output
            return until_stop_string(self._tokenizer, ids, stop_string, included=included)
        if ids and self._shows(ids[-1]):
            return ids
        return without_stop_token(ids, sampling.stop_token_ids, self._end_ids)
