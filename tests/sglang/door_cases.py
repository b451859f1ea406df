"""SGLang's messages, and no scheduler; test_inside.py runs them in a process of their own."""

import pickle
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from services.engine.sglang.reports import (
    Abort,
    AdapterChanged,
    Generate,
    LoadAdapter,
    Outputs,
    UnloadAdapter,
    pack_ids,
)

VOCABULARY = 1000
ARGUMENTS = {
    "rid": "0a",
    "input_ids": pack_ids([5, 6]),
    "bootstrap_room": 10,
    "bootstrap_host": "127.0.0.1",
    "routed_dp_rank": 0,
    "disagg_prefill_dp_rank": 0,
    "cache_salt": None,
    "sampling_params": {"temperature": 0, "max_new_tokens": 3, "stop_token_ids": [9, 9]},
}


class Reporter:
    def __init__(self):
        self.waiting, self.told = [], []

    def orders(self):
        taken, self.waiting = self.waiting, []
        return taken

    def report(self, report):
        self.told.append(report)


@pytest.fixture
def door(monkeypatch):
    """(inside.requests, the reporter that it uses)"""
    from services.engine.sglang.inside import scheduler_door

    reporter = Reporter()
    monkeypatch.setattr(scheduler_door, "process_reporter", lambda: reporter)
    return scheduler_door, reporter


def taken(door, *orders):
    """(requests, aborts) that SGLang would take after its own."""
    module, reporter = door
    reporter.waiting += orders
    receiver = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    (told, received, local), _ = module.take_orders(receiver, ["received"], ["local"])
    assert told is receiver and (received.pop(0), local.pop(0)) == ("received", "local")
    return received, local


def test_requests_are_what_sglangs_tokenizer_manager_would_send(door):
    from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler_components import request_receiver

    (request,), (abort,) = taken(door, Generate(ARGUMENTS), Abort("0b"))
    assert type(abort) is AbortReq and abort.rid == "0b" and not abort.abort_all
    assert type(request) is TokenizedGenerateReqInput and request.stream
    assert list(request.input_ids) == [5, 6] and request.bootstrap_room == 10
    assert request.sampling_params.stop_token_ids == {9}
    assert request.sampling_params.top_k == 1  # normalized: greedy
    assert not request.return_logprob
    request_receiver.SchedulerRequestReceiver.unwrap_pickle_wrapper(None, [request, abort])
    assert pickle.loads(pickle.dumps(request)).rid == "0a"  # as it goes to processes that follow


def test_an_abort_counts_at_its_dp_rank_with_dp_attention_too(door, monkeypatch):
    """SGLang broadcasts what it received itself from the first rank, and what is local among a rank's own."""
    from sglang.srt.managers.scheduler_components import request_receiver

    parallel = SimpleNamespace(
        attn_dp_enabled=True,
        attn_tp_rank=0,
        attn_cp_rank=0,
        enable_dp_attention_local_control_broadcast=False,
        tp_size=2,
        tp_group=SimpleNamespace(rank=1, cpu_group=None, ranks=[0, 1]),
    )
    exec_ = SimpleNamespace(moe=SimpleNamespace(is_ep_scale_joiner=False))
    monkeypatch.setattr(request_receiver, "get_parallel", lambda: parallel)
    monkeypatch.setattr(request_receiver, "get_exec", lambda: exec_)
    monkeypatch.setattr(request_receiver, "attn_cp_tp_broadcast_pyobj", lambda requests: requests)
    monkeypatch.setattr(request_receiver, "broadcast_pyobj", lambda *_, **__: ["the first rank's"])
    receiver_type = request_receiver.SchedulerRequestReceiver
    (request,), (abort,) = taken(door, Generate(ARGUMENTS), Abort("0b"))
    receiver = SimpleNamespace()
    receiver._split_work_and_control_reqs = lambda requests: receiver_type._split_work_and_control_reqs(
        receiver, requests
    )
    given = receiver_type._broadcast_reqs_across_ranks(receiver, [request], [abort])
    assert given == [request, abort, "the first rank's"]


