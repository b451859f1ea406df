"""Ids are characters of a text, but for special tokens."""

import re

from hypothesis import given
from hypothesis import strategies as st

from services.router.parsing.parser_choice import choose
from services.router.request.answer_text import AnswerText
from services.router.text.tokenizer import MarkerDecoder

SPECIAL = {0: "<think>", 1: "</think>", 2: "<tool_call>", 3: "</tool_call>", 4: "<pad>"}
CALL = '<tool_call>{"name": "f", "arguments": {"a": "."}}</tool_call>'
CHOICE = choose("hermes", "think", "", None)


class Characters:
    special_tokens = SPECIAL
    pieces = all_pieces = None  # what they stand for is no bytes

    def is_silent(self, token_id):
        return token_id in SPECIAL

    def audible(self, token_ids):
        return [token_id for token_id in token_ids if not self.is_silent(token_id)]

    def text_of(self, token_ids):
        return "".join(SPECIAL.get(token_id) or chr(token_id) for token_id in token_ids)

    def decode(self, token_ids):
        return self.text_of(self.audible(token_ids))


def ids_of(text):
    by_text = {text: token_id for token_id, text in SPECIAL.items()}
    parts = re.findall("|".join(map(re.escape, by_text)) + "|.", text, flags=re.DOTALL)
    return [by_text.get(part) if part in by_text else ord(part) for part in parts]


def answer_text(stop=(), parallel_calls=True, choice=CHOICE):
    parser = choice.parser({"f": {}}, "")
    return AnswerText(MarkerDecoder(Characters(), choice.shows), tuple(stop), parser, parallel_calls)


def told(answer, ids, step=1):
    """(content, reasoning, calls, tokens of it, what ended it)"""
    said = []
    for begin in range(0, len(ids), step):
        said.append(answer.push(ids[begin : begin + step]))
        if said[-1].ended:
            break
    else:
        said.append(answer.finish())
    calls = [(call.index, call.name, call.arguments) for part in said for call in part.calls]
    num_tokens = sum(part.num_tokens for part in said)
    content, reasoning = ("".join(getattr(part, name) for part in said) for name in ("content", "reasoning"))
    message = answer.message()
    assert (message.content, message.reasoning) == (content, reasoning)
    assert [(call.name, call.arguments) for call in message.calls] == [call[1:] for call in calls]
    return content, reasoning, calls, num_tokens, said[-1].matched if said[-1].ended else None


def test_markers_that_are_special_tokens_are_read_and_others_are_no_text(subtests):
    for step in [1, 3, 1000]:
        with subtests.test(step=step):
            ids = ids_of(f"<think>hm<pad></think>\n\nI <pad>look.{CALL}{CALL}")
            answer = answer_text()
            call = ("f", '{"a": "."}')
            assert told(answer, ids, step) == ("I look.", "hm", [(0, *call), (1, *call)], len(ids), None)
            ids = [call.id for call in answer.message().calls]
            assert len(set(ids)) == 2 and all(re.fullmatch("call_[A-Za-z0-9]{24}", each) for each in ids)


def test_stop_strings_are_looked_for_in_content_alone_and_one_call_may_be_all(subtests):
    for step in [1, 3, 1000]:
        with subtests.test(step=step):
            ids = ids_of(f"<think>a. b.</think>{CALL}So. Then")
            until = ids_of(f"<think>a. b.</think>{CALL}So.")
            content, reasoning, calls, num_tokens, ended = told(answer_text(["."]), ids, step)
            assert (content, reasoning, len(calls), num_tokens, ended) == ("So", "a. b.", 1, len(until), ".")

            ids = ids_of(f"I n{CALL}{CALL}more")
            content, _, calls, num_tokens, ended = told(answer_text(["no"], parallel_calls=False), ids, step)
            assert (content, len(calls), ended) == ("I n", 1, "")
            assert num_tokens == len(ids_of(f"I n{CALL}")) - 1  # it is whole before its end is written


def test_tokens_of_thinking_are_counted_with_its_markers_and_so_are_broken_calls():
    answer = answer_text()
    told(answer, ids_of("<think>hm</think>\n\nYes"))
    assert answer.reasoning_tokens == 4
    spelled = answer_text(choice=choose("none", "mistral", "", None))
    told(spelled, ids_of("[THINK]hm[/THINK]Yes"))
    assert spelled.reasoning_tokens == 1 + 2 + 8
    again = answer_text()
    told(again, ids_of(f"<think>hm</think>{CALL}<think>hm</think>Yes"))
    assert again.reasoning_tokens == 8
    answer = answer_text()
    assert told(answer, ids_of("<tool_call>{]"))[0] == "<tool_call>{]"
    assert answer.num_broken == 1


