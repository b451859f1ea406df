"""What `isthmus generate` asks for, and what --usage says at the end."""

from services.cli.generate import GenerateConfig, _print_usage, _request
from services.wire.isthmus.v1 import common_pb2, generation_pb2


def usage_of(prompt_tokens, reused_tokens, completion_tokens, moved=0, **carried):
    return generation_pb2.Usage(
        prompt_tokens=prompt_tokens,
        reused_tokens=reused_tokens,
        computed_tokens=prompt_tokens - reused_tokens,
        completion_tokens=completion_tokens,
        kv_bytes_moved=moved,
        carried_bytes=carried,
    )


def placement_of(worker, plan, usage):
    return generation_pb2.Placement(decode=common_pb2.RankId(worker=worker, rank=1), plan=plan, usage=usage)


FIRST = placement_of("d0", common_pb2.PLAN_LOCAL, usage_of(29, 16, 6))
SECOND = placement_of("d1", common_pb2.PLAN_REMOTE, usage_of(35, 0, 34, moved=2048))


def test_a_request_that_stayed_takes_a_line(capsys):
    _print_usage(
        generation_pb2.Finish(
            reason=common_pb2.FINISH_REASON_CAPACITY,
            usage=usage_of(29, 16, 6),
            placement=FIRST,
            placements=[FIRST],
        )
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("29 prompt tokens on d0/1, plan local: 16 reused, 13 computed, ")
    assert line.endswith("6 generated; first token after 0.0 ms; ended by capacity")


def test_of_one_that_moved_each_placement_is_told(capsys):
    totals = generation_pb2.Totals(computed_tokens=48, kv_bytes_moved=2048)
    usage = usage_of(29, 16, 40)
    finish = generation_pb2.Finish(usage=usage, placement=FIRST, placements=[FIRST, SECOND], totals=totals)
    _print_usage(finish)
    billed, first, second, in_all = capsys.readouterr().err.splitlines()
    assert billed.startswith("29 prompt tokens on d0/1") and "40 generated; first token" in billed
    assert first.startswith("placement 1: 29 prompt tokens on d0/1, plan local: ")
    assert second.startswith("placement 2: 35 prompt tokens on d1/1, plan remote: 0 reused, 35 computed, ")
    assert second.endswith("34 generated") and "KV moved 2.0 KiB" in second
    assert in_all == "in all: 48 computed, KV moved 2.0 KiB, saved 0 B"


def test_what_is_carried_is_told_apart(capsys):
    usage = usage_of(29, 16, 6, moved=5120, sliding_window=1024, recurrent=3072)
    _print_usage(generation_pb2.Finish(usage=usage, placement=FIRST, placements=[FIRST]))
    assert (
        "KV moved 5.0 KiB (of it recurrent 3.0 KiB, sliding_window 1.0 KiB), saved" in capsys.readouterr().err
    )


def test_a_chat_is_answered_as_the_model_writes_it():
    chat = _request(GenerateConfig(prompt="x", chat=True), "x").chat
    assert (chat.messages[0].content, chat.raw_answer) == ("x", True)
    assert _request(GenerateConfig(prompt="x"), "x").text == "x"


def test_what_is_not_said_is_left_to_the_model():
    assert not _request(GenerateConfig(prompt="Hello"), "Hello").sampling.HasField("temperature")
    assert _request(GenerateConfig(prompt="Hello", temperature=0), "Hello").sampling.HasField("temperature")
