"""Requests of our service go into a scheduler and its outputs come back over the socket of the reports.

The service sends Generate and Abort, and the scheduler sends Outputs, one message per step. This bypasses
SGLang's own HTTP server, tokenizer manager and DP controller, which would parse and write JSON for each
token, and wake a task for it in a process of its own. SGLang's health checks go their old way.

The KV events of this process go to our service, too, instead of over ZMQ: in order, and none is lost.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.disaggregation.kv_events import EventPublisher
from sglang.srt.managers.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    LoRAUpdateOutput,
    TokenizedGenerateReqInput,
    unwrap_from_pickle,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.sampling.sampling_params import SamplingParams

from services.engine.sglang.inside.adapters import change_of
from services.engine.sglang.inside.reporter import process_reporter
from services.engine.sglang.reports import (
    Abort,
    AdapterChanged,
    Generate,
    LoadAdapter,
    Outputs,
    TreeEvents,
    UnloadAdapter,
    unpack_ids,
)

_NOT_ASKED_FOR: dict[str, Any] = {
    "input_text": None,
    "input_embeds": None,
    "mm_inputs": None,
    "token_type_ids": None,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
}


Chunk = dict[str, Any]  # It is laid out as over HTTP.


def take_orders(
    receiver: Any, received: list[Any] | None, local: list[Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Add our orders before SchedulerRequestReceiver._broadcast_reqs_across_ranks; return its arguments.

    `received` is None in a process that gets what another one receives. Aborts go into `local`, SGLang's own
    messages of this DP rank: with DP attention, the received ones only count at the first rank.
    """
    if received is None:
        return None
    orders = process_reporter().orders()
    vocab_size = receiver.model_config.vocab_size
    requests = [_request(order, vocab_size) for order in orders if isinstance(order, Generate)]
    aborts = [AbortReq(rid=order.rid) for order in orders if isinstance(order, Abort)]
    changes = [change_of(order) for order in orders if isinstance(order, LoadAdapter | UnloadAdapter)]
    received = [*received, *filter(None, requests), *changes]
    return (receiver, received, [*(local or ()), *aborts]), {}


def report_outputs(
    original: Callable[..., None], sender: Any, output: Any, *args: Any, **kwargs: Any
) -> None:
    """Report outputs, around SenderWrapper.send_output, which answers SGLang's tokenizer manager."""
    reported = _reports_of(output, *args) if sender.socket is not None else []
    for report in reported:
        process_reporter().report(report)
    if not reported or _has_others(output):
        original(sender, output, *args, **kwargs)


def _request(order: Generate, vocab_size: int) -> Any:
    try:
        return _generation(order, vocab_size)
    except ValueError as error:  # SGLang's tokenizer manager refuses it in this form.
        refusal = {"type": "abort", "status_code": 400, "message": str(error)}
        process_reporter().report(Outputs([_end(order.arguments["rid"], refusal)]))
        return None


def _generation(order: Generate, vocab_size: int) -> Any:
    arguments = _NOT_ASKED_FOR | order.arguments
    sampling = SamplingParams(**arguments.pop("sampling_params"))
    sampling.stop_token_ids = set(sampling.stop_token_ids or ())
    sampling.normalize(None)
    sampling.verify(vocab_size)
    ids = unpack_ids(arguments.pop("input_ids"))
    return TokenizedGenerateReqInput(input_ids=ids, sampling_params=sampling, stream=True, **arguments)


def _reports_of(output: Any, request: Any = None) -> Sequence[Outputs | AdapterChanged]:
    if isinstance(output, LoRAUpdateOutput) and getattr(request, "rid", None):
        return [AdapterChanged(request.rid, "" if output.success else output.error_message or "no reason")]
    return _outputs_of(output)


def _outputs_of(output: Any) -> list[Outputs]:
    match output:
        case BatchTokenIDOutput(rids=rids):
            ours = [(index, rid) for index, rid in enumerate(rids) if _is_ours(rid)]
            tokens = {rid: list(output.output_ids[i]) for i, rid in ours if _is_tokens_alone(output, i)}
            chunks = [_chunk(output, index, rid) for index, rid in ours if rid not in tokens]
            return _apart(chunks, tokens)
        case AbortReq(rid=rid) if _is_ours(rid):
            reason = {"type": "abort", "message": output.abort_message or "Abort in waiting queue"}
            return [Outputs([_end(rid, output.finished_reason or reason)])]
    return []


