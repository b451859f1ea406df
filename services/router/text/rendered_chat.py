"""Chats become prompt ids, with past answers as the ids that were generated."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from services.router.text.answer_ends import unended
from services.router.text.answer_message import CallText
from services.router.text.chat_turns import ChatTurns, Turn, read_chat
from services.router.text.splices import Frame, Sentinels, Written, example_after, example_before, unseen
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import Chat

Encode = Callable[[str], list[int]]
_ANSWER_END = 64  # Templates write fewer ids after the last value of a call.


@dataclass(frozen=True, slots=True)
class PastAnswer:
    """`prompt_end` are the last ids of the prompt of this answer, as far as they are known."""

    ids: Sequence[int]
    has_reasoning: bool = False
    prompt_end: Sequence[int] = ()


NO_ANSWERS: Mapping[int, PastAnswer] = {}


def render_chat(
    tokenizer: Tokenizer,
    chat: Chat,
    remembered: Mapping[int, PastAnswer] = NO_ANSWERS,
    *,
    keep_thinking: bool = False,
    call_text: CallText | None = None,
) -> "RenderedChat":
    """Return the prompt's ids, up to where the assistant's next turn begins or, where the last turn is
    continued, to its end.

    Past answers with `token_ids`, or those `remembered` by their message's index, keep their ids, in the
    frame that the template gives them. One that the template does not show in full, because it leaves
    thinking out, is written as the template has it, unless `keep_thinking` is set.

    Control tokens in messages are text, unless the tokenizer is to read them. An end-of-sequence id at an
    answer's end is dropped where the template writes its own end marker next.

    Raises InvalidRequest, which names the message and its field, or says why the template refuses the chat.
    """
    read = read_chat(chat)
    controls = tokenizer.controls
    hidden = None if controls is None else controls.hide(read)
    if controls is None or hidden is None:
        return _render(tokenizer, chat, read, remembered, keep_thinking, call_text)
    try:
        return _render(tokenizer, chat, hidden, remembered, keep_thinking, call_text, controls.encode)
    except InvalidRequest as error:
        raise InvalidRequest(error.field, controls.show(error.problem)) from error


def _render(
    tokenizer: Tokenizer,
    chat: Chat,
    read: ChatTurns,
    remembered: Mapping[int, PastAnswer],
    keep_thinking: bool,
    call_text: CallText | None,
    encode: Encode | None = None,
) -> "RenderedChat":
    arranged = tokenizer.arranged(read, call_text)
    given = {i: PastAnswer(message.token_ids) for i, message in enumerate(chat.messages) if message.token_ids}
    _check_stand_alone(given, arranged)
    places = {origins[0]: place for place, origins in enumerate(arranged.origins) if len(origins) == 1}
    rendering = _Rendering(tokenizer, arranged, _at(places, given), keep_thinking, encode)
    wanted = rendering.worth_trying(_at(places, remembered))
    while True:
        spliced = rendering.splice(wanted)
        if isinstance(spliced, list):
            return RenderedChat(spliced, frozenset(arranged.origins[place][0] for place in wanted))
        wanted = {place: answer for place, answer in wanted.items() if place not in spliced}


def _at(places: Mapping[int, int], answers: Mapping[int, PastAnswer]) -> dict[int, PastAnswer]:
    return {places[index]: answer for index, answer in answers.items() if index in places}


def _check_stand_alone(given: Mapping[int, PastAnswer], chat: ChatTurns) -> None:
    joined = [index for origins in chat.origins if len(origins) > 1 for index in origins if index in given]
    if joined:
        raise InvalidRequest(
            f"chat.messages[{joined[0]}].token_ids",
            "cannot be used: the model's chat template takes this turn "
            "only joined with another one or in parts, as text",
        )


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """`spliced` are the remembered answers that kept their ids, by their message's index."""

    ids: list[int]
    spliced: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Splice:
    before: str
    ids: Sequence[int]
    is_ended: bool


