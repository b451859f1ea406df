from hypothesis import given
from hypothesis import strategies as st

from services.router.request.stages import STAGES, Stages, stages_of
from services.values.rank import Plan
from services.values.request import Admitted, Pulled

seconds = st.floats(0, 100)
ON_RANK = (
    *("decode_queue_s", "prefill_queue_s", "pull_s", "prefill_compute_s", "transfer_s"),
    "first_decode_step_s",
)


def admitted(pull_s, **stages):
    counts = dict.fromkeys(
        (
            *("prompt_tokens", "decode_prefix_len", "prefill_prefix_len", "computed_tokens"),
            *("kv_bytes_moved", "kv_bytes_prompt"),
        ),
        0,
    )
    pulled = Pulled(seconds=pull_s) if pull_s else None
    return Admitted(**counts, **stages, plan=Plan.REMOTE, pulled=pulled)


@given(
    st.tuples(seconds, seconds, seconds),
    st.fixed_dictionaries(dict.fromkeys(ON_RANK, seconds)),
    seconds,
)
def test_they_add_up(on_router, on_rank, relay_s):
    queue_s, tokenize_s, route_s = on_router
    sent_s = queue_s + tokenize_s + route_s
    first_token_s = sent_s + sum(on_rank.values()) + relay_s
    stages = stages_of(
        tokenize_s=tokenize_s,
        route_s=route_s,
        sent_s=sent_s,
        first_token_s=first_token_s,
        admitted=admitted(**on_rank),
    )
    told = dict(stages.seconds())
    assert tuple(told) == STAGES and len(told) == 10
    assert abs(sum(told.values()) - first_token_s) < 1e-9
    assert abs(told["relay"] - relay_s) < 1e-9 and abs(told["router_queue"] - queue_s) < 1e-9
    assert all(told[name.removesuffix("_s")] == value for name, value in on_rank.items())


def test_clocks_that_differ_a_little_make_no_stage_negative():
    on_rank = dict.fromkeys(ON_RANK, 0.1)
    stages = stages_of(
        tokenize_s=0.1, route_s=0.1, sent_s=0.19, first_token_s=0.3, admitted=admitted(**on_rank)
    )
    assert (stages.router_queue_s, stages.relay_s) == (0.0, 0.0)
    assert dict(Stages().seconds()) == dict.fromkeys(STAGES, 0.0)
