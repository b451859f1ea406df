"""Pulls as stories: a puller with its table, and a holder's transfers, as two_ends.py has them.

    pull ID [have=]              the puller asks, and keeps pages for what it lacks
    grant ID END                 the holder's engine has locked that much of the prompt, from page 0 on
    grant-again ID               its word comes twice
    refuse ID WORD               or it says no
    late ID                      what the puller waits for has not come in time
    leave ID                     its request is over

and what two_ends.py and transfer_story.py say: hear, lose, link, wait, land, cut, hybrid.
"""

from services.kv.handshake import (
    RESERVATION_OVER,
    PullEffect,
    PullEvent,
    PullState,
    step_pull,
)
from services.values.kv import PullGrant
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.sending.sending_rank import PAGE
from transfer.two_ends import TwoEnds


class Pulls(TwoEnds):
    def __init__(self):
        self.pulls, self.have, self.end, self.granted = {}, {}, {}, {}
        super().__init__()

    def do_pull(self, command, transfer_id):
        self.pulls[transfer_id] = PullState.ASKED
        self.have[transfer_id] = int(command.options.get("have", 0))
        self.told.append(f"puller: asks for {transfer_id:X}")

    def do_grant(self, command, transfer_id):
        end = int(command.words[1])
        self.request(transfer_id, end)
        self.pages(0, end, transfer_id)
        if self.layout.carried:
            self.carried(end, transfer_id)
        self.granted[transfer_id] = PullGrant(transfer_id, end)
        self.transfers.grant(self.stream, self.granted[transfer_id])

    def do_grant_again(self, command, transfer_id):
        self.transfers.grant(self.stream, self.granted[transfer_id])

    def do_refuse(self, command, transfer_id):
        self.transfers.refuse_pull(self.stream, transfer_id, command.words[1], 0)

    def do_late(self, command, transfer_id):
        self.step(transfer_id, PullEvent.LATE)

    def do_leave(self, command, transfer_id):
        self.step(transfer_id, PullEvent.CANCELLED)

    def do_lose(self, command, transfer_id):
        super().do_lose(command, transfer_id)
        for asked, state in self.pulls.items():
            if state is PullState.ASKED:
                self.step(asked, PullEvent.REFUSED)
            elif state is PullState.FILLING:
                self.step(asked, PullEvent.DOUBTED)

    def step(self, transfer_id, event):
        self.pulls[transfer_id], effects = step_pull(self.pulls[transfer_id], event)
        for effect in effects:
            self.perform_effect(transfer_id, effect)

    def perform_effect(self, transfer_id, effect):
        match effect:
            case PullEffect.SEND_TICKET:
                self.send_ticket(transfer_id)
            case PullEffect.END_GRANT:
                self.send_abort(transfer_id)
            case PullEffect.GIVE_UP:
                self.watch_of(transfer_id).abort()
            case PullEffect.PUBLISH:
                self.told.append(
                    f"puller: publishes {transfer_id:X} up to token {self.end[transfer_id]}, "
                    "computes the rest"
                )
            case PullEffect.SET_ASIDE:
                self.told.append(f"puller: sets the pages of {transfer_id:X} aside")
                self.given_up.append(self.watch_of(transfer_id))
                self.end_quarantines()
            case PullEffect.COMPUTE:
                self.told.append(f"puller: computes {transfer_id:X}")

    def send_ticket(self, transfer_id):
        end = self.end[transfer_id] = self.granted[transfer_id].end
        start = min(self.have[transfer_id], end) // PAGE * PAGE
        self.told.append(f"puller: sends the ticket of {transfer_id:X} for [{start}, {end})")
        self.ask(transfer_id, end, start)

    def watch_of(self, transfer_id):
        return next(watch for watch in reversed(self.known) if watch.transfer_id == transfer_id)

    def take(self, message):
        kind = message.WhichOneof("message")
        word = getattr(message, kind)
        if kind == "pull_grant":
            self.step(word.room, PullEvent.GRANTED)
            return
        if word.room not in self.end:  # No ticket of it has left.
            if kind == "status" and word.state == pb.Status.STATE_REFUSED:
                self.step(word.room, PullEvent.REFUSED)
            return
        super().take(message)
        watch, state = self.watch_of(word.room), self.pulls[word.room]
        if watch.state in RESERVATION_OVER and state in (PullState.FILLING, PullState.STOPPING):
            landed = kind == "status" and word.state == pb.Status.STATE_LANDED
            fits = landed and state is PullState.FILLING
            self.step(word.room, PullEvent.LANDED if fits else PullEvent.STOPPED)
        elif word.unsettled and state is PullState.FILLING:
            self.step(word.room, PullEvent.DOUBTED)