def _is_tokens_alone(output: Any, index: int) -> bool:
    has_scores = output.input_token_logprobs_val and output.input_token_logprobs_val[index]
    return output.finished_reasons[index] is None and not output.retraction_counts[index] and not has_scores


def _has_others(output: Any) -> bool:
    return not all(map(_is_ours, getattr(output, "rids", None) or ()))


def _apart(chunks: list[Chunk], tokens: dict[str, list[int]]) -> list[Outputs]:
    """Return the scores of prompts in outputs of their own.

    Those of several prompts that end in one step could exceed a line, and a request whose end is unreadable
    never ends.
    """
    scored = [Outputs([chunk]) for chunk in chunks if "input_token_logprobs" in chunk["meta_info"]]
    others = [chunk for chunk in chunks if "input_token_logprobs" not in chunk["meta_info"]]
    return [*scored, Outputs(others, tokens)] if others or tokens else scored


def _is_ours(rid: str) -> bool:
    return not rid.startswith(HEALTH_CHECK_RID_PREFIX)


def _end(rid: str, reason: Any) -> Chunk:
    return {"rid": rid, "output_ids": [], "meta_info": {"finish_reason": reason}}


def _chunk(output: Any, index: int, rid: str) -> Chunk:
    """Return the part of TokenizerManager._handle_batch_output's result that our service reads."""
    reason = output.finished_reasons[index]
    meta_info = {
        "finish_reason": reason,
        "num_retractions": output.retraction_counts[index],
        "cached_tokens": output.cached_tokens[index],
    }
    if reason is not None:
        meta_info |= _times(output, index) | _drafts(output, index)
    meta_info |= _prompt_logprobs(output, index)
    return {"rid": rid, "output_ids": list(output.output_ids[index]), "meta_info": meta_info}


def _times(output: Any, index: int) -> dict[str, Any]:
    times = unwrap_from_pickle(output.time_stats)
    meta_info: dict[str, Any] = times[index].convert_to_output_meta_info() if times else {}
    return meta_info


def _drafts(output: Any, index: int) -> dict[str, int]:
    """Count drafts as TokenizerManager._calculate_spec_decoding_metrics does."""
    verified = output.spec_verify_ct[index] if output.spec_verify_ct else 0
    if not verified:
        return {}
    return {
        "spec_num_proposed_drafts": verified * (get_spec().speculative_num_draft_tokens - 1),
        "spec_num_correct_drafts": output.spec_num_correct_drafts[index],
    }


def _prompt_logprobs(output: Any, index: int) -> dict[str, Any]:
    """Lay out scores as TokenizerManager.add_logprob_to_meta_info does."""
    if not output.input_token_logprobs_val or not output.input_token_logprobs_val[index]:
        return {}
    logprobs, ids = output.input_token_logprobs_val[index], output.input_token_logprobs_idx[index]
    scores: dict[str, Any] = {"input_token_logprobs": _entries(logprobs, ids)}
    if output.input_top_logprobs_val:
        tops = zip(output.input_top_logprobs_val[index], output.input_top_logprobs_idx[index], strict=True)
        scores["input_top_logprobs"] = [
            _entries(logprobs, ids) if logprobs else None for logprobs, ids in tops
        ]
    return scores


def _entries(logprobs: Sequence[Any], ids: Sequence[Any]) -> list[tuple[Any, Any]]:
    return list(zip(logprobs, ids, strict=True))


def publish_events(_result: None, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Publish after each Scheduler.process_batch_result.

    SGLang itself publishes when it logs, on decode at every 40th step (`--decode-log-interval`).
    """
    scheduler.kv_events_publisher.publish_kv_events()


class TreeEventPublisher(EventPublisher):
    def __init__(self, attn_dp_rank: int, **_zmq_settings: Any) -> None:
        self._dp_rank = attn_dp_rank

    def publish(self, events: Any) -> None:
        process_reporter().report(TreeEvents(self._dp_rank, [msgspec.to_builtins(e) for e in events.events]))

    def shutdown(self) -> None:
        """The reporter ends with its process."""
