"""Pulls as stories: a puller with its table, and a holder's rooms, as two_ends.py has them.

    pull ROOM [have=]            the puller asks, and keeps pages for what it lacks
    grant ROOM END               the holder's engine has locked that much of the prompt, from page 0 on
    grant-again ROOM             its word comes twice
    refuse ROOM WORD             or it says no
    late ROOM                    what the puller waits for has not come in time
    leave ROOM                   its request is over

and what two_ends.py and room_story.py say: hear, lose, link, wait, land, cut, hybrid.
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
from transfer.sending.room_rank import PAGE
from transfer.two_ends import TwoEnds


class Pulls(TwoEnds):
    def __init__(self):
        self.pulls, self.have, self.end, self.granted = {}, {}, {}, {}
        super().__init__()

    def do_pull(self, command, room):
        self.pulls[room] = PullState.ASKED
        self.have[room] = int(command.options.get("have", 0))
        self.told.append(f"puller: asks for {room:X}")

    def do_grant(self, command, room):
        end = int(command.words[1])
        self.request(room, end)
        self.pages(0, end, room)
        if self.layout.carried:
            self.carried(end, room)
        self.granted[room] = PullGrant(room, end)
        self.rooms.grant(self.stream, self.granted[room])

    def do_grant_again(self, command, room):
        self.rooms.grant(self.stream, self.granted[room])

    def do_refuse(self, command, room):
        self.rooms.refuse_pull(self.stream, room, command.words[1], 0)

    def do_late(self, command, room):
        self.step(room, PullEvent.LATE)

    def do_leave(self, command, room):
        self.step(room, PullEvent.CANCELLED)

    def do_lose(self, command, room):
        super().do_lose(command, room)
        for asked, state in self.pulls.items():
            if state is PullState.ASKED:
                self.step(asked, PullEvent.REFUSED)
            elif state is PullState.FILLING:
                self.step(asked, PullEvent.DOUBTED)

    def step(self, room, event):
        self.pulls[room], effects = step_pull(self.pulls[room], event)
        for effect in effects:
            self.perform_effect(room, effect)

    def perform_effect(self, room, effect):
        match effect:
            case PullEffect.SEND_TICKET:
                self.send_ticket(room)
            case PullEffect.END_GRANT:
                self.send_abort(room)
            case PullEffect.GIVE_UP:
                self.watch_of(room).abort()
            case PullEffect.PUBLISH:
                self.told.append(
                    f"puller: publishes {room:X} up to token {self.end[room]}, computes the rest"
                )
            case PullEffect.SET_ASIDE:
                self.told.append(f"puller: sets the pages of {room:X} aside")
                self.given_up.append(self.watch_of(room))
                self.end_quarantines()
            case PullEffect.COMPUTE:
                self.told.append(f"puller: computes {room:X}")

    def send_ticket(self, room):
        end = self.end[room] = self.granted[room].end
        start = min(self.have[room], end) // PAGE * PAGE
        self.told.append(f"puller: sends the ticket of {room:X} for [{start}, {end})")
        self.ask(room, end, start)

    def watch_of(self, room):
        return next(watch for watch in reversed(self.known) if watch.room == room)

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