@given(
    st.lists(st.sampled_from([*SPECIAL, *map(ord, 'ab<.{}"')]), max_size=30), st.sampled_from(["", "a.", "<"])
)
def test_without_a_parser_all_is_content(ids, stop):
    answer = AnswerText(Characters(), (stop,) if stop else ())
    content = "".join(part.content for part in [*(answer.push([each]) for each in ids), answer.finish()])
    assert content == (Characters().decode(ids).split(stop)[0] if stop else Characters().decode(ids))


def test_tokens_that_come_together_are_decoded_together():
    class Counting(Characters):
        decodes = 0

        def text_of(self, token_ids):
            self.decodes += 1
            return super().text_of(token_ids)

    decoder = Counting()
    said = AnswerText(decoder, ()).push(ids_of("some text"))
    assert (said.content, said.num_tokens, decoder.decodes) == ("some text", len("some text"), 1)


@given(st.lists(st.sampled_from([*SPECIAL, *map(ord, "ab.")]), max_size=30))
def test_a_stop_string_is_content_where_it_is_included(ids):
    plain, shown = (AnswerText(Characters(), ("a.",), includes_stop=includes) for includes in (False, True))
    (before, *_, matched), (content, *_, again) = (told(answer, ids) for answer in (plain, shown))
    assert again == matched and content == before + (matched or "")


@given(st.text('<>/think tool_call{}"', max_size=40), st.integers(1, 5))
def test_the_answer_is_the_same_however_its_tokens_come(text, step):
    ids = ids_of(text)
    one, other = (told(answer_text(["l", "{}"]), ids, each) for each in (1, step))
    assert one == other


def test_a_message_does_not_change_with_what_it_was_told_in():
    """Whoever joins the last two parts writes into the first of them."""
    answer = answer_text()
    first, rest = answer.push(ids_of("<think>a</think>I <")), answer.finish()
    first.content += rest.content
    assert answer.message().content == "I <"


LONG = '{"a": "' + "x" * 300 + '"}'


KIMI = "<|tool_call_begin|>{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {"open": "<call>", "close": "</call>", "repeats": True, "content": "json"},
        "content": {"optional": False},
    },
}


def test_the_models_own_id_of_a_call_stays_where_it_tells_the_call(subtests):
    """Its template writes it in the call, so that results must have it, too."""
    for step in [1, 1000]:
        for format_, text, ids in [
            ("mistral", '[TOOL_CALLS]f[CALL_ID]c0x0abcde[ARGS]{"a": 1}', ["c0x0abcde"]),
            ("mistral", f"[TOOL_CALLS]f[CALL_ID]c0x0abcde[ARGS]{LONG}", ["c0x0abcde"]),
            ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "D681PevKs"}]', ["D681PevKs"]),
            (
                "mistral",
                '[TOOL_CALLS]f[CALL_ID]twice[ARGS]{}[TOOL_CALLS]f[CALL_ID]twice[ARGS]{"a": 1}',
                ["twice", None],
            ),
            ("mistral", "[TOOL_CALLS]f[CALL_ID]of_before[ARGS]{}", [None]),
            ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "no id"}]', [None]),
            ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": 7}]', [None]),
            (
                "kimi_k2",
                KIMI.format("functions.f:3", "{}") + KIMI.format(" f:4 ", LONG),
                ["functions.f:3", "f:4"],
            ),
            (
                "template",
                '<call>{"name": "f", "arguments": {}, "id": "functions.f:3"}</call>',
                ["functions.f:3"],
            ),
            ("template", '<call>{"id": "x1", "function": {"name": "f", "arguments": {}}}</call>', ["x1"]),
            ("template", '<call>{"name": "f", "arguments": {}, "id": 7}</call>', [None]),
        ]:
            with subtests.test(step=step, format_=format_, text=text, ids=ids):
                own = OWN if format_ == "template" else None
                parser = choose(format_, format_ if own else "none", "", own).parser({"f": {}}, "")
                answer = AnswerText(Characters(), (), parser, past_ids=frozenset({"of_before"}))
                for begin in range(0, len(text), step):
                    answer.push(ids_of(text[begin : begin + step]))
                answer.finish()
                for call, expected in zip(answer.message().calls, ids, strict=True):
                    assert call.id == expected if expected else re.fullmatch("call_[A-Za-z0-9]{24}", call.id)