def test_a_process_that_follows_takes_none(door):
    module, reporter = door
    reporter.waiting.append(Abort("0a"))
    assert module.take_orders(None, None) is None
    assert reporter.waiting


def test_sampling_that_sglang_refuses_is_the_requests_fault(door):
    refused = {**ARGUMENTS, "sampling_params": {"top_p": 7.0}}
    received, (abort,) = taken(door, Generate(refused), Abort("0b"))
    assert received == [] and abort.rid == "0b"
    ((chunk,),) = (report.chunks for report in door[1].told)
    assert chunk["rid"] == "0a" and chunk["meta_info"]["finish_reason"]["status_code"] == 400
    assert "top_p" in chunk["meta_info"]["finish_reason"]["message"]


class Times:
    def convert_to_output_meta_info(self):
        return {"queue_time": 0.5}


def batch(*rids, **changes):
    """As a scheduler sends it after a step: two tokens each, the last request has ended."""
    from sglang.srt.managers.io_struct import BatchTokenIDOutput, wrap_as_pickle

    count = len(rids)
    given = dict(
        rids=list(rids),
        output_ids=[[7, number] for number in range(count)],
        finished_reasons=[*[None] * (count - 1), {"type": "length", "length": 2}],
        retraction_counts=[0] * count,
        cached_tokens=[16] * count,
        time_stats=wrap_as_pickle([Times()] * count),
        spec_verify_ct=[],
        **changes,
    )
    names = [field for field in BatchTokenIDOutput.__struct_fields__ if field not in given]
    return BatchTokenIDOutput(**dict.fromkeys(names), **given)


def sent(door, output, socket=True):
    """(what goes on to SGLang's tokenizer manager, chunks that are reported)"""
    passed = []
    sender = SimpleNamespace(socket=socket or None)
    door[0].report_outputs(lambda _, output: passed.append(output), sender, output)
    return passed, [chunk for report in door[1].told for chunk in report.chunks]


def test_a_step_is_one_report(door):
    passed, chunks = sent(door, batch("0a", "0b"))
    assert passed == [] and len(door[1].told) == 1
    assert door[1].told[0].tokens == {"0a": [7, 0]}
    meta_info = {
        "finish_reason": {"type": "length", "length": 2},
        "num_retractions": 0,
        "cached_tokens": 16,
        "queue_time": 0.5,
    }
    assert chunks == [{"rid": "0b", "output_ids": [7, 1], "meta_info": meta_info}]


def test_of_a_request_that_was_retracted_more_is_told_than_its_tokens(door):
    output = batch("0a", "0b", "0c")
    output.retraction_counts = [0, 2, 0]
    _, chunks = sent(door, output)
    assert door[1].told[0].tokens == {"0a": [7, 0]}
    told = {"finish_reason": None, "num_retractions": 2, "cached_tokens": 16}
    assert chunks[0] == {"rid": "0b", "output_ids": [7, 1], "meta_info": told}


def test_a_step_in_which_none_ends_is_told(door):
    output = batch("0a")
    output.finished_reasons = [None]
    assert sent(door, output) == ([], [])
    assert door[1].told == [Outputs([], {"0a": [7, 0]})]


def test_what_is_not_ours_goes_on_to_sglang(door):
    from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
    from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqOutput

    health = f"{HEALTH_CHECK_RID_PREFIX}_1"
    for output in (batch(health), AbortReq(rid=health), FlushCacheReqOutput(success=True), batch()):
        assert sent(door, output) == ([output], [])
    mixed = batch("0a", health)
    assert sent(door, mixed) == ([mixed], [])
    assert door[1].told == [Outputs([], {"0a": [7, 0]})]


