"""ToolConstraints make what is required of an answer's calls a constraint of its text: engines know no
tools."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.grammar.grammars import Grammars
from services.grammar.lowering import lark_of
from services.router.parsing.answer_formats import NONE
from services.router.parsing.grammars.lark import Lark, one_of
from services.router.parsing.grammars.tool_constraint import AnswerWriting, ToolConstraint
from services.router.parsing.json_text import text_of
from services.router.parsing.parser_choice import ParserChoice
from services.router.request.tools import ChatTools
from services.values.constraint import Constraint, ConstraintKind
from services.values.errors import InvalidRequest
from services.values.request import SamplingParams

_ANY: Mapping[str, Any] = {"type": "object"}
_BEHIND = ", behind thinking or calls,"


class ToolConstraints:
    """A router has one. `special` are the model's special tokens. `begins_thinking` says whether a prompt of
    a chat with those tools ends within thinking."""

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
        """Return sampling with a constraint that calls and thinking are a part of, where there is anything to
        keep to.

        Raises InvalidRequest: it names the tool whose schema cannot be kept to, or what does not go together.
        """
        if not self._is_asked(tools, sampling):
            return sampling
        return await self._grammars.beside(self._put, tools, sampling, prompt_ids)

    def _is_asked(self, tools: ChatTools, sampling: SamplingParams) -> bool:
        if tools.must_call or (tools.callable is not None and tools.strict):
            return True
        told = tools.parsed and (tools.callable is not None or self._choice.reasoning != NONE)
        return sampling.constraint is not None and told

    def _put(self, tools: ChatTools, sampling: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
        writing = self._writing(tools)
        if writing is None:
            return sampling
        schemas = self._schemas(tools)
        asked = ToolConstraint(
            Lark(self._special),
            schemas,
            tools.parallel,
            tools.parsed and self._begins_thinking(tools, prompt_ids),
        )
        # What is given constrains the answer's text, and an answer that must call has none.
        given = None if tools.must_call else sampling.constraint
        if given is not None:
            grammar = writing.then(asked, _rule_of(given, asked.lark))
        else:
            grammar = writing.must_call(asked) if tools.must_call else writing.may_call(asked)
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
        """Return the schemas of the tools that may be called. What is neither required nor strict may be any
        object."""
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
    """Escape slashes, which Lark has around a pattern; what is escaped already stays."""
    escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)
    return escaped.replace("\n", "\\n")
