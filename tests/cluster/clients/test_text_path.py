"""Text in, text out, over gRPC: what is said is what was generated, and never half a character."""

import asyncio

import pytest

from cluster.harness import FakeCluster
from exactness.checkpoints import tiny_checkpoint
from services.engine.fake import continuation
from services.router.text.tokenizer import Tokenizer
from services.wire.isthmus.v1 import common_pb2, generation_pb2

ChatMessage = generation_pb2.ChatMessage


def request_of(max_tokens=8, conversation="", sampling=None, **prompt):
    sampling = {"temperature": 0, "ignore_eos": True, **(sampling or {})}
    return generation_pb2.GenerateRequest(
        conversation_id=conversation,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, **sampling),
        **prompt,
    )


def chat_of(*messages):
    return generation_pb2.Chat(messages=messages)


async def responses_of(cluster, request):
    responses = [response async for response in cluster.stubs[0].Generate(request, timeout=60)]
    assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert all(not response.prompt_token_ids for response in responses[1:])
    return responses


def text_of(responses):
    return "".join(response.text for response in responses)


def ids_of(responses):
    return [token for response in responses for token in response.token_ids]


async def test_text_in_and_out_is_what_the_tokenizer_says(etcd_endpoint, model_dir, cluster_name):
    tokenizer = Tokenizer(str(model_dir))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name) as cluster:
        prompts = [f"A page for number {i}, écrit à côté" for i in range(6)]
        answers = await asyncio.gather(*(responses_of(cluster, request_of(24, text=p)) for p in prompts))
        for prompt, responses in zip(prompts, answers, strict=True):
            prompt_ids = tokenizer.encode(prompt)
            assert list(responses[0].prompt_token_ids) == prompt_ids
            assert ids_of(responses) == continuation(prompt_ids, 24)
            assert text_of(responses) == tokenizer.decode(ids_of(responses))
            assert responses[-1].finish.usage.prompt_tokens == len(prompt_ids)
            assert responses[-1].finish.usage.completion_tokens == 24
        await cluster.assert_nothing_held()


async def talk(cluster, conversation, remember):
    """Four turns; past ones are sent as `remember` makes them. Returns drift_tokens of the later three."""
    messages, drifts = [], []
    for turn in range(4):
        messages.append(ChatMessage(role="user", content=f"Well, number {turn}?"))
        request = request_of(12, conversation, chat=chat_of(*messages))
        responses = await responses_of(cluster, request)
        usage = responses[-1].finish.usage
        assert usage.HasField("drift_tokens") == bool(turn)
        if turn:
            drifts.append(usage.drift_tokens)
            assert usage.decode_prefix_len > 0
        messages.append(remember(text_of(responses), ids_of(responses)))
    return drifts


def bytes_cluster(etcd_endpoint, cluster_name):
    """The fake engine would generate ids that this tokenizer lacks."""
    directory = tiny_checkpoint(tokenizer="bytes")
    return FakeCluster(
        etcd_endpoint, directory, cluster_name, engine="torch", model=str(directory), num_threads=1
    ), Tokenizer(str(directory))


async def test_past_turns_do_not_drift_unless_they_were_changed(etcd_endpoint, cluster_name):
    cluster, _ = bytes_cluster(etcd_endpoint, cluster_name)
    async with cluster:

        def as_ids(text, ids):
            return ChatMessage(role="assistant", content="what the ids say is what counts", token_ids=ids)

        assert await talk(cluster, "ids", as_ids) == [0, 0, 0]

        def as_text(text, ids):
            assert "\ufffd" in text  # bytes that are no text, so that nothing brings the ids back
            return ChatMessage(role="assistant", content=text)

        def changed(text, ids):
            return ChatMessage(role="assistant", content=f"{text}!")

        assert await talk(cluster, "text", as_text) == [0, 0, 0]  # the router remembers its ids
        assert all(drift > 0 for drift in await talk(cluster, "changed", changed))
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_text_of_several_bytes_a_character(etcd_endpoint, cluster_name, subtests):
    with subtests.test("no response ever carries half a character"):
        # Random bytes, each a token and a response of its own: now and then they make a character.
        cluster, tokenizer = bytes_cluster(etcd_endpoint, cluster_name)
        async with cluster:
            hot = [{"temperature": 100, "seed": seed} for seed in range(6)]
            answers = await asyncio.gather(
                *(responses_of(cluster, request_of(160, sampling=s, text="Größe 日本 🙂")) for s in hot)
            )
            num_wide = 0
            for responses in answers:
                assert list(responses[0].prompt_token_ids) == tokenizer.encode("Größe 日本 🙂")
                ids, text = ids_of(responses), text_of(responses)
                assert len(ids) == 160
                # Released too early, the first byte of a character would be a U+FFFD that is not in there.
                assert text == tokenizer.decode(ids)
                num_wide += sum(ord(character) > 127 and character != "\ufffd" for character in text)
            assert num_wide >= 10  # or the test says nothing
            await cluster.assert_nothing_held()
    with subtests.test("a stop string of several bytes a character"):
        cluster, _ = bytes_cluster(etcd_endpoint, f"{cluster_name}-1")
        async with cluster:
            sampling = {"temperature": 100, "seed": 3}
            plain = text_of(await responses_of(cluster, request_of(160, sampling=sampling, text="abc")))
            at = next(i for i, c in enumerate(plain) if i > 20 and ord(c) > 127 and c != "\ufffd")
            stop = plain[at : at + 2]
            begin = plain.index(stop)
            for include in ([stop], ["nowhere to be found", stop, stop + "longer"]):
                responses = await responses_of(
                    cluster, request_of(160, sampling={**sampling, "stop": include}, text="abc")
                )
                assert text_of(responses) == plain[:begin]
                assert responses[-1].finish.matched_stop == stop
                assert responses[-1].finish.reason == common_pb2.FINISH_REASON_STOP
            await cluster.assert_nothing_held()
