"""Each prompt of a tool loop begins with all that the one before it was and said, whatever clients do to
it."""

from dataclasses import replace

import pytest

from router.templates.agents import CLIENTS, Client, answers
from router.templates.formats import FORMATS, LOOP_FORMATS, Format, Said
from router.text.chats.loops import Loop, common, with_content
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1.generation_pb2 import ChatMessage

ADDRESSES = (
    "<|channel|>commentary to=functions.look_up <|constrain|>json",
    " to=functions.look_up<|channel|>commentary json",
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        name: Tokenizer(str(format_.save(tmp_path_factory.mktemp(name))))
        for name, format_ in LOOP_FORMATS.items()
    }


def begun(
    name: str, tokenizers: dict[str, Tokenizer], client: Client, **settings: object
) -> tuple[Format, Loop]:
    loop = Loop(LOOP_FORMATS[name], tokenizers[name], client, **settings)
    loop.ask("What is it?")
    return LOOP_FORMATS[name], loop


def test_a_loop_keeps_its_prefix(tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests) -> None:
    for client in CLIENTS:
        for name in LOOP_FORMATS:
            with subtests.test(f"{name}, {client}"):
                format_, loop = begun(name, tokenizers, CLIENTS[client])
                for number, said in enumerate(answers(format_, 4)):
                    held, prompt = loop.held, loop.prompt()
                    assert common(held, prompt) == len(held), number
                    assert loop.outcomes == ({"found": number} if number else {})
                    loop.answer(prompt, said)


def test_content_beside_calls_changes_nothing(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    for name in sorted(LOOP_FORMATS.keys() - {"llama3"}):
        with subtests.test(name):
            format_, loop = begun(name, tokenizers, Client())
            for said in map(with_content, answers(format_, 3)):
                prompt, held = loop.prompt(), loop.held
                assert common(held, prompt) == len(held)
                loop.answer(prompt, said)


def test_the_prompt_reads_as_the_template_writes_it(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    """The text is the same with everything given back and nothing remembered."""
    for name in LOOP_FORMATS:
        with subtests.test(name):
            format_, loop = begun(name, tokenizers, Client(gives_reasoning=True))
            for said in answers(format_, 3):
                prompt = loop.prompt()
                texts = [tokenizers[name].text_of(ids) for ids in (prompt, forgetful(loop).prompt())]
                for address in ADDRESSES if name == "gpt_oss" else ():  # which the template writes elsewhere
                    texts = [text.replace(address, "") for text in texts]
                assert texts[0] == texts[1]
                loop.answer(prompt, said)


def test_what_was_cut_off_behind_a_call_is_written_by_the_template(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    """An answer is cut off where one call is all that may come, or max_tokens were all."""
    for name, cut_before in [
        ("qwen3", "\n</tool_call>"),
        ("qwen3", "</tool_call>"),
        ("qwen3", "<|im_end|>"),
        ("qwen3_coder", "</function>"),
        ("deepseek", "<｜tool▁calls▁end｜>"),
        ("glm", "\n</tool_call>"),
        ("minimax", "\n</minimax:tool_call>"),
        ("minimax", "</invoke>"),
        ("gpt_oss", "<|call|>"),
    ]:
        with subtests.test(name=name, cut_before=cut_before):
            format_, loop = begun(name, tokenizers, Client(gives_reasoning=True))
            said = next(answers(format_, 1))
            written = format_.written(said)
            loop.answer(loop.prompt(), said, written[: written.rindex(cut_before)])
            prompt, held = loop.prompt(), loop.held
            assert common(held, prompt) == len(held)
            text = tokenizers[name].text_of(prompt)
            assert text.count(cut_before.strip()) == tokenizers[name].text_of(forgetful(loop).prompt()).count(
                cut_before.strip()
            )
            assert written in text


def forgetful(loop: Loop) -> Loop:
    return Loop(loop.format_, loop.tokenizer, loop.client, messages=loop.messages)


def test_a_new_question_drops_what_the_template_drops(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    for name in LOOP_FORMATS:
        for keep_thinking in [False, True]:
            with subtests.test(name=name, keep_thinking=keep_thinking):
                format_, loop = begun(name, tokenizers, Client(), keep_thinking=keep_thinking)
                for said in answers(format_, 2):
                    loop.answer(loop.prompt(), said)
                loop.ask("And now?")
                prompt, held = loop.prompt(), loop.held
                is_whole = common(held, prompt) == len(held)
                if name.startswith("mistral"):  # which has its tools before the last question
                    assert not is_whole
                else:
                    assert is_whole == (keep_thinking or not format_.thinks)
                assert ("First the 0th" in tokenizers[name].text_of(prompt)) == (
                    keep_thinking and format_.thinks
                )
                # Text that is written anew reads as the template has it.
                if not keep_thinking and format_.thinks:
                    assert prompt == forgetful(loop).prompt()
                    assert loop.outcomes == {"changed": 3}


def test_a_loop_without_thinking_keeps_its_prefix(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    """A prompt may have written thinking that is none, which the template shows in the last turn alone."""
    for name in LOOP_FORMATS:
        with subtests.test(name):
            off = '{"enable_thinking": false, "thinking": false}'
            format_, loop = begun(name, tokenizers, Client(), variables=off)
            for number, said in enumerate(answers(format_, 4)):
                held, prompt = loop.held, loop.prompt()
                assert common(held, prompt) == len(held), number
                assert loop.outcomes == ({"found": number} if number else {})
                loop.answer(prompt, replace(said, reasoning=""))


def test_thinking_that_is_none_is_kept_with_the_rest(
    tokenizers: dict[str, Tokenizer], subtests: pytest.Subtests
) -> None:
    for name in FORMATS:
        for keep_thinking in [False, True]:
            with subtests.test(name=name, keep_thinking=keep_thinking):
                off = '{"enable_thinking": false, "thinking": false}'
                _, loop = begun(name, tokenizers, Client(), variables=off, keep_thinking=keep_thinking)
                for number in range(3):
                    held, prompt = loop.held, loop.prompt()
                    writes_none = (
                        name in ("qwen3", "minimax") and number
                    )  # behind the prompt alone, not in what is past
                    is_whole = common(held, prompt) == len(held)
                    assert (
                        is_whole == (not name.startswith("mistral") and (keep_thinking or not writes_none))
                        or not number
                    )
                    loop.answer(prompt, Said(f"It is {number}."))
                    loop.ask("And now?")


def test_the_system_stays_in_a_loop_whose_template_would_leave_it_out(
    tokenizers: dict[str, Tokenizer],
) -> None:
    format_, loop = begun("mistral_nemo", tokenizers, Client())
    loop.messages.insert(0, ChatMessage(role="system", content="Be brief."))
    for number, said in enumerate(answers(format_, 3)):
        held, prompt = loop.held, loop.prompt()
        assert common(held, prompt) == len(held), number
        assert tokenizers["mistral_nemo"].text_of(prompt).count("[INST]Be brief.\n\nWhat is it?[/INST]") == 1
        loop.answer(prompt, said)
