"""Parsers parse a model's answers with its tokenizer.

ToolConstraints turn the requirements of an answer's calls into a constraint of its text, as engines do not
know tools.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.grammar.grammars import Grammars, lark_of
from services.router.parsing.answer_formats import CALL_TEXTS, NONE, CallText
from services.router.parsing.answer_grammars import AnswerWriting, ToolConstraint
from services.router.parsing.arguments import text_of
from services.router.parsing.call_grammars import Lark, one_of
from services.router.parsing.parser_choice import ParserChoice
from services.router.request.answer_text import AnswerText
from services.router.request.client_request import ChatTools, read_tools
from services.router.text.answer_ends import unended
from services.router.text.detokenizer import TokenDecoder
from services.router.text.tokenizer import SHOWS_NO_TOOLS, MarkerDecoder, Tokenizer
from services.values.errors import InvalidRequest
from services.values.request import Constraint, ConstraintKind, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

_ANY: Mapping[str, Any] = {"type": "object"}
_BEHIND = ", behind thinking or calls,"


class ToolConstraints:
    """A router has one. `special` are the model's special tokens. `begins_thinking` says whether a chat's
    prompt with those tools ends within thinking."""

    def __init__(
        self,
        choice: ParserChoice,
        special: Mapping[int, str],
        grammars: Grammars,
        begins_thinking: Callable[[ChatTools, Sequence[int]], bool],
    ) -> None:
        self._choice = choice
        self._begins_thinking = begins_thinking
        self._special = {text: token_id for token_id, text in special.items()}
        self._grammars = grammars

    async def put(
        self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]
    ) -> SamplingParams:
        """Return sampling with a constraint that includes calls and thinking, where one is needed.

        Raises InvalidRequest, which names the tool whose schema cannot be followed, or the fields that
        exclude each other.
        """
        if not self._is_needed(tools, sampling):
            return sampling
        return await self._grammars.beside(self._put, tools, sampling, prompt_ids)

    def _is_needed(self, tools: ChatTools, sampling: SamplingParams) -> bool:
        if tools.must_call or (tools.callable is not None and tools.strict):
            return True
        is_split = tools.parsed and (tools.callable is not None or self._choice.reasoning != NONE)
        return sampling.constraint is not None and is_split

    def _put(self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
        writing = self._writing(tools)
        if writing is None:
            return sampling
        schemas = self._schemas(tools)
        required = ToolConstraint(
            Lark(self._special),
            schemas,
            tools.parallel,
            tools.parsed and self._begins_thinking(tools, prompt_ids),
        )
        # The client's constraint is on the answer's text, and an answer that must call has none.
        given = None if tools.must_call else sampling.constraint
        if given is not None:
            grammar = writing.then(required, _rule_of(given, required.lark))
        else:
            grammar = writing.must_call(required) if tools.must_call else writing.may_call(required)
        field, what = ("chat.tools", ", as a grammar,") if given is None else (given.field_name, _BEHIND)
        return replace(sampling, constraint=self._checked(grammar, field, what))

    def _writing(self, tools: ChatTools) -> AnswerWriting | None:
        writing = self._choice.writing
        knows_calls = writing is not None and writing.binds_calls and self._choice.tools != NONE
        is_bound = tools.must_call or (tools.callable is not None and tools.strict)
        if is_bound and not knows_calls:
            field, what = (
                ("chat.tool_choice", "") if tools.must_call else ("", "a strict tool in chat.tools ")
            )
            raise InvalidRequest(
                field,
                f"{what}cannot be kept to: there is no grammar of how this model writes calls "
                f"(--tool-parser={self._choice.tools})",
            )
        return writing

    def _schemas(self, tools: ChatTools) -> Mapping[str, Any]:
        """Return the callable tools' schemas. One that is neither required nor strict allows any object."""
        schemas = {}
        for index, (name, schema) in enumerate((tools.callable or {}).items()):
            is_kept = tools.must_call or name in tools.strict
            if tools.named in ("", name):
                schemas[name] = {"type": "object", **schema} if is_kept else _ANY
            if name in schemas and is_kept:
                self._check_schema(schemas[name], f"chat.tools[{index}].parameters")
        return schemas

    def _check_schema(self, schema: Any, field: str) -> None:
        try:
            self._grammars.check(Constraint(ConstraintKind.JSON_SCHEMA, (text_of(schema),)))
        except InvalidRequest as error:
            raise InvalidRequest(field, error.problem) from error

    def _checked(self, grammar: str, field: str, what: str) -> Constraint:
        try:
            constraint = Constraint(ConstraintKind.GRAMMAR, (grammar,))
            self._grammars.check(constraint)
        except InvalidRequest as error:
            raise InvalidRequest(field, f"{what} {error.problem}") from error
        return constraint


def _rule_of(constraint: Constraint, lark: Lark) -> str:
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return lark.json(_ANY)
        case ConstraintKind.JSON_SCHEMA:
            return lark.json(json.loads(constraint.text))
        case ConstraintKind.REGEX:
            return lark.rule(f"/{_slashes_escaped(constraint.text)}/", "TEXT")
        case ConstraintKind.CHOICE:
            return one_of(*map(text_of, dict.fromkeys(constraint.texts)))
        case ConstraintKind.GRAMMAR:
            return lark.rule(f"%lark {{\n{lark_of(constraint)}\n}}")


def _slashes_escaped(pattern: str) -> str:
    """Escape slashes, as Lark delimits a pattern with them; escaped ones stay."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")


# Only so many of the prompt's last ids are read: what a template writes after the last turn is shorter.
_PROMPT_END = 64


class Parsers:
    """A router has one. Without `keeps_strict` strict tools are like all others."""

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
        """Read a chat's tools. Raises InvalidRequest, which names the field, also if none can be parsed."""
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
        """Return the function that writes calls as the model does, for templates that cannot show them."""
        return CALL_TEXTS.get(self._choice.tools)

    def end_ids(self, tools: ChatTools) -> tuple[int, ...]:
        ends = self._tokenizer.eos_token_ids
        more = self._more_ends if tools.callable is not None else ()
        return (*ends, *(token_id for token_id in more if token_id not in ends))

    def prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """Return some hundred characters, which include the beginning of the answer's turn, or "" where no
        parser needs them."""
        is_needed = self._choice != ParserChoice()
        return self._tokenizer.text_of(prompt_ids[-_PROMPT_END:]) if is_needed else ""

    def tool_constraints(self, grammars: Grammars) -> ToolConstraints:
        special = self._tokenizer.special_tokens if self._choice != ParserChoice() else {}
        return ToolConstraints(self._choice, special, grammars, self.begins_thinking)

    def text_of(self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]) -> AnswerText:
        begun, turn_text = self._begun(tools, prompt_ids)
        text = self._text_of(tools, sampling, begun)
        if tools.continued is not None:
            text.resume(prompt_ids, turn_text)
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
        continued = tools.continued
        if continued is None:
            return prompt_ids, ""
        ids = unended(continued.ids, self._tokenizer.eos_token_ids)
        if ids and list(prompt_ids[-len(ids) :]) == list(ids):
            return prompt_ids[: -len(ids)], self._tokenizer.text_of(ids)
        return (), continued.text

    def begins_thinking(self, tools: ChatTools, prompt_ids: Sequence[int]) -> bool:
        begun, turn_text = self._begun(tools, prompt_ids)
        return self._choice.thinks_behind(self.prompt_end(begun), turn_text)