def test_a_process_without_a_socket_of_sglangs_tells_nothing(door):
    assert sent(door, batch("0a"), socket=False)[1] == []


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (None, {"type": "abort", "message": "Abort in waiting queue"}),
        ({"type": "abort", "status_code": 503}, {"type": "abort", "status_code": 503}),
    ],
)
def test_the_end_of_a_request_that_never_ran_is_told(door, reason, told):
    from sglang.srt.managers.io_struct import AbortReq

    passed, (chunk,) = sent(door, AbortReq(rid="0a", finished_reason=reason))
    assert passed == []
    assert chunk == {"rid": "0a", "output_ids": [], "meta_info": {"finish_reason": told}}


def test_adapters_are_loaded_by_sglangs_own_messages_and_their_answers_are_told(door):
    from sglang.srt.managers.io_struct import (
        LoadLoRAAdapterReqInput,
        LoRAUpdateOutput,
        UnloadLoRAAdapterReqInput,
    )

    load, unload = taken(door, LoadAdapter("1", "ab", "a", "/a"), UnloadAdapter("2", "ab", "a"))[0]
    assert load == LoadLoRAAdapterReqInput(rid="1", lora_id="ab", lora_name="a", lora_path="/a")
    assert unload == UnloadLoRAAdapterReqInput(rid="2", lora_id="ab", lora_name="a")
    passed, sender = [], SimpleNamespace(socket=True)
    loaded, failed = (LoRAUpdateOutput(success=ok, error_message="no") for ok in (True, False))
    for output, request in ((loaded, load), (failed, unload), (loaded, replace(load, rid=None))):
        door[0].report_outputs(lambda _, output, *args: passed.append(output), sender, output, request)
    assert passed == [loaded], "SGLang has sent one itself"
    assert door[1].told == [AdapterChanged("1", ""), AdapterChanged("2", "no")]


def test_scores_of_a_prompt_are_laid_out_as_over_http(door):
    logprobs = dict(
        input_token_logprobs_val=[[None, -1.5]],
        input_token_logprobs_idx=[[5, 6]],
        input_top_logprobs_val=[[None, [-0.5, -1.5]]],
        input_top_logprobs_idx=[[None, [8, 6]]],
    )
    _, (chunk,) = sent(door, batch("0a", **logprobs))
    assert chunk["meta_info"]["input_token_logprobs"] == [(None, 5), (-1.5, 6)]
    assert chunk["meta_info"]["input_top_logprobs"] == [None, [(-0.5, 8), (-1.5, 6)]]


def test_scores_of_several_prompts_are_a_report_each(door):
    """Of all that end in one step they could be more than a line holds."""
    logprobs = dict(
        input_token_logprobs_val=[[None, -1.5], [], [None, -2.5]],
        input_token_logprobs_idx=[[5, 6], [], [5, 7]],
    )
    _, chunks = sent(door, batch("0a", "0b", "0c", **logprobs))
    assert [chunk["rid"] for chunk in chunks] == ["0a", "0c"]
    assert [[chunk["rid"] for chunk in report.chunks] for report in door[1].told] == [["0a"], ["0c"], []]
    assert [report.tokens for report in door[1].told] == [{}, {}, {"0b": [7, 1]}]


def test_drafts_are_counted_at_the_end(door, monkeypatch):
    monkeypatch.setattr(door[0], "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=4))
    drafts = dict(spec_verify_ct=[2], spec_num_correct_drafts=[3])
    output = batch("0a")
    output.spec_verify_ct, output.spec_num_correct_drafts = drafts.values()
    _, (chunk,) = sent(door, output)
    assert chunk["meta_info"]["spec_num_proposed_drafts"] == 6
    assert chunk["meta_info"]["spec_num_correct_drafts"] == 3


def test_outputs_survive_the_socket(door):
    from services.engine.sglang.reports import REPORTS, decode, encode

    sent(door, batch("0a", "0b"))
    (told,) = door[1].told
    assert told.chunks and told.tokens
    assert decode(encode(told), REPORTS) == told
