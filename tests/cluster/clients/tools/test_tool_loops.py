"""In a tool loop the decode rank holds the whole turn before, whatever the client sends back of it."""

from dataclasses import replace

import pytest

from cluster.harness import BLOCK, FakeCluster
from cluster.metrics_page import samples, value
from cluster.tool_loops import Script, generate, play
from router.templates.agents import CLIENTS, LOOK_UP, answers
from router.templates.formats import FORMATS, Said
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1 import generation_pb2
from services.wire.isthmus.v1.generation_pb2 import ChatMessage

QUICK = ("qwen3", pytest.param("glm", marks=pytest.mark.long))


async def loops_keep_their_prefix(name, etcd, directory, cluster_name, script, num_calls):
    FORMATS[name].save(directory)
    async with FakeCluster(etcd, directory, cluster_name, decode=(1,), kv_pages=8192) as cluster:
        for number, client in enumerate(CLIENTS.values()):
            steps = await play(cluster, script, FORMATS[name], client, num_calls, f"tenant-{number}")
            assert len(steps) == num_calls
            for step in steps:
                assert step.held - BLOCK < step.decode_prefix_len <= step.held, step
        await cluster.assert_nothing_held()


async def prompt_text(cluster, messages):
    chat = generation_pb2.Chat(messages=messages, tools=[LOOK_UP])
    request = generation_pb2.TokenizeRequest(request=generation_pb2.GenerateRequest(chat=chat))
    answer = await cluster.stubs[0].Tokenize(request)
    return Tokenizer(cluster.router_config.model).text_of(answer.token_ids), list(answer.token_ids)


@pytest.fixture
def script(monkeypatch):
    script = Script()
    script.install(monkeypatch.setattr)
    return script


@pytest.mark.parametrize("name", QUICK)
async def test_a_loop_of_three_calls(name, etcd_endpoint, tmp_path, cluster_name, script):
    await loops_keep_their_prefix(name, etcd_endpoint, tmp_path, cluster_name, script, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
async def test_loops_over_every_format(name, etcd_endpoint, tmp_path, cluster_name, script):
    await loops_keep_their_prefix(name, etcd_endpoint, tmp_path, cluster_name, script, 5)


@pytest.fixture
async def qwen(etcd_endpoint, tmp_path, cluster_name):
    FORMATS["qwen3"].save(tmp_path)
    async with FakeCluster(etcd_endpoint, tmp_path, cluster_name, decode=(1,), kv_pages=8192) as cluster:
        yield cluster


ASKED = [ChatMessage(role="user", content="What is it?")]
NEXT = ChatMessage(role="user", content="And now?")
SHOWN = {"include_stop_str_in_output": True}


async def test_an_answer_comes_back_with_the_next_turn(qwen, script, subtests):
    with subtests.test("what ends an answer is no part of it unless it is wanted"):
        # Its ids are not those of its text, which shows that they are the ones: each character is a token.
        for sampling, said, kept in [
            ({}, "It is 42, enough.", "It is 42, enough.<|im_end|>\n"),
            ({"stop": ["42"]}, "It is 42, enough.", "It is <|im_end|>\n"),
            ({"stop": ["s 4"]}, "It is 42, enough.", "It i<|im_end|>\n"),
            ({"stop_token_ids": ["<tool_response>"]}, "It is<tool_response>", "It is<|im_end|>\n"),
            ({"stop": ["42"], **SHOWN}, "It is 42, enough.", "It is 42<|im_end|>\n"),
            ({"stop_token_ids": [","], **SHOWN}, "It is 42,", "It is 42,<|im_end|>\n"),
        ]:
            with subtests.test(sampling=sampling, said=said, kept=kept):
                tokenizer = Tokenizer(qwen.router_config.model)
                ids = [token for character in said.split("<")[0] for token in tokenizer.encode(character)]
                ids += [token for part in said.split("<")[1:] for token in tokenizer.encode(f"<{part}")]
                script.says([*ids, *tokenizer.encode("<|im_end|>")])
                if "stop_token_ids" in sampling:
                    sampling = {**sampling, "stop_token_ids": tokenizer.encode(sampling["stop_token_ids"][0])}
                answer, finish = await generate(qwen, ASKED, **sampling)
                assert finish.answer_id == answer.answer_id
                assert answer.content == kept.removesuffix("<|im_end|>\n")
                text, prompt = await prompt_text(qwen, [*ASKED, answer, NEXT])
                before, own, _ = text.partition("What is it?<|im_end|>\n<|im_start|>assistant\n")
                assert text.startswith(before + own + kept)
                shown = kept.removesuffix("<|im_end|>\n")
                begin = len(tokenizer.encode(before + own))
                assert prompt[begin : begin + len(shown)] == ids[: len(shown)]
    with subtests.test("an answer is found by its own id alone"):
        # Without the turns before it, as a client that shortens its history sends it.
        tokenizer = Tokenizer(qwen.router_config.model)
        script.says(tokenizer.encode(FORMATS["qwen3"].written(next(answers(FORMATS["qwen3"], 1)))))
        answer, finish = await generate(qwen, ASKED, tenant="a")
        assert finish.answer_id == answer.answer_id != ""
        answer.reasoning = ""
        for call in answer.tool_calls:
            call.id = ""
        shortened = [ChatMessage(role="user", content="Go on"), answer]
        for tenant, thought in (("a", True), ("b", False)):
            chat = generation_pb2.Chat(messages=shortened, tools=[LOOK_UP])
            request = generation_pb2.GenerateRequest(chat=chat, tenant=tenant)
            tokens = await qwen.stubs[0].Tokenize(generation_pb2.TokenizeRequest(request=request))
            assert ("First the 0th" in tokenizer.text_of(tokens.token_ids)) == thought


async def test_thinking_is_kept_where_that_is_wanted(etcd_endpoint, tmp_path, cluster_name, script):
    FORMATS["qwen3"].save(tmp_path)
    cluster = FakeCluster(etcd_endpoint, tmp_path, cluster_name, decode=(1,), kv_pages=8192)
    cluster.router_config = replace(cluster.router_config, keep_thinking="always")
    async with cluster:
        tokenizer = Tokenizer(str(tmp_path))
        script.says(tokenizer.encode(FORMATS["qwen3"].written(Said("It is.", "Who knows?"))))
        answer, _ = await generate(cluster, ASKED)
        answer.reasoning = ""
        text, _ = await prompt_text(cluster, [*ASKED, answer, NEXT])
        assert "Who knows?" in text
        script.says(tokenizer.encode(FORMATS["qwen3"].written(Said("It was."))))
        await generate(cluster, [*ASKED, answer, NEXT])
        found = await samples(cluster.routers[0], cluster)
        assert value(found, "isthmus_past_answers_total", outcome="found") == 1
        assert value(found, "isthmus_remembered_answer_bytes") > 0
