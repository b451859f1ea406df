"""These tests show what `isthmus generate` asks for, and what --usage says at the end."""

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


def test_usage_and_requests(subtests, capsys):
    with subtests.test("a request that stayed takes a line"):
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
    with subtests.test("of one that moved each placement is told"):
        totals = generation_pb2.Totals(computed_tokens=48, kv_bytes_moved=2048)
        usage = usage_of(29, 16, 40)
        finish = generation_pb2.Finish(
            usage=usage, placement=FIRST, placements=[FIRST, SECOND], totals=totals
        )
        _print_usage(finish)
        billed, first, second, in_all = capsys.readouterr().err.splitlines()
        assert billed.startswith("29 prompt tokens on d0/1") and "40 generated; first token" in billed
        assert first.startswith("placement 1: 29 prompt tokens on d0/1, plan local: ")
        assert second.startswith(
            "placement 2: 35 prompt tokens on d1/1, plan remote: 0 reused, 35 computed, "
        )
        assert second.endswith("34 generated") and "KV moved 2.0 KiB" in second
        assert in_all == "in all: 48 computed, KV moved 2.0 KiB, saved 0 B"
    with subtests.test("what was pulled, and why nothing was, stands beside what was reused"):
        source = common_pb2.RankId(worker="d7", rank=2)
        usage = generation_pb2.Usage(reused_tokens=16, pulled_tokens=12, pulled_bytes=1536)
        pulled = generation_pb2.Placement(source=source, usage=usage)
        _print_usage(generation_pb2.Finish(usage=usage, placement=pulled))
        assert "16 reused (12 pulled from d7/2, 1.5 KiB), " in capsys.readouterr().err
        refused = generation_pb2.Placement(source=source, pull_refused="busy")
        _print_usage(generation_pb2.Finish(placement=refused))
        assert "0 reused (nothing pulled: busy), " in capsys.readouterr().err
    with subtests.test("what is carried is told apart"):
        usage = usage_of(29, 16, 6, moved=5120, sliding_window=1024, recurrent=3072)
        _print_usage(generation_pb2.Finish(usage=usage, placement=FIRST, placements=[FIRST]))
        assert (
            "KV moved 5.0 KiB (of it recurrent 3.0 KiB, sliding_window 1.0 KiB), saved"
            in capsys.readouterr().err
        )
    with subtests.test("a chat is answered as the model writes it"):
        chat = _request(GenerateConfig(prompt="x", chat=True), "x").chat
        assert (chat.messages[0].content, chat.raw_answer) == ("x", True)
        assert _request(GenerateConfig(prompt="x"), "x").text == "x"
        assert _request(GenerateConfig(prompt="x", model="m:a"), "x").model == "m:a"
    with subtests.test("what is not said is left to the model"):
        assert not _request(GenerateConfig(prompt="Hello"), "Hello").sampling.HasField("temperature")
        assert _request(GenerateConfig(prompt="Hello", temperature=0), "Hello").sampling.HasField(
            "temperature"
        )
