"""The boundary between services and engines.

An engine owns its KV, its batches and its KV transport; a service owns the RPC, the deadline and the
choice of peer. Seen from a service, a decode request is one iterator:

    async with aclosing(engine.generate(request, remote_prefill)) as outputs:
        async for output in outputs: ...

Closing the iterator gives every page back, whatever ended it: success, error, cancel, deadline.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from typing import Protocol

from prometheus_client.core import Metric

from services.values.kv import CacheEvents, KvLayout, PageBooks
from services.values.load import RankLoad
from services.values.rank import Plan, RankAddress, Rendezvous
from services.values.request import GenerationRequest, Output, PrefillResult
from services.wire.isthmus.v1.handshake_pb2_grpc import HandshakeServicer


class RemotePrefill(Protocol):
    """The prefill leg, handed in by the service; the engine decides when to call it.

    It takes a Rendezvous, never a ticket: some engines know decode_prefix_len only inside their
    scheduler, after both legs are in flight.
    """

    @property
    def peer(self) -> RankAddress:
        """The prefill rank that the router chose."""

    async def __call__(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        """Run the prefill leg.

        Raises:
            PeerFailed: the rank is gone, restarted or refused; another one may do.
            NoCapacity: the rank has no room.
        """


class Engine(Protocol):
    """What both roles have in common."""

    @property
    def layout(self) -> KvLayout:
        """Of the KV pool. Two ranks exchange KV where kv/ticket.py finds no difference; TP degrees may."""

    @property
    def max_context_tokens(self) -> int:
        """Prompt and output together never exceed it; on prefill, the prompt. The model's context, or what
        the pool holds where that is less."""

    @property
    def model_context_tokens(self) -> int:
        """The model's context, whatever the pool."""

    async def start(self) -> None:
        """Load the model and start the engine's thread. Raises ConfigError with the reason, or Unavailable
        where another start may do."""

    async def stop(self) -> None:
        """End every request with Unavailable and stop the thread; returns when it has. May be repeated."""

    async def crashed(self) -> bool:
        """Returns when the engine can never work again; the process should end and be restarted.

        True: within seconds, for a thread of it hangs, and may write to other ranks when it goes on.
        """

    def load(self) -> RankLoad:
        """A snapshot; cheap, never blocks."""

    def metrics(self) -> Iterable[Metric]:
        """What libraries of the engine's count themselves, by names of theirs. Called by any thread, once it
        has started; may block for seconds."""

    @property
    def tells_resume_points(self) -> bool:
        """Whether `cache_events` say which blocks are resumable, where the layout carries tails or states."""

    @property
    def takes_turns(self) -> bool:
        """Whether a tenant that asks for little does not wait behind another's crowd."""

    async def cache_events(self) -> AsyncIterator[CacheEvents]:
        """What the radix tree gained and lost, from the first page on. One consumer."""
        yield CacheEvents()

    async def books(self) -> PageBooks:
        """Walk every page and say where it is.

        Raises:
            AssertionError: a page is in two places, or in none, or a lock count is wrong.
        """


class DecodeEngine(Engine, Protocol):
    @property
    def plans(self) -> frozenset[Plan]:
        """What `generate` can be asked for; the router chooses no other."""

    @property
    def moves_penalties(self) -> bool:
        """Whether penalties count over `output_ids_so_far` too."""

    def generate(
        self,
        request: GenerationRequest,
        remote_prefill: RemotePrefill | None,
        tell: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate after `request.all_ids`; `remote_prefill` is given under plan remote.

        A token of which there is nothing else to tell may be told by `tell` instead of being yielded, in its
        place among the others: nobody who waits for the next output is woken for it.
        The first output carries `admitted`; the last one `finished`: LENGTH also where the pool holds no
        more, though the request would go on. Closing early aborts.

        Raises:
            InvalidRequest: the ids can never fit or are out of the vocabulary.
            NoCapacity: the pool is too small for the request for good.
            PeerFailed: the prefill leg failed; nothing was yielded, so a retry is invisible.
            Unavailable: the engine failed, or it does not move penalties and the request has such, and output
                so far.
        """


class PrefillEngine(Engine, Protocol):
    def handshake(self) -> HandshakeServicer:
        """What the service serves at its endpoint beside Prefill, once the engine has been started."""

    async def prefill(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        """Compute `request.all_ids`, write the delta where the room's ticket says, choose a token.

        Cancelling the call stops the writes.

        Raises:
            InvalidRequest, NoCapacity: as for generate.
            PeerFailed: no ticket came, the ticket was refused, or a write failed.
            Aborted: the decode rank gave the transfer up; nobody awaits the answer.
        """
