"""One DP rank of an SGLang worker is an engine of either role.

`generate` draws a transfer, sends it with the ranks to SGLang (decode), and starts the prefill leg at once.
The first chunk and the PrefillResult together give `admitted`, with the plugin's reports on the transfer.

SGLang finds decode_prefix_len only inside its scheduler, when both legs are running.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Set
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client.core import Metric

from services.engine.base import Engine, RemotePrefill
from services.engine.paged.model_runner import check_told
from services.engine.paged.shell.adapting import Adapting
from services.engine.sglang.directory import DirectoryService, directory_to_proto
from services.engine.sglang.reports import pack_ids
from services.engine.sglang.service.adapters import SchedulerLoader, lora_id
from services.engine.sglang.service.process_connections import Needs, TokenCallback
from services.engine.sglang.service.request_arguments import (
    check_resumption,
    check_sampling,
    check_scored,
    prompt_logprobs_of,
    sampling_arguments,
    scoring_arguments,
)
from services.engine.sglang.service.worker import SglangWorker
from services.kv.transfer_plan import carried_by_kind, moved_bytes
from services.values.errors import (
    ConfigError,
    InvalidRequest,
    NoCapacity,
    PeerFailed,
    StaleGeneration,
    Unavailable,
)
from services.values.kv import CacheEvents, KvLayout, PageBooks
from services.values.rank import Plan, RankId, Rendezvous, TransferId
from services.values.rank_reports import RankLoad
from services.values.request import Admitted, FinishReason, GenerationRequest, Output, PrefillResult

log = logging.getLogger(__name__)

_TRANSFER_ID_BITS = 62  # SGLang stores ids in signed 64-bit numbers, and 0 means "nothing landed yet".
_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class SglangRank:
    """Both roles share this; it implements services.engine.base.Engine."""

    reports_checkpoints = False  # SGLang's events are about full attention alone.
    takes_turns = False  # SGLang's queue has no tenants.
    lends = pulls = False
    hands_over = None

    def __init__(self, worker: SglangWorker, own_id: RankId) -> None:
        self._worker = worker
        self._own_id = own_id
        self._adapting = Adapting(SchedulerLoader(worker, own_id.rank))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._own_id})"

    @property
    def layout(self) -> KvLayout:
        return self._worker.layout

    @property
    def max_context_tokens(self) -> int:
        return self._worker.max_context_tokens

    @property
    def model_context_tokens(self) -> int:
        return self._worker.model_context_tokens

    @property
    def adapters(self) -> Adapting | None:
        return self._adapting if self._worker.settings.has_adapters else None

    async def start(self) -> None:
        await self._worker.start()
        try:
            for name, directory in self._worker.settings.engine.adapters.items():
                await self._adapting.load(name, directory)
        except BaseException:
            await self._worker.stop()
            raise

    async def stop(self) -> None:
        await self._worker.stop()

    def succeed(self, before: Engine) -> None:
        raise ConfigError("SGLang's processes keep the role that they start with")

    async def crashed(self) -> bool:
        await self._worker.crashed()
        return False

    def load(self) -> RankLoad:
        return self._worker.load(self._own_id.rank)

    def metrics(self) -> Iterable[Metric]:
        return self._worker.metrics(self._own_id.rank)

    async def cache_events(self) -> AsyncIterator[CacheEvents]:
        events = self._worker.events[self._own_id.rank]
        while True:
            yield await events.get()

    has_tiers = False
    shared_files = ""

    async def below_events(self) -> AsyncIterator[CacheEvents]:
        """Yield nothing: it has no tiers."""
        return
        yield CacheEvents()

    async def books(self) -> PageBooks:
        """Return the pages as SGLang reports them: it checks them itself, and ends where they are wrong."""
        return self.load().books

    def _body(self, request: GenerationRequest, transfer_id: TransferId, prefill_rank: int) -> dict[str, Any]:
        self._check(request)
        priority = {"priority": request.priority} if self._worker.settings.heeds_priority else {}
        return {
            **priority,
            "rid": f"{transfer_id:016x}",
            "input_ids": pack_ids(request.all_ids),
            "bootstrap_room": transfer_id,
            "routed_dp_rank": self._own_id.rank,
            "disagg_prefill_dp_rank": prefill_rank,
            # Reports of its tree have this, and not what SGLang makes of an adapter there.
            "cache_salt": request.kv_scope or None,
            "lora_id": None if request.adapter is None else lora_id(request.adapter),
            "sampling_params": sampling_arguments(request, self._worker.max_context_tokens),
        }

    def _needs(self, request: GenerationRequest) -> Needs:
        return Needs(partial(self._adapting.entered, request), partial(self._adapting.left, request))

    def _check(self, request: GenerationRequest) -> None:
        """Check the ids, which SGLang does not: one outside the vocabulary ends its process."""
        check_sampling(request.sampling)
        check_resumption(request)
        check_scored(request)
        if request.priority and not self._worker.settings.heeds_priority:
            raise InvalidRequest("priority: engine sglang heeds it with --enable-priority-scheduling only")
        ids, vocab_size = request.all_ids, self._worker.shape.vocab_size
        if not ids:
            raise InvalidRequest("the prompt is empty")
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise InvalidRequest(f"token ids must be in [0, {vocab_size})")
        request.sampling.check_vocabulary(vocab_size)
        if len(ids) >= (holds := self._worker.max_context_tokens):
            raise NoCapacity(f"prompt has {len(ids)} tokens; this rank holds {holds} with the answer")


class SglangDecodeEngine(SglangRank):
    plans = frozenset({Plan.REMOTE})
    moves_penalties = False

    def handshake(self) -> None:
        """Return nothing: SGLang's decode processes are written to, and write to nobody."""

    async def generate(
        self,
        request: GenerationRequest,
        remote_prefill: RemotePrefill | None,
        tell: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[Output, None]:
        if remote_prefill is None:
            raise InvalidRequest("a decode rank of engine sglang computes no prompts: only plan remote works")
        peer = remote_prefill.peer
        transfer_id = TransferId(secrets.randbits(_TRANSFER_ID_BITS) + 1)
        host, _, port = peer.endpoint.rpartition(":")
        body = self._body(request, transfer_id, peer.id.rank)
        body |= {"bootstrap_host": host, "bootstrap_port": int(port)}
        began = time.monotonic()
        rendezvous = Rendezvous(transfer_id, self._own_id, peer.id)
        stops = _stops(request)
        callback = None if tell is None else TokenCallback(tell, stops)
        leg = asyncio.create_task(
            _leg(remote_prefill, request, rendezvous), name=f"prefill-{transfer_id:016x}"
        )
        try:
            async with aclosing(self._worker.stream(body, callback, self._needs(request))) as chunks:
                with self._worker.blaming_ourselves():
                    first, prefill = await _both(chunks, leg)
                    check_told(prefill.prompt_logprobs, request)
                    admitted = await self._admitted(request, transfer_id, prefill, began, time.monotonic())
                output = _output(first, stops)
                yield replace(output, admitted=admitted, prompt_logprobs=prefill.prompt_logprobs)
                if callback is not None:
                    callback.begin()
                while output.finished is None:
                    output = _output(await _next_of_decode(chunks), stops)
                    yield output
        finally:
            leg.cancel()
            with suppress(asyncio.CancelledError, Exception):  # Its caller has received the error.
                await leg
            self._worker.transfers.forget(transfer_id)

    async def _admitted(
        self,
        request: GenerationRequest,
        transfer_id: TransferId,
        prefill: PrefillResult,
        began: float,
        ended: float,
    ) -> Admitted:
        ticket, reserved = await self._worker.transfers.ticket_of(transfer_id)
        self._worker.note_admitted(self._own_id.rank)
        prompt_tokens = len(request.all_ids)
        layout = self._shared_layout(ticket.decode_prefix_len, prompt_tokens, prefill.kv_bytes_moved)
        moved = moved_bytes(ticket.decode_prefix_len, prompt_tokens, layout)
        # These follow each other: pages here, the queue and the computation there (on another clock), the
        # transfer.
        decode_queue_s = min(max(0.0, reserved - began), ended - began)
        prefill_s = ended - began - decode_queue_s
        prefill_queue_s = min(prefill.queue_s, prefill_s)
        prefill_compute_s = min(prefill.compute_s, prefill_s - prefill_queue_s)
        return Admitted(
            prompt_tokens=prompt_tokens,
            decode_prefix_len=ticket.decode_prefix_len,
            prefill_prefix_len=prefill.prefill_prefix_len,
            computed_tokens=prefill.computed_tokens,
            kv_bytes_moved=prefill.kv_bytes_moved,
            kv_bytes_prompt=sum(moved_bytes(0, prompt_tokens, layout)),
            carried_bytes=carried_by_kind(layout, moved),
            decode_queue_s=decode_queue_s,
            prefill_queue_s=prefill_queue_s,
            prefill_compute_s=prefill_compute_s,
            transfer_s=max(0.0, prefill_s - prefill_queue_s - prefill_compute_s),
            plan=Plan.REMOTE,
        )

    def _shared_layout(self, prefix_len: int, prompt_len: int, moved: int) -> KvLayout:
        """Return the layout that both ranks have.

        A draft's KV is transferred only if prefill speculates, too, which the number of bytes shows. Raises
        PeerFailed where it fits neither layout.
        """
        layouts = self.layout, replace(self.layout, draft=None)
        due = {sum(moved_bytes(prefix_len, prompt_len, layout)): layout for layout in layouts}
        if moved not in due:
            either = " or ".join(map(str, due))
            raise PeerFailed(f"prefill says that it moved {moved} bytes where {either} were due")
        return due[moved]


class SglangPrefillEngine(SglangRank):
    @property
    def max_context_tokens(self) -> int:
        """Return the longest prompt: SGLang needs room for its first token here, too."""
        return self._worker.max_context_tokens - 1

    def handshake(self) -> DirectoryService:
        """Return the service of our endpoint: it reports where SGLang's own processes serve Connect."""
        return DirectoryService(directory_to_proto(self._worker.actives, dict(self._worker.own_ids)))

    async def prefill(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        if rendezvous.prefill != self._own_id:
            raise StaleGeneration(
                f"the rendezvous is with {rendezvous.prefill}, another incarnation of this rank"
            )
        transfer_id = rendezvous.transfer_id
        body = self._body(request, transfer_id, self._own_id.rank)
        body |= {"bootstrap_host": "127.0.0.1"}  # SGLang needs one, but nothing is requested from it.
        body |= scoring_arguments(request)
        began = time.monotonic()
        try:
            chunk = await _only(self._worker.stream(body, needs=self._needs(request)))
            moved = await self._worker.bytes_moved(transfer_id)
        finally:
            self._worker.transfers.forget(transfer_id)
        meta_info = chunk["meta_info"]
        cached = int(meta_info["cached_tokens"])
        queue_s, compute_s = _stages(meta_info, time.monotonic() - began)
        return PrefillResult(
            first_token_id=int(chunk["output_ids"][-1]),
            first_token_logprobs=None,
            prefill_prefix_len=cached,
            computed_tokens=len(request.all_ids) - cached,
            kv_bytes_moved=moved,
            queue_s=queue_s,
            compute_s=compute_s,
            prompt_logprobs=prompt_logprobs_of(request, meta_info),
        )


def _stages(meta_info: Mapping[str, Any], elapsed_s: float) -> tuple[float, float]:
    """Return the seconds in SGLang's queue, and under computation (observability/req_time_stats.py).

    The answer comes after the transfer, so the rest of `elapsed_s` is the transfer's. Two clocks measured
    them, so they are limited to it.
    """
    queue_s = min(elapsed_s, max(0.0, float(meta_info.get("queue_time") or 0.0)))
    began_s, ended_s = meta_info.get("forward_entry_time"), meta_info.get("prefill_finished_time")
    if not began_s or not ended_s:
        return queue_s, elapsed_s - queue_s
    return queue_s, min(elapsed_s - queue_s, max(0.0, ended_s - began_s))


async def _leg(
    remote_prefill: RemotePrefill, request: GenerationRequest, rendezvous: Rendezvous
) -> PrefillResult:
    return await remote_prefill(request, rendezvous)


async def _both(
    chunks: AsyncGenerator[dict[str, Any], None], leg: "asyncio.Task[PrefillResult]"
) -> tuple[dict[str, Any], PrefillResult]:
    """Return the first chunk and the leg's result; raise what the first of the two to fail raised.

    If both have failed, an Unavailable takes precedence, as it means that our own SGLang is gone.
    """
    first = asyncio.ensure_future(_next(chunks))
    try:
        await asyncio.wait({first, leg}, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for task in (leg, first) if task.done() and (error := task.exception())]
        if failures:
            raise next((error for error in failures if isinstance(error, Unavailable)), failures[0])
        return await first, await leg
    finally:
        if not first.done():
            first.cancel()
            with suppress(asyncio.CancelledError):
                await first


async def _next(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    async for chunk in chunks:
        return chunk
    raise Unavailable("SGLang ended the request without a word")


async def _only(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    async with aclosing(chunks):
        merged = await _next(chunks)
        async for chunk in chunks:
            ids = chunk["output_ids"] or merged["output_ids"]
            merged = {"output_ids": ids, "meta_info": {**merged["meta_info"], **chunk["meta_info"]}}
    return merged


async def _next_of_decode(chunks: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any]:
    """Return the next chunk, now that prefill's part is over: a failure is SGLang's own."""
    try:
        return await _next(chunks)
    except PeerFailed as error:
        raise Unavailable(str(error)) from error


def _stops(request: GenerationRequest) -> Set[int]:
    """Return the stop tokens; one of the request's ends it even if SGLang goes on."""
    stop_token_ids = frozenset(request.sampling.stop_token_ids)
    return stop_token_ids if request.sampling.ignore_eos else stop_token_ids.union(request.eos_token_ids)


def _output(chunk: dict[str, Any], stops: Set[int]) -> Output:
    """Return the output; SGLang reports a request's drafts at its end."""
    ids, meta_info = tuple(int(token) for token in chunk["output_ids"]), chunk["meta_info"]
    reason = meta_info.get("finish_reason")
    finished = None if reason is None else _FINISH[reason["type"]]
    stop = next((index for index, token in enumerate(ids) if token in stops), None)
    if stop is not None:
        ids, finished = ids[: stop + 1], FinishReason.STOP
    return Output(
        ids,
        finished=finished,
        drafted_tokens=int(meta_info.get("spec_num_proposed_drafts") or 0),
        accepted_draft_tokens=int(meta_info.get("spec_num_correct_drafts") or 0),
    )
