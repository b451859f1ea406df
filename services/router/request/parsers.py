"""Parsers parse a model's answers, made ready for its tokenizer."""

from collections.abc import Sequence
from dataclasses import replace

from services.grammar.grammars import Grammars
from services.router.parsing.answer_formats import CALL_TEXTS, NONE, CallText
from services.router.parsing.parser_choice import ParserChoice
from services.router.request.answer_text import AnswerText
from services.router.request.tool_constraints import ToolConstraints
from services.router.request.tools import ChatTools, read_tools
from services.router.text.chats.own_ids import unended
from services.router.text.detokenizer import MarkerDecoder, TokenDecoder
from services.router.text.tokenizer import SHOWS_NO_TOOLS, Tokenizer
from services.values.errors import InvalidRequest
from services.values.request import SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

# So many of the prompt's last ids are read: what a template writes behind the last turn is shorter.
_PROMPT_END = 64


class Parsers:
    """A router has one. Without `keeps_strict` tools that say so are as any others."""

    def __init__(self, tokenizer: Tokenizer, choice: ParserChoice, keeps_strict: bool = True) -> None:
        self._keeps_strict = keeps_strict
        self._tokenizer = tokenizer
        self._choice = choice
        self._decoder: TokenDecoder = tokenizer
        self._more_ends: tuple[int, ...] = ()
        if choice != ParserChoice():
            self._decoder = MarkerDecoder(tokenizer, choice.shows)
            special = tokenizer.special_tokens.items()
            self._more_ends = tuple(token_id for token_id, text in special if text == choice.stop_token)

    def read_tools(self, request: GenerateRequest) -> ChatTools:
        """Read a chat's tools. Raises InvalidRequest, naming the field; also where nobody could parse the
        calls."""
        tools = read_tools(request)
        if tools.parsed and tools.callable is not None and self._choice.tools == NONE:
            if not self._tokenizer.shows_tools:
                raise InvalidRequest("chat.tools", SHOWS_NO_TOOLS)
            raise InvalidRequest(
                "chat.tools",
                "cannot be used: how this model writes calls is not known (--tool-parser); set "
                "tool_choice to none, or raw_answer",
            )
        return tools if self._keeps_strict else replace(tools, strict=frozenset())

    @property
    def call_text(self) -> CallText | None:
        """The model writes calls so, for templates that have no place for them."""
        return CALL_TEXTS.get(self._choice.tools)

    def end_ids(self, tools: ChatTools) -> tuple[int, ...]:
        ends = self._tokenizer.eos_token_ids
        more = self._more_ends if tools.callable is not None else ()
        return (*ends, *(token_id for token_id in more if token_id not in ends))

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return some hundred characters, in which the answer's turn has begun; empty where nobody asks."""
        is_asked = self._choice != ParserChoice()
        return self._tokenizer.text_of(prompt_ids[-_PROMPT_END:]) if is_asked else ""

    def tool_constraints(self, grammars: Grammars) -> ToolConstraints:
        special = self._tokenizer.special_tokens if self._choice != ParserChoice() else {}
        return ToolConstraints(self._choice, special, grammars, self.begins_thinking)

    def text_of(self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]) -> AnswerText:
        """Return the text of an answer to that prompt, which is still empty."""
        begun, said = self._begun(tools, prompt_ids)
        text = self._text_of(tools, sampling, begun)
        if tools.continued is not None:
            text.resume(prompt_ids, said)
        return text

    def _text_of(self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]) -> AnswerText:
        stop, includes_stop = sampling.stop, sampling.include_stop_str_in_output
        parser = None
        if tools.parsed and self._choice != ParserChoice():
            parser = self._choice.parser(tools.callable, self.prompt_end(prompt_ids))
        if parser is None:
            return AnswerText(self._tokenizer, stop, includes_stop=includes_stop)
        return AnswerText(self._decoder, stop, parser, tools.parallel, includes_stop, tools.past_ids)

    def _begun(self, tools: ChatTools, prompt_ids: Sequence[int]) -> tuple[Sequence[int], str]:
        """Return the prompt up to where the answer's turn begins, if that is known, and what was said in
        it."""
        continued = tools.continued
        if continued is None:
            return prompt_ids, ""
        ids = unended(continued.ids, self._tokenizer.eos_token_ids)
        if ids and list(prompt_ids[-len(ids) :]) == list(ids):
            return prompt_ids[: -len(ids)], self._tokenizer.text_of(ids)
        return (), continued.text

    def begins_thinking(self, tools: ChatTools, prompt_ids: Sequence[int]) -> bool:
        begun, said = self._begun(tools, prompt_ids)
        return self._choice.thinks_behind(self.prompt_end(begun), said)
