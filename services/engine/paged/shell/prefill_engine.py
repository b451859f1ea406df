"""The prefill role of our own engines computes the prompt, writes the delta, and chooses the first token."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from services.engine.paged.admitting import Limits
from services.engine.paged.core_events import Offer, Offered, Reserved, Token
from services.engine.paged.model_runner import ModelRunner
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.engine_thread import Cancel, RoomEnded, Submit
from services.engine.paged.shell.paged_engine import CacheSettings, Mailbox, PagedEngine, SenderHangs
from services.transfer.sending.handshake_server import HandshakeService
from services.transfer.sending.room import Outcome, RoomEnd
from services.transfer.sending.sender import KvSender
from services.transfer.transport import Transport
from services.transfer.waits import Hearing, both
from services.values.errors import Aborted, IsthmusError, PeerFailed, ProtocolError, StaleGeneration
from services.values.rank import RankId, Rendezvous
from services.values.rank_reports import RankLoad
from services.values.request import GenerationRequest, PrefillResult

# The sender posts, polls or digests a piece of one transfer in one go, which takes milliseconds.
_MAX_SENDER_LIMIT_S = 30.0


class PagedPrefillEngine(PagedEngine):
    """It implements services.engine.base.PrefillEngine. `sender` serves the Handshake stream."""

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        open_transport: Callable[[], Transport],
        own_id: RankId,
        *,
        limits: Limits,
        cache: CacheSettings,
        model_directory: Path | None = None,
    ) -> None:
        super().__init__(make_runner, limits, cache, model_directory=model_directory)
        self._offer = self._hand_on
        self._open_transport = open_transport
        self._own_id = own_id
        self._sender: KvSender | None = None
        self._sender_gone = asyncio.Event()

    @property
    def sender(self) -> KvSender:
        assert self._sender is not None, "the engine has not been started"
        return self._sender

    def handshake(self) -> HandshakeService:
        return HandshakeService(self.sender, self._sender_gone)

    def load(self) -> RankLoad:
        if self._sender is None:
            return super().load()
        return replace(super().load(), open_rooms=self._sender.open_rooms, kv_paths=self._sender.kv_paths)

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        hearing = Hearing()
        self._watching.append(asyncio.create_task(hearing.listen(), name="hearing"))
        sender = KvSender(
            self._open_transport,
            self.memories,
            self.layout,
            self._own_id,
            read_pages=self.read_pages,
            heard_s=lambda: hearing.heard_s,
            on_crash=lambda error: loop.call_soon_threadsafe(self._fail_all, error),
        )
        await asyncio.to_thread(sender.start)
        self._sender = sender
        if self._limits.step_limit_s > 0:
            limit_s = min(self._limits.step_limit_s, _MAX_SENDER_LIMIT_S)
            self._watch(sender.watch, limit_s, self._abandon_sender, SenderHangs())

    def _abandon_sender(self) -> str:
        self._sender_gone.set()
        return self.sender.abandon()

    async def _stop_transfers(self) -> bool:
        return self._sender is None or await asyncio.to_thread(self._sender.stop)

    async def prefill(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        if rendezvous.prefill != self._own_id:
            raise StaleGeneration(
                f"the rendezvous is with {rendezvous.prefill}, another incarnation of this rank"
            )
        seq = self._sequence(request, matcher=await self._matcher(request))
        seq.single_token = True
        seq.room, seq.room_open = rendezvous.room, True
        with self._mailbox(seq) as mailbox:
            # Pages of a transfer that is not open are dropped, and the first may be offered at once.
            ended, computed = self._open_room(seq, rendezvous), _Computed()
            self.post(Submit(seq))
            try:
                (reserved, token), end = await both(
                    computed.wait(), _room_end(ended), computed.attend(mailbox)
                )
            except IsthmusError as error:
                self.sender.fail_room(rendezvous.room, str(error))
                raise
            except BaseException:
                self.sender.cancel_room(rendezvous.room)
                raise
            finally:
                # It does nothing once it has ended; the transfer gives the pages back.
                self.post(Cancel(seq))
        return PrefillResult(
            first_token_id=token.token_id,
            first_token_logprobs=token.logprobs,
            prefill_prefix_len=token.reused_tokens,
            computed_tokens=len(request.all_ids) - token.reused_tokens,
            kv_bytes_moved=end.bytes_moved,
            queue_s=reserved.queue_s,
            compute_s=token.compute_s,
            prompt_logprobs=token.prompt_logprobs,
        )

    def _open_room(self, seq: Sequence, rendezvous: Rendezvous) -> asyncio.Future[RoomEnd]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[RoomEnd] = loop.create_future()

        def on_failed(end: RoomEnd) -> None:  # The sender's thread calls it and on_end.
            loop.call_soon_threadsafe(_set_result, ended, end)

        def on_end(end: RoomEnd) -> None:
            self.post(RoomEnded(seq))
            loop.call_soon_threadsafe(_set_result, ended, end)

        prompt_len = len(seq.request.all_ids)
        self.sender.open_room(rendezvous.room, prompt_len, rendezvous.decode, on_end, on_failed=on_failed)
        return ended

    def _hand_on(self, event: Offer) -> None:  # The engine's thread calls it.
        if isinstance(event, Offered):
            self.sender.pages_ready(event.room, event.start_token, event.end_token, event.pages)
        else:
            self.sender.carried_ready(event.room, event.units)


class _Computed:
    def __init__(self) -> None:
        self._said: asyncio.Queue[tuple[Reserved, Token]] = asyncio.Queue()

    async def wait(self) -> tuple[Reserved, Token]:
        return await self._said.get()

    async def attend(self, mailbox: Mailbox) -> None:
        """Raises what the sequence fails with, also when it is computed and its transfer still open."""
        reserved, token = await mailbox.get(), await mailbox.get()
        if not isinstance(reserved, Reserved) or not isinstance(token, Token):
            raise ProtocolError(f"expected Reserved and Token, got {reserved!r} and {token!r}")
        self._said.put_nowait((reserved, token))
        raise ProtocolError(f"{await mailbox.get()!r} came after the only token")


async def _room_end(ended: asyncio.Future[RoomEnd]) -> RoomEnd:
    end = await ended
    if end.error is None:
        return end
    # The decode rank's abort may be here before its cancellation of the call is.
    raise (Aborted if end.outcome is Outcome.ABORTED else PeerFailed)(end.error)


def _set_result(future: asyncio.Future[RoomEnd], end: RoomEnd) -> None:
    if not future.done():
        future.set_result(end)
