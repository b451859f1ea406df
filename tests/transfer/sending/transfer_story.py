"""Transfers of a prefill rank as stories: what decode and the engine say, what the rank says and writes.

The transport lands when told to, and the clock stands still but for `wait`.

    ticket ID [prompt=] [from=] [until=] [link=]       decode's KvTicket; pages 500 and on
    garbled ID                                         a ticket that cannot be read
    request ID [prompt=]                               the Prefill call came
    computed ID UPTO                                   the engine offers the pages of the next tokens
    carried ID [prompt=]                               and the tail and the state at the prompt's end
    abort ID [link=], link NUMBER, lose NUMBER         decode's stream
    cancel ID                                          the Prefill call was cancelled
    land, cut [unsettled]                              all that is posted; the oldest write
    wait SECONDS
    hybrid                                             what follows is of a model that has, beside full
                                                       attention, a window of 6 tokens (group 1) and a
                                                       state (group 2)
"""

from services.values.rank import TransferId
from services.wire.isthmus.v1 import handshake_pb2 as pb
from transfer.sending.sending_rank import HYBRID, LAYOUT, Rank


class Transfers(Rank):
    def __init__(self):
        self.begin(LAYOUT)

    def begin(self, layout):
        self.told = []
        super().__init__(max_post_bytes=200, layout=layout)  # two pages a post
        self.seen_writes = 0
        self.computed = {}

    def hear(self, link_id):
        return lambda message: self.told.append(f"says on link {link_id}: {words_of(message)}")

    def perform(self, command):
        transfer_id = (
            TransferId(int(command.words[0], 16))
            if command.words and command.name in _OF_A_TRANSFER
            else None
        )
        getattr(self, f"do_{command.name.replace('-', '_')}")(command, transfer_id)
        self.turn()
        yield from self.news()

    def news(self):
        told, self.told = self.told, []
        yield from told
        for write in self.transport.writes[self.seen_writes :]:
            yield f"writes pages {', '.join(map(words_of_move, write.moves))}"
        self.seen_writes = len(self.transport.writes)
        yield from self.ended("fails the Prefill call of", self.failed)
        yield from self.ended("lets go of the pages of", self.ends)

    def ended(self, what, ends):
        for transfer_id, end in ends:
            yield f"{what} {transfer_id:X}: {end.outcome.value}" + (f", {end.error}" if end.error else "")
        ends.clear()

    def do_ticket(self, command, transfer_id):
        numbers = {name: int(value) for name, value in command.options.items()}
        self.ticket(
            transfer_id,
            numbers.get("prompt", 10),
            numbers.get("from", 0),
            numbers.get("link", 1),
            float(numbers.get("until", 110)),
        )

    def do_garbled(self, command, transfer_id):
        self.transfers.refuse(int(command.options.get("link", 1)), transfer_id, "it cannot be read")

    def do_request(self, command, transfer_id):
        self.request(transfer_id, int(command.options.get("prompt", 10)))

    def do_computed(self, command, transfer_id):
        end = int(command.words[1])
        self.pages(self.computed.get(transfer_id, 0), end, transfer_id)
        self.computed[transfer_id] = end

    def do_carried(self, command, transfer_id):
        self.carried(int(command.options.get("prompt", 10)), transfer_id)

    def do_hybrid(self, command, transfer_id):
        self.begin(HYBRID)

    def do_abort(self, command, transfer_id):
        self.transfers.abort(int(command.options.get("link", 1)), transfer_id)

    def do_cancel(self, command, transfer_id):
        self.transfers.cancel_transfer(transfer_id)

    def do_link(self, command, transfer_id):
        self.link_up(int(command.words[0]))

    def do_lose(self, command, transfer_id):
        self.transfers.link_lost(int(command.words[0]))

    def do_land(self, command, transfer_id):
        self.transport.land()

    def do_cut(self, command, transfer_id):
        write = next(write for write in self.transport.writes if not write.released)
        write.failure, write.unsettled = "the network is down", "unsettled" in command.words

    def do_wait(self, command, transfer_id):
        self.now_s += float(command.words[0])


_OF_A_TRANSFER = (
    "ticket",
    "garbled",
    "request",
    "computed",
    "carried",
    "abort",
    "cancel",
    "ask",
    "give-up",
    "renew",
    "pull",
    "grant",
    "grant-again",
    "refuse",
    "late",
    "leave",
)


def words_of(message):
    if message.WhichOneof("message") == "abort_ack":
        unsettled = ", unsettled" * message.abort_ack.unsettled
        return f"{message.abort_ack.room:X} abort acknowledged{unsettled}"
    if message.WhichOneof("message") == "pull_grant":
        return f"{message.pull_grant.room:X} granted up to token {message.pull_grant.end}"
    status = message.status
    words = f"{status.room:X} {pb.Status.State.Name(status.state).removeprefix('STATE_').lower()}"
    if status.state == pb.Status.STATE_LANDED:
        words += f", {status.bytes_moved} bytes"
        words += f" ({' + '.join(map(str, status.group_bytes))})" if status.group_bytes else ""
    if status.state == pb.Status.STATE_RENEGOTIATE:
        words += f", start at token {status.start}"
    return words + ", unsettled" * status.unsettled + (f": {status.reason}" if status.reason else "")


def words_of_move(move):
    units = f"{span(move.source_page, move)} to {span(move.target_page, move)}"
    return f"group {move.group}: {units}" if move.group else units


def span(first, move):
    return str(first) if move.num_pages == 1 else f"{first}-{first + move.num_pages - 1}"
