"""Values say all that their messages say."""

from isthmus.values import cluster, usage, watch
from isthmus.values.reading import enum_names, read
from services.wire.isthmus.v1 import common_pb2, generation_pb2

KINDS = {
    usage.RankId: common_pb2.RankId,
    usage.Usage: generation_pb2.Usage,
    usage.Stages: generation_pb2.StageTimes,
    usage.Placement: generation_pb2.Placement,
    usage.Totals: generation_pb2.Totals,
    usage.TokenLogprob: common_pb2.TokenLogprob,
    usage.TokenLogprobs: common_pb2.TokenLogprobs,
    cluster.Model: generation_pb2.Model,
    cluster.TokenizedPrompt: generation_pb2.TokenizeResponse,
    cluster.CostTerm: generation_pb2.CostTerm,
    cluster.Candidate: generation_pb2.Candidate,
    cluster.Explanation: generation_pb2.ExplainResponse,
    cluster.KvPath: common_pb2.KvPath,
    cluster.RankLoad: common_pb2.RankLoad,
    cluster.RankStatus: generation_pb2.RankStatus,
    cluster.Ranks: generation_pb2.ListRanksResponse,
    watch.RunningRequest: generation_pb2.RunningRequest,
    watch.Finish: generation_pb2.Finish,
    watch.FinishedRequest: generation_pb2.FinishedRequest,
    watch.ClusterNews: generation_pb2.WatchClusterResponse,
}


def test_every_field_is_told_and_can_be_read(subtests):
    for kind, message in KINDS.items():
        with subtests.test(kind=kind):
            assert set(kind.__dataclass_fields__) == {field.name for field in message.DESCRIPTOR.fields}
            read(kind, message())


def test_what_is_within_is_read_too():
    told = generation_pb2.ExplainResponse(
        candidates=[
            generation_pb2.Candidate(
                decode=common_pb2.RankId(worker="decode", rank=1),
                plan=common_pb2.PLAN_REMOTE,
                terms=[generation_pb2.CostTerm(name="compute", seconds=0.5)],
                chosen=True,
                decode_resume_tokens=0,
            )
        ],
        past_answers={"found": 2},
    )
    explanation = read(cluster.Explanation, told)
    chosen = explanation.chosen
    assert str(chosen.decode) == "decode/1" and chosen.prefill is None and chosen.plan == "remote"
    assert chosen.terms == (cluster.CostTerm("compute", 0.5),)
    assert (chosen.decode_resume_tokens, chosen.prefill_resume_tokens) == (0, None)
    assert explanation.past_answers == {"found": 2} and explanation.pinned is None


def test_enums_are_their_names():
    assert set(enum_names(common_pb2.FinishReason.DESCRIPTOR).values()) == {
        "",
        "stop",
        "length",
        "aborted",
        "capacity",
        "tool_calls",
    }
    assert enum_names(common_pb2.Role.DESCRIPTOR)[common_pb2.ROLE_PREFILL] == "prefill"
