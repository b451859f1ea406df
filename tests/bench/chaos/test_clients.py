"""These tests show what a client does when its router dies, with routers that play a script."""

import pytest

from bench.chaos.answers import Asked, Ended, Front
from bench.chaos.clients import ClientError, Clients, Piece
from bench.chaos.processes import Router

pytestmark = pytest.mark.long


ROUTERS = [Router("router-0", 0, "-", "-"), Router("router-1", 0, "-", "-")]
ASKED = Asked(0, prompt_ids=(5, 6), max_tokens=4, temperature=0.0, seed=1, front=Front.GRPC)
DONE = Piece(decode_rank="decode-0/0")


class Balancer:
    """Time passes with each look."""

    ready_routers = ROUTERS

    def __init__(self, dead=()):
        self.dead, self.time_s = set(dead), 0.0

    def died(self, router):
        return router.name in self.dead

    def clock(self):
        self.time_s += 1.0
        return self.time_s


class Scripted(Clients):
    """`scripts` are what one try after the other brings: pieces, or an error that ends it."""

    def __init__(self, balancer, *scripts):
        super().__init__(balancer)
        self.scripts, self.asked_of = list(scripts), []

    async def _pieces(self, router, asked):
        self.asked_of.append(router.name)
        for step in self.scripts.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr("bench.chaos.clients._NOTICED_S", 0.0)


GONE = ClientError("UNAVAILABLE", "Socket closed")


async def test_answers_of_clients(subtests):
    with subtests.test("an answer goes on at another router when its own was killed"):
        clients = Scripted(
            Balancer(dead=["router-0"]),
            [Piece((1,)), Piece((2,)), GONE],
            [Piece((1, 2, 3)), Piece((4,)), DONE],
        )
        answer = await clients.ask(ASKED)
        assert clients.asked_of == ["router-0", "router-1"]
        assert (answer.ended, answer.tokens, answer.contradicts) == (Ended.FINISHED, (1, 2, 3, 4), False)
        assert answer.decode_rank == "decode-0/0"
        assert [(failure.status, failure.router_died) for failure in answer.failures] == [
            ("UNAVAILABLE", True)
        ]
        # What came again is nothing new: two arrivals before, two after.
        assert len(answer.arrivals_s) == 4 and answer.ttft.begin_s == answer.began_s
    with subtests.test("an error of a router that lives is an answer lost"):
        clients = Scripted(Balancer(), [Piece((1,)), GONE])
        answer = await clients.ask(ASKED)
        assert (answer.ended, answer.tokens) == (Ended.LOST, (1,))
        assert not answer.failures[0].router_died
    for second in [(1, 9, 3, 4), (1,)]:
        with subtests.test("what comes again must be what came", second=second):
            clients = Scripted(Balancer(dead=["router-0"]), [Piece((1, 2)), GONE], [Piece(second), DONE])
            assert (await clients.ask(ASKED)).contradicts
    with subtests.test("a client that has enough leaves"):
        asked = Asked(
            0, prompt_ids=(5,), max_tokens=9, temperature=0.0, seed=1, front=Front.HTTP, cancel_after=2
        )
        clients = Scripted(Balancer(), [Piece((1, 2)), Piece((3,)), DONE])
        answer = await clients.ask(asked)
        assert (answer.ended, answer.tokens) == (Ended.CANCELLED, (1, 2))