class _Rendering:
    """`given` are the answers with the client's ids, which must be kept. `encode` makes ids of rendered text
    instead of the tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat: ChatTurns,
        given: Mapping[int, PastAnswer],
        keep_thinking: bool,
        encode: Encode | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._given = given
        self._keep_thinking = keep_thinking
        self._encode = encode
        self._end_markers = [text for i in tokenizer.eos_token_ids if (text := tokenizer.text_of([i]))]
        self._frames: dict[tuple[object, ...], Frame | None] = {}
        questions = [index for index, turn in enumerate(chat.turns) if turn.role == "user"]
        self._last_question = max(questions, default=-1)

    def worth_trying(self, remembered: Mapping[int, PastAnswer]) -> dict[int, PastAnswer]:
        """Return the answers but those whose thinking the template is known to leave out."""
        keeps = self._keep_thinking or self._tokenizer.keeps_past_reasoning
        return {
            index: answer
            for index, answer in remembered.items()
            if index not in self._given and (keeps or not answer.has_reasoning or index > self._last_question)
        }

    def splice(self, remembered: Mapping[int, PastAnswer]) -> list[int] | set[int]:
        answers = {**remembered, **self._given}
        sentinels = Sentinels(secrets.token_hex(16))
        try:
            rendered = self._rendered(sentinels, answers)
        except InvalidRequest:
            if remembered:  # The template may refuse the sentinels.
                return set(remembered)
            raise
        self._check_shown(rendered, answers)
        written = self._written(sentinels, rendered, answers)
        unwritten = {index for index in answers if index not in written}
        if unwritten:
            return self._left_out(unwritten)
        return self._assemble(rendered, [(written[index], answers[index]) for index in sorted(answers)])

    def _rendered(self, sentinels: Sentinels, answers: Mapping[int, PastAnswer]) -> str:
        turns = [
            self._stand_in(sentinels, index, answers[index].has_reasoning) if index in answers else turn
            for index, turn in enumerate(self._chat.turns)
        ]
        return self._render(turns)

    def _render(self, turns: Iterable[Turn]) -> str:
        return self._tokenizer.render_template(
            list(turns), self._chat.variables, self._chat.tools, continues=self._chat.continues
        )

    def _check_shown(self, rendered: str, answers: Mapping[int, PastAnswer]) -> None:
        """Refuse messages that the template silently leaves out. A text that is not found may have been
        written differently, so a sentinel, which cannot be, is rendered in its place."""
        turns = [(index, turn) for index, turn in enumerate(self._chat.turns) if index not in answers]
        doubtful = set(unseen(rendered, turns))
        if not doubtful:
            return
        sentinels = Sentinels(secrets.token_hex(16))
        try:
            trial = self._render(
                sentinels.stand_in(turn, index) if index in doubtful else turn
                for index, turn in enumerate(self._chat.turns)
            )
        except InvalidRequest:
            return  # The template computes with the text.
        hidden = doubtful - {written.index for written in sentinels.find(trial) if "c" in written.parts}
        if hidden:
            raise InvalidRequest(
                f"{self._chat.name_of(min(hidden))}.content",
                "cannot be used: the model's chat template does not show it there",
            )

    def _stand_in(self, sentinels: Sentinels, index: int, has_reasoning: bool) -> Turn:
        turn = self._chat.turns[index]
        shown = Turn(turn.role, turn.content, "r" if has_reasoning else "", turn.calls, name=turn.name)
        return sentinels.stand_in(shown, index)

    def _written(
        self, sentinels: Sentinels, rendered: str, answers: Mapping[int, PastAnswer]
    ) -> dict[int, Written]:
        found = sentinels.find(rendered)
        indices = [each.index for each in found]
        in_order = indices == sorted(set(indices))
        return {each.index: each for each in found if in_order and each.is_once(self._chat.turns[each.index])}

    def _left_out(self, indices: set[int]) -> set[int]:
        for index in sorted(indices & self._given.keys()):
            self._refuse(index)
        return indices

    def _refuse(self, index: int) -> NoReturn:
        raise InvalidRequest(
            f"{self._chat.name_of(index)}.token_ids",
            "cannot be used: the model's chat template does not write this turn exactly once and in order",
        )

    def _assemble(self, rendered: str, answers: Sequence[tuple[Written, PastAnswer]]) -> list[int] | set[int]:
        splices, begin, left_out = list[_Splice](), 0, set[int]()
        ends = [*(written.start for written, _ in answers), len(rendered)][1:]
        for (written, answer), end in zip(answers, ends, strict=True):
            frame = self._frame(written)
            before = self._before(written, answer, frame, rendered[begin : written.start])
            skipped = self._skipped(written.index, answer, frame, rendered[written.end : end])
            if before is None or skipped is None:
                left_out.add(written.index)
                continue
            if self._goes_on(written.index):
                ids = unended(answer.ids, self._tokenizer.eos_token_ids)
                splices.append(_Splice(before, ids, is_ended=False))
            else:
                is_ended = frame is not None and frame.ends_with(self._end_markers)
                splices.append(_Splice(before, answer.ids, is_ended))
            begin = written.end + skipped
        return self._left_out(left_out) if left_out else self._joined(splices, rendered[begin:])

    def _before(self, written: Written, answer: PastAnswer, frame: Frame | None, before: str) -> str | None:
        """Return `before` up to the first of the answer's ids, or None where it is shown differently."""
        split = None if frame is None else frame.split_lead(before)
        if frame is None or split is None:
            return before if written.index in self._given and written.parts == ("c",) else None
        head, rest = split
        if any(marker in rest for marker in self._end_markers):
            return None  # This is the header of another turn.
        begun = frame.begun(self._tokenizer.text_of(answer.prompt_end) if answer.prompt_end else "")
        if written.index in self._given or self._keep_thinking or written.shows_reasoning:
            return head + begun
        is_shown_so = rest.startswith(begun) or written.index > self._last_question
        return head + begun if is_shown_so and not answer.has_reasoning else None

    def _goes_on(self, index: int) -> bool:
        return self._chat.continues and index == len(self._chat.turns) - 1

    def _skipped(self, index: int, answer: PastAnswer, frame: Frame | None, after: str) -> int | None:
        if not self._chat.turns[index].calls:
            return 0 if frame is None else frame.skip_marker(after, self._end_markers)
        is_ended = answer.ids[-1] in self._tokenizer.eos_token_ids
        end = None if is_ended else self._tokenizer.text_of(answer.ids[-_ANSWER_END:])
        return None if frame is None else frame.skip_tail(after, end, self._end_markers)

    def _joined(self, splices: "Sequence[_Splice]", rest: str) -> list[int]:
        texts = [*(splice.before for splice in splices), rest]
        ids = self._encoded(texts[0])
        for splice, text in zip(splices, texts[1:], strict=True):
            next_ids = self._encoded(text)
            ids += self._without_end_marker(splice, next_ids)
            ids += next_ids
        return ids

    def _encoded(self, text: str) -> list[int]:
        if self._encode is not None and text:
            return self._encode(text)
        # The template writes the special tokens itself.
        return self._tokenizer.encode(text, special_tokens=False) if text else []

    def _without_end_marker(self, splice: "_Splice", next_ids: Sequence[int]) -> Sequence[int]:
        eos, ids = self._tokenizer.eos_token_ids, splice.ids
        if not (ids and ids[-1] in eos and next_ids):
            return ids
        ends_so = splice.is_ended and self._tokenizer.is_silent(next_ids[0])
        return ids[:-1] if ends_so or next_ids[0] in eos else ids

    # -- frames -----------------------------------------------------------------------------------

    def _frame(self, written: Written) -> Frame | None:
        index = written.index
        role = self._chat.turns[index - 1].role if index else None
        shows_ids = self._tokenizer.shows_call_ids(self._chat.tools)
        calls = tuple((call.name, call.id if shows_ids else "") for call in self._chat.turns[index].calls)
        key = (role, written.shows_reasoning, calls)
        if key not in self._frames:
            self._frames[key] = self._try_frame(role, index, written.shows_reasoning)
        return self._frames[key]

    def _try_frame(self, role: str | None, index: int, has_reasoning: bool) -> Frame | None:
        sentinels, before = Sentinels(secrets.token_hex(16)), example_before(role)
        last = self._stand_in(sentinels, index, has_reasoning)
        try:
            shown, prompted, answered = (
                self._shown(turns, generation_prompt=prompts)
                for turns, prompts in ((before, False), (before, True), ([*before, last], False))
            )
        except InvalidRequest:
            return None
        found = sentinels.find(answered)
        if len(found) != 1 or not prompted.startswith(shown) or not answered.startswith(shown):
            return None
        lead, tail = answered[len(shown) : found[0].start], answered[found[0].end :]
        inner_lead = self._inner_lead(shown, [*before, last], sentinels) or lead
        return Frame(lead, tail, prompted[len(shown) :], inner_lead)

    def _shown(self, turns: Sequence[Turn], *, generation_prompt: bool) -> str:
        """Render the turns, with a tool where the chat has some, as a model may have another template
        for tools."""
        return self._tokenizer.render_template(
            turns, self._chat.variables, self._chat.tools[:1], generation_prompt=generation_prompt
        )

    def _inner_lead(self, shown: str, turns: Sequence[Turn], sentinels: Sentinels) -> str:
        """Return the text before the last turn's first sentinel where other turns follow, or "" where the
        template does not show that. `shown` is the text before that turn."""
        try:
            followed = self._shown([*turns, *example_after(turns[-1])], generation_prompt=False)
        except InvalidRequest:
            return ""
        found = sentinels.find(followed)
        return followed[len(shown) : found[0].start] if found and followed.startswith(shown) else ""
