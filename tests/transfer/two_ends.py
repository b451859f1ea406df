"""Both ends of transfers as a story: a decode rank's watches, a prefill rank's transfers, and a stream.

What decode says arrives at once; what prefill says is on its way until `hear`. Time is 100 at first; a
lease is for 10 s, and the fence's margin is 5 s.

    ask ID [prompt=] [from=]           decode reserves pages and sends its ticket
    give-up ID, renew ID               decode's request
    hear                               all that is on its way
    lose, link                         the stream; the next one to the same life of prefill
    next-life                          another life answers at prefill's endpoint
    wait SECONDS                       who awaits a writer's end looks at the clock

and those of the prefill rank: request, computed, carried, cancel, land, cut, hybrid
(transfer/sending/transfer_story.py).
"""

import asyncio
from collections import deque

from services.transfer.receiving.transfer_watch import Landed, Renegotiated, TransferWatch
from services.values.rank import RankAddress
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.sending.sending_rank import OWN
from transfer.sending.transfer_story import Transfers, words_of

LEASE_S, MARGIN_S = 10.0, 5.0


class TwoEnds(Transfers):
    """The link of every watch itself; its `watches` are those of the stream, as in a SenderLink."""

    def __init__(self):
        self.stream, self.words = 1, deque()
        self.watches, self.orphans, self.given_up = {}, [], []
        self.known = {}  # watch -> the state that was told last
        super().__init__()

    def hear(self, link_id):
        def send(message):
            lost = link_id != self.stream
            self.told.append(f"prefill: {words_of(message)}" + ", which nobody hears" * lost)
            if not lost:
                self.words.append(message)

        return send

    def news(self):
        told = list(super().news())
        for watch, before in self.known.items():
            if watch.state is not before:
                told.append(f"reservation {watch.transfer_id:X}: {before.name} -> {watch.state.name}")
                self.known[watch] = watch.state
        return told

    # -- as a WriterLink ----------------------------------------------------------------------------------

    def send_abort(self, transfer_id):
        self.told.append(f"decode: abort {transfer_id:X}")
        self.transfers.abort(self.stream, transfer_id)

    def send_renewal(self, transfer_id, write_until_s):
        self.told.append(f"decode: renew {transfer_id:X} until {write_until_s:.0f}")
        self.transfers.renew(self.stream, transfer_id, write_until_s)

    def lease_end_s(self, write_until_s):
        return write_until_s

    def seek(self, watch):
        self.told.append(f"decode: seeks the writer of {watch.transfer_id:X}")
        self.orphans.append(watch)

    # -- commands -----------------------------------------------------------------------------------------

    def do_ask(self, command, transfer_id):
        self.ask(transfer_id, int(command.options.get("prompt", 10)), int(command.options.get("from", 0)))

    def ask(self, transfer_id, prompt_len, start):
        until_s = self.now_s + LEASE_S
        watch = TransferWatch(transfer_id, RankAddress(OWN, ""), self, until_s, lambda: self.now_s, self.seek)
        self.watches[transfer_id] = watch
        self.known[watch] = watch.state
        self.ticket(transfer_id, prompt_len, start, self.stream, float(int(until_s)))

    def do_give_up(self, command, transfer_id):
        watch = next(watch for watch in reversed(self.known) if watch.transfer_id == transfer_id)
        if watch.abort():
            self.told.append(f"decode: pages of {transfer_id:X} go to quarantine")
            self.given_up.append(watch)

    def do_renew(self, command, transfer_id):
        self.watches[transfer_id].renew(self.now_s + LEASE_S)

    def do_hear(self, command, transfer_id):
        while self.words:
            self.take(self.words.popleft())
        self.end_quarantines()

    def take(self, message):
        kind = message.WhichOneof("message")
        word = getattr(message, kind)
        if kind == "status" and word.state == pb.Status.STATE_ACCEPTED:
            return
        if (watch := self.watches.pop(word.room, None)) is None:
            self.told.append(f"decode: has heard the last word on {word.room:X} before")
        elif kind == "status" and word.state == pb.Status.STATE_LANDED:
            group_bytes = tuple(word.group_bytes) or (word.bytes_moved,)
            watch.on_landed(Landed(group_bytes, word.descriptors))
        elif kind == "status" and word.state == pb.Status.STATE_RENEGOTIATE:
            watch.on_renegotiated(Renegotiated(word.start))
        elif word.unsettled:
            watch.on_unsettled("it failed")
        else:
            watch.on_last_word("it failed")

    def do_lose(self, command, transfer_id):
        self.words.clear()
        lost, self.watches = self.watches, {}
        self.stream += 1
        self.transfers.link_lost(self.stream - 1)
        for watch in lost.values():
            watch.on_lost()

    def do_link(self, command, transfer_id):
        self.link_up(self.stream)
        orphans, self.orphans = self.orphans, []
        for watch in orphans:
            self.watches[watch.transfer_id] = watch
            watch.on_linked(self)

    def do_next_life(self, command, transfer_id):
        orphans, self.orphans = self.orphans, []
        for watch in orphans:
            watch.on_writer_dead()
        self.end_quarantines()

    def do_wait(self, command, transfer_id):
        super().do_wait(command, transfer_id)
        for watch in self.given_up:
            asyncio.run(look(watch))
        self.end_quarantines()

    def end_quarantines(self):
        for watch in [watch for watch in self.given_up if watch.is_over(MARGIN_S)]:
            self.given_up.remove(watch)
            self.told.append(f"decode: pages of {watch.transfer_id:X} are free again")


async def look(watch):
    """Who awaits a writer's end does so for one turn of the loop."""
    task = asyncio.create_task(watch.writer_stopped(MARGIN_S))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
