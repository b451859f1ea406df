"""This module has what a router tells of a small cluster, for tests of what is made of it."""

from services.wire.isthmus.v1 import common_pb2 as c
from services.wire.isthmus.v1 import generation_pb2 as g

D0, D1 = (c.RankId(worker="decode", rank=number, generation=7) for number in range(2))
P0 = c.RankId(worker="prefill", generation=7)


def rank(rank_id, state="live", **load):
    is_prefill = rank_id.worker.startswith("prefill")
    load = {"total_pages": 100, "cached_pages": 30, "used_pages": 20, "running": 2, "step_s": 0.01} | load
    load |= {"prefill_tokens_per_s": 9_000.0} if is_prefill else {"tokens_per_step": 1.5}
    return g.RankStatus(
        rank=rank_id,
        role=c.ROLE_PREFILL if is_prefill else c.ROLE_DECODE,
        state=state,
        trust=1.0,
        load=c.RankLoad(**load),
    )


def running(number=1, **fields):
    usual = {
        "request_id": f"request-{number}",
        "conversation_id": "holiday",
        "age_s": 2.0,
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "decode": D0,
        "prefill": P0,
    }
    return g.RunningRequest(**usual | fields)


def finished(
    number=1, prompt=100, found=60, ttft_s=0.02, outcome="ok", decode=D0, plan=c.PLAN_REMOTE, pulled=0
):
    if outcome != "ok":
        return g.FinishedRequest(request_id=f"done-{number}", outcome=outcome, duration_s=1.0)
    is_remote = plan == c.PLAN_REMOTE
    usage = g.Usage(
        prompt_tokens=prompt,
        completion_tokens=16,
        decode_prefix_len=found,
        delta_tokens=prompt - found if is_remote else 0,
        prefill_prefix_len=found // 2 if is_remote else 0,
        kv_bytes_moved=2048 * (prompt - found) if is_remote else 0,
        pulled_tokens=pulled,
        pulled_bytes=2048 * pulled,
    )
    placement = g.Placement(decode=decode, prefill=P0 if is_remote else None, plan=plan)
    finish = g.Finish(
        reason=c.FINISH_REASON_STOP,
        usage=usage,
        placement=placement,
        stages=g.StageTimes(first_token_s=ttft_s),
    )
    return g.FinishedRequest(
        request_id=f"done-{number}", outcome="ok", finish=finish, completion_tokens=16, duration_s=1.0
    )


def first(**fields):
    ranks = [rank(P0, cached_pages=10, used_pages=5, running=0), rank(D1, waiting=3), rank(D0)]
    return g.WatchClusterResponse(
        **{"ranks": ranks, "running": [running()], "num_running": 1, "staleness_s": 0.01, **fields}
    )
