"""The prefill role of our own engines computes the prompt, writes the delta, and chooses the first token."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from services.engine.paged.core_events import Offer, Offered, Reserved, Token
from services.engine.paged.sequence import Sequence
from services.engine.paged.shell.paged_engine import Mailbox
from services.engine.paged.shell.transferring_engine import TransferringEngine
from services.transfer.sending.handshake_server import HandshakeService
from services.transfer.sending.sending_transfer import Outcome, TransferEnd
from services.transfer.waits import both
from services.values.errors import Aborted, IsthmusError, PeerFailed, ProtocolError, StaleGeneration
from services.values.rank import Rendezvous
from services.values.request import GenerationRequest, PrefillResult, Pulled


class PagedPrefillEngine(TransferringEngine):
    """It implements services.engine.base.PrefillEngine. `sender` serves the Handshake stream."""

    def handshake(self) -> HandshakeService:
        return self.handshake_of(self.sender)

    async def prefill(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        if rendezvous.prefill != self._own_id:
            raise StaleGeneration(
                f"the rendezvous is with {rendezvous.prefill}, another incarnation of this rank"
            )
        seq = self._sequence(request, matcher=await self._matcher(request))
        seq.single_token = True
        seq.transfer_id, seq.transfer_open = rendezvous.transfer_id, True
        with self.mailbox(seq) as mailbox:
            # Pages of a transfer that is not open are dropped, and the first may be offered at once.
            ended, computed = self._open_transfer(seq, rendezvous), _Computed(partial(self.pull, seq))
            self.submit(seq)
            try:
                (pulled, token), end = await both(
                    computed.wait(), _transfer_end(ended), computed.attend(mailbox)
                )
            except IsthmusError as error:
                self.sender.fail_transfer(rendezvous.transfer_id, str(error))
                raise
            except BaseException:
                self.sender.cancel_transfer(rendezvous.transfer_id)
                raise
            finally:
                # This has no effect on a sequence that has ended; the transfer's end gives its pages back.
                self.post(lambda core: core.cancel(seq))
        return PrefillResult(
            first_token_id=token.token_id,
            first_token_logprobs=token.logprobs,
            prefill_prefix_len=token.reused_tokens,
            computed_tokens=len(request.all_ids) - token.reused_tokens,
            kv_bytes_moved=end.bytes_moved,
            queue_s=token.time.queued_s + token.time.unpulled_s(pulled),
            compute_s=token.time.computed_s,
            rank_tokens=token.time.rank_tokens,
            prompt_logprobs=token.prompt_logprobs,
            pulled=pulled,
            brought_tokens=token.brought_tokens,
            draft_tokens=token.draft_tokens,
        )

    def _open_transfer(self, seq: Sequence, rendezvous: Rendezvous) -> asyncio.Future[TransferEnd]:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[TransferEnd] = loop.create_future()

        def on_failed(end: TransferEnd) -> None:  # The sender's thread calls on_failed and on_end.
            loop.call_soon_threadsafe(_set_result, ended, end)

        def on_end(end: TransferEnd) -> None:
            self.post(lambda core: core.transfer_ended(seq))
            loop.call_soon_threadsafe(_set_result, ended, end)

        prompt_len = len(seq.request.all_ids)
        self.sender.open_transfer(
            rendezvous.transfer_id, prompt_len, rendezvous.decode, on_end, on_failed=on_failed
        )
        return ended

    def _offer(self, event: Offer) -> None:  # The engine's thread calls this.
        if isinstance(event, Offered):
            self.sender.pages_ready(event.transfer_id, event.start_token, event.end_token, event.pages)
        else:
            self.sender.carried_ready(event.transfer_id, event.units)


class _Computed:
    def __init__(self, pull: Callable[[Mailbox, Reserved], Awaitable[Pulled | None]]) -> None:
        self._pull = pull
        self._said: asyncio.Queue[tuple[Pulled | None, Token]] = asyncio.Queue()

    async def wait(self) -> tuple[Pulled | None, Token]:
        return await self._said.get()

    async def attend(self, mailbox: Mailbox) -> None:
        """Raise what the sequence fails with, even when it has been computed and its transfer is still
        open."""
        reserved = await mailbox.get()
        if not isinstance(reserved, Reserved):
            raise ProtocolError(f"expected Reserved, got {reserved!r}")
        pulled = await self._pull(mailbox, reserved)
        token = await mailbox.get()
        if not isinstance(token, Token):
            raise ProtocolError(f"expected Token, got {token!r}")
        self._said.put_nowait((pulled, token))
        raise ProtocolError(f"{await mailbox.get()!r} came after the only token")


async def _transfer_end(ended: asyncio.Future[TransferEnd]) -> TransferEnd:
    end = await ended
    if end.error is None:
        return end
    # The decode rank's abort may arrive before its cancellation of the call.
    raise (Aborted if end.outcome is Outcome.ABORTED else PeerFailed)(end.error)


def _set_result(future: asyncio.Future[TransferEnd], end: TransferEnd) -> None:
    if not future.done():
        future.set_result(end)
