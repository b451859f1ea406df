"""These tests show what a random model writes under the constraint that tools come to, in the tokens of eight
families."""

import json
import random
from dataclasses import replace
from functools import partial

import pytest

from router.templates.formats import FORMATS, Call, Said
from services.grammar.grammars import Grammars
from services.grammar.matcher import MaskMaker, MaskRequest
from services.router.parsing.parser_choice import ParserChoice, choose
from services.router.request.client_request import CallMode, ChatTools
from services.router.request.parsers import Parsers
from services.router.text.tokenizer import Tokenizer
from services.values.errors import InvalidRequest
from services.values.request import Constraint, ConstraintKind, SamplingParams
from services.wire.isthmus.v1.generation_pb2 import Chat, GenerateRequest, Tool

SIZE = 512
SCHEMAS = {
    "look_up": {
        "type": "object",
        "properties": {
            "kind": {"enum": ["a/b", "ß"]},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "deep": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "word": {"$ref": "#/$defs/word"},
        },
        "required": ["kind", "n"],
        "additionalProperties": False,
        "$defs": {"word": {"type": "string", "maxLength": 5}},
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}


class Family:
    def __init__(self, name, directory):
        self.format = FORMATS[name]
        self.tokenizer = Tokenizer(str(self.format.save(directory)))
        self.grammars = Grammars(directory, SIZE)
        choice = choose("auto", "auto", self.tokenizer.chat_template, None)
        self.parsers = Parsers(self.tokenizer, choice)
        self.tool_constraints = self.parsers.tool_constraints(self.grammars)

    async def constraint(self, tools, constraint=None, prompt=""):
        prompt_ids = self.tokenizer.encode(prompt, special_tokens=False) or [1]
        sampling = SamplingParams(constraint=constraint)
        return (await self.tool_constraints.put(tools, sampling, prompt_ids)).constraint

    async def write(self, tools, seed, constraint=None, prompt="", hurry=()):
        """What a random model answers, read; None where it does not come to an end. `hurry`: texts that it
        likes."""
        rng = random.Random(seed)
        ends = self.parsers.end_ids(tools)
        matcher = self.grammars.matcher(await self.constraint(tools, constraint, prompt), (), ends)
        prompt_ids = self.tokenizer.encode(prompt, special_tokens=False)
        text, maker = self.parsers.text_of(tools, SamplingParams(), prompt_ids), MaskMaker(SIZE)
        liked = {self.tokenizer.encode(each, special_tokens=False)[0] for each in hurry} | set(ends)
        for _ in range(500):
            (row,) = maker.make([MaskRequest(matcher)]).expanded()
            allowed = row.nonzero()[0].tolist()
            wanted = [token_id for token_id in allowed if token_id in liked]
            token_id = rng.choice(wanted if wanted and rng.random() < 0.4 else allowed)
            if token_id in ends:
                text.finish()
                return text
            matcher.advance([token_id])
            text.push([token_id])
        return None


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    return [Family(name, tmp_path_factory.mktemp(name)) for name in FORMATS]


HURRY = ("</think>", "{", "<|end|>", "<tool_call>", "[TOOL_CALLS]", "<minimax:tool_call>", '"', "\n", "<")


def check(call):
    assert call.name in SCHEMAS
    arguments = json.loads(call.arguments)
    if call.name == "stop":
        assert arguments == {}
        return
    assert {"kind", "n"} <= set(arguments) <= set(SCHEMAS["look_up"]["properties"])
    assert arguments["kind"] in ("a/b", "ß") and 0 <= arguments["n"] <= 99
    assert type(arguments["n"]) is int and isinstance(arguments.get("word", ""), str)
    assert all(isinstance(each, bool) for each in arguments.get("deep", []))


def opened(family):
    """A prompt that ends as this family's do."""
    return "<think>\n" if family.format.name == "minimax" else "Go:"


def schemas_of(family):
    """No free text where only a tag ends it: a random model hardly ever writes one."""
    look_up, stop = SCHEMAS["look_up"], SCHEMAS["stop"]
    if family.format.name not in ("qwen3_coder", "glm", "minimax"):
        return SCHEMAS
    properties = {name: value for name, value in look_up["properties"].items() if name != "word"}
    return {"look_up": {**look_up, "properties": properties}, "stop": stop}


async def answers(family, tools, constraint=None):
    written = [await family.write(tools, seed, constraint, opened(family), HURRY) for seed in range(8)]
    ended = [text for text in written if text is not None]
    assert len(ended) >= 4
    return ended


async def test_an_answer_that_must_call_does_and_once_where_no_more_are_allowed(families, subtests):
    for family in families:
        for named in ["", "look_up"]:
            with subtests.test(family=family.format.name, named=named):
                tools = ChatTools(schemas_of(family), CallMode.REQUIRED, named, parsed=True)
                for text in await answers(family, tools):
                    message = text.message()
                    assert message.calls and text.num_broken == 0
                    assert message.content == ""
                    for call in message.calls:
                        check(call)
                        assert named in ("", call.name)
        with subtests.test(family=family.format.name, parallel=False):
            tools = ChatTools(schemas_of(family), CallMode.REQUIRED, parallel=False, parsed=True)
            for seed in range(4):
                text = await family.write(tools, seed, None, opened(family), HURRY)
                assert text is None or len(text.message().calls) == 1


async def test_a_strict_tool_is_called_as_it_says_or_not_at_all(families, subtests):
    for family in families:
        with subtests.test(family=family.format.name):
            tools = ChatTools(schemas_of(family), strict=frozenset(SCHEMAS), parsed=True)
            for text in await answers(family, tools):
                assert text.num_broken == 0
                for call in text.message().calls:
                    check(call)


GOOD = {"kind": "ß", "n": 7, "deep": [True, False]}


def is_allowed(family, tools, constraint, said):
    *ids, end = family.tokenizer.encode(family.format.written(said), special_tokens=False)
    matcher = family.grammars.matcher(constraint, (), family.parsers.end_ids(tools))
    if matcher.num_fitting(ids) < len(ids):
        return False
    matcher.advance(ids)
    return matcher.may_choose(end)


async def test_calls_are_kept_to_as_the_family_writes_them(families, subtests):
    good, bad = Call("look_up", GOOD), Call("look_up", {**GOOD, "n": 700})
    for family in families:
        for mode in [CallMode.REQUIRED, CallMode.AUTO]:
            tools = ChatTools(schemas_of(family), mode, strict=frozenset(SCHEMAS), parsed=True)
            constraint = await family.constraint(tools, prompt=opened(family))
            allowed, format_ = partial(is_allowed, family, tools, constraint), family.format
            thought = "So be it." * format_.thinks
            with subtests.test(family=format_.name, mode=mode):
                assert allowed(Said("", thought, [good])) and allowed(Said("", thought, [Call("stop", {})]))
                is_parallel = format_.parallel or format_.name == "llama3"
                assert allowed(Said("", thought, [good, good])) == is_parallel
                assert not allowed(Said("", thought, [bad]))
                assert not allowed(Said("", thought, [Call("none", {})]))
                assert allowed(Said("I think not.", thought)) == (mode is CallMode.AUTO)
                if format_.name != "llama3":
                    assert allowed(Said("I look.", thought, [good])) == (mode is CallMode.AUTO)


OLDER_CALL = f'{{"name": "look_up", "arguments": {json.dumps(GOOD, ensure_ascii=False)}}}'


VERSIONS = [
    ("mistral", " [ARGS]", f"[TOOL_CALLS][{OLDER_CALL}]", 1),
    ("mistral", " [ARGS]", f'[TOOL_CALLS] [{OLDER_CALL}, {OLDER_CALL[:-1]}, "id": "aB3456789"}}]', 2),
    (
        "glm",
        "",
        "<think>So.</think>" + "<tool_call>look_up<arg_key>kind</arg_key><arg_value>ß</arg_value>"
        "<arg_key>n</arg_key><arg_value>7</arg_value></tool_call>" * 2,
        2,
    ),
]


async def test_versions_of_a_family_write_calls_as_they_learned(tmp_path, monkeypatch, subtests):
    """Mistral's before v11 have no token [ARGS]; GLM's from 4.7 on write no line ends."""
    for name, without, text, num_calls in VERSIONS:
        with subtests.test(name=name, without=without, text=text, num_calls=num_calls):
            format_ = FORMATS[name]
            monkeypatch.setitem(
                FORMATS, name, replace(format_, special=format_.special.replace(without, "", 1))
            )
            family = Family(name, tmp_path / name)
            tools = ChatTools(SCHEMAS, CallMode.REQUIRED, parsed=True)
            for asked in (tools, ChatTools(SCHEMAS, strict=frozenset(SCHEMAS), parsed=True)):
                ids = family.tokenizer.encode(text, special_tokens=False)
                matcher = family.grammars.matcher(
                    await family.constraint(asked), (), family.parsers.end_ids(asked)
                )
                assert matcher.num_fitting(ids) == len(ids)
            read = family.parsers.text_of(tools, SamplingParams(), [1])
            read.push(ids)
            read.finish()
            assert [call.name for call in read.message().calls] == ["look_up"] * num_calls


async def test_harmony_names_its_tool_before_the_channel_or_behind_it(tmp_path, subtests):
    gpt_oss = Family("gpt_oss", tmp_path)
    tools = ChatTools(SCHEMAS, CallMode.REQUIRED, parsed=True)
    arguments = json.dumps(GOOD, ensure_ascii=False)
    for kind in [" json", " <|constrain|>json"]:
        for header in ["{to}<|channel|>commentary", "<|channel|>commentary{to}"]:
            with subtests.test(kind=kind, header=header):
                text = f"{header.format(to=' to=functions.look_up')}{kind}<|message|>{arguments}<|call|>"
                ids = gpt_oss.tokenizer.encode(text, special_tokens=False)
                matcher = gpt_oss.grammars.matcher(
                    await gpt_oss.constraint(tools), (), gpt_oss.parsers.end_ids(tools)
                )
                assert matcher.num_fitting(ids[:-1]) == len(ids) - 1
                read = gpt_oss.parsers.text_of(tools, SamplingParams(), [1])
                read.push(ids)
                read.finish()
                assert [call.name for call in read.message().calls] == ["look_up"]


async def test_a_format_of_answers_comes_behind_thinking_and_calls_stay_possible(families, subtests):
    for family in families:
        with subtests.test(family=family.format.name):
            constraint = Constraint(ConstraintKind.JSON_SCHEMA, ('{"type": "boolean"}',))
            texts = await answers(family, ChatTools(schemas_of(family), parsed=True), constraint)
            for text in texts:
                message = text.message()
                assert bool(message.calls) != (message.content in ("true", "false"))


BEHIND_THINKING = [
    (Constraint(ConstraintKind.CHOICE, ("a/b", "ß\n")), {"a/b", "ß\n"}),
    (Constraint(ConstraintKind.REGEX, (r"a/b|a\/c",)), {"a/b", "a/c"}),
    (Constraint(ConstraintKind.JSON_OBJECT), None),
    (Constraint(ConstraintKind.GRAMMAR, ('start: X\nX: "a" | "b"',)), {"a", "b"}),
    (Constraint(ConstraintKind.GRAMMAR, ('root ::= "a" | "b"',)), {"a", "b"}),
]


async def test_every_kind_of_constraint_comes_behind_thinking(families, subtests):
    for family in families:
        if family.format.name not in ("qwen3", "gpt_oss", "minimax"):
            continue
        for constraint, contents in BEHIND_THINKING:
            with subtests.test(family=family.format.name, constraint=constraint, contents=contents):
                for seed in range(3):
                    text = await family.write(ChatTools(parsed=True), seed, constraint, opened(family), HURRY)
                    if text is not None and contents is not None:
                        assert text.message().content in {content.strip() for content in contents} | contents
                    elif text is not None:
                        assert isinstance(json.loads(text.message().content), dict)


async def test_what_asks_for_nothing_has_no_constraint(families, subtests):
    for family in families:
        with subtests.test(family=family.format.name):
            for tools in (ChatTools(), ChatTools(SCHEMAS, parsed=True), ChatTools(parsed=True)):
                assert await family.constraint(tools) is None
            asked = Constraint(ConstraintKind.CHOICE, ("a",))
            assert await family.constraint(ChatTools(SCHEMAS), asked) == asked  # raw


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return Family("qwen3", tmp_path_factory.mktemp("qwen"))


async def test_what_cannot_be_kept_to_is_named(qwen):
    schemas = SCHEMAS | {"f": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}
    for tools in (ChatTools(schemas, CallMode.REQUIRED), ChatTools(schemas, strict=frozenset({"f"}))):
        with pytest.raises(InvalidRequest, match=r"^chat\.tools\[2\]\.parameters is not supported: .*unique"):
            await qwen.constraint(tools)
    assert await qwen.constraint(ChatTools(schemas, CallMode.REQUIRED, "stop")) is not None
    assert await qwen.constraint(ChatTools(schemas, strict=frozenset({"stop"}))) is not None
    many = {f"f{i}": {"properties": {"a": {"enum": ["x" * 1000 + str(i)]}}} for i in range(70)}
    with pytest.raises(InvalidRequest, match=r"^chat\.tools, as a grammar, must be at most 65536 bytes"):
        await qwen.constraint(ChatTools(many, CallMode.REQUIRED))


async def test_strict_tools_that_nobody_may_call_or_no_router_keeps_to_are_as_any_others(qwen):
    tool_constraints = Parsers(qwen.tokenizer, ParserChoice()).tool_constraints(qwen.grammars)
    tools = ChatTools(SCHEMAS, CallMode.NONE, strict=frozenset({"stop"}), parsed=True)
    asked = SamplingParams(constraint=Constraint(ConstraintKind.JSON_OBJECT))
    assert await tool_constraints.put(tools, asked, [1]) == asked
    assert (await qwen.constraint(tools, asked.constraint)).kind is ConstraintKind.GRAMMAR

    request = GenerateRequest(chat=Chat(tools=[Tool(name="f", strict=True)]))
    kept, ignored = (
        Parsers(qwen.tokenizer, qwen.parsers._choice, keeps).read_tools(request) for keeps in (True, False)
    )
    assert kept.strict == {"f"} and not ignored.strict
    assert await qwen.constraint(kept) is not None and await qwen.constraint(ignored) is None


async def test_a_format_binds_no_answer_that_is_calls(qwen, subtests):
    """Frameworks send the type of the last answer with each of a loop's."""
    for named in ["", "stop"]:
        with subtests.test(named=named):
            tools = ChatTools(SCHEMAS, CallMode.REQUIRED, named)
            assert await qwen.constraint(
                tools, Constraint(ConstraintKind.JSON_OBJECT)
            ) == await qwen.constraint(tools)


async def test_what_is_not_known_to_write_calls_cannot_be_kept_to_them(qwen, subtests):
    for tools in [{"mode": CallMode.REQUIRED}, {"strict": frozenset({"stop"})}]:
        with subtests.test(tools=tools):
            tool_constraints = Parsers(qwen.tokenizer, ParserChoice()).tool_constraints(qwen.grammars)
            with pytest.raises(InvalidRequest, match="cannot be kept to"):
                await tool_constraints.put(ChatTools(SCHEMAS, **tools), SamplingParams(), [1])
