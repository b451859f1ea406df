"""This is the boundary between services and engines.

An engine owns its KV, its batches and its KV transport; a service owns the RPC, the deadline and the choice
of peer. Seen from a service, a decode request is one iterator:

    async with aclosing(engine.generate(request, remote_prefill)) as outputs:
        async for output in outputs: ...

Closing the iterator gives every page back, whatever ended it: success, error, cancel, deadline.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Protocol

from prometheus_client.core import Metric

from services.kv.hand_over import IdlePrefix
from services.values.adapter import Adapter
from services.values.kv import CacheEvents, KvLayout, PageBooks
from services.values.rank import Plan, RankAddress, Rendezvous, TakenOver, TakeOver
from services.values.rank_reports import RankLoad
from services.values.request import GenerationRequest, Output, PrefillResult
from services.wire.isthmus.v1.handshake_pb2_grpc import HandshakeServicer


class RemotePrefill(Protocol):
    """The service hands in the prefill leg; the engine decides when to call it.

    It takes a Rendezvous, never a ticket: some engines know decode_prefix_len only inside their scheduler,
    after both legs are in flight.
    """

    @property
    def peer(self) -> RankAddress:
        """Return the address of the prefill rank that the router chose."""

    async def __call__(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        """Run the prefill leg of `request`, and return what it reports.

        Args:
            request: what the decode rank was asked for.
            rendezvous: the transfer, and the two ranks that meet in it.

        Raises:
            PeerFailed: the rank is gone, restarted or refused; another one may do.
            NoCapacity: the rank has no room.
        """


class HandsOver(Protocol):
    """An engine whose ranks lend and pull hands over what it has cached, and takes over from others."""

    async def take_over(self, asked: TakeOver) -> TakenOver:
        """Pull a prefix from a rank that leaves, and keep it; cancelling the call gives it up.

        Raises Unavailable when it is being stopped.
        """

    async def idle_prefixes(self) -> list[IdlePrefix]:
        """Return what is cached and not in use."""

    async def spell(self, prefix: IdlePrefix) -> tuple[int, ...] | None:
        """Return the prefix's ids; None where it is not here any more, or in use."""

    async def keep(self, within_s: float) -> None:
        """Have the first tier in files, if there is one, store what is cached and what tiers in memory hold.

        A later life finds it there.

        Return once that is done, or after so long, also when the engine has ended.
        """


class Adapters(Protocol):
    """An engine computes the model with LoRA adapters, too, for requests that name one.

    Nobody cancels `load` and `unload`, which would leave an adapter half loaded.
    """

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """Return those that requests may name; another one raises Unavailable."""

    async def load(self, name: str, directory: Path) -> Adapter:
        """Load what PEFT has saved there, if it is not loaded already.

        Raises:
            ConfigError: it is damaged, does not fit the model, or is of a kind that is not served.
            InvalidRequest: another one of that name is loaded.
            Unavailable: it cannot be read now.
        """

    async def unload(self, name: str) -> None:
        """Give it up once no running request needs it. Raises NotFound."""


class Engine(Protocol):
    """Engines of both roles have this in common."""

    @property
    def layout(self) -> KvLayout:
        """Return the KV pool's layout: known once the engine has started.

        Two ranks exchange KV where kv/ticket.py finds no difference between theirs; TP degrees may differ.
        """

    @property
    def max_context_tokens(self) -> int:
        """Return how many tokens prompt and output together never exceed; on prefill, the prompt.

        It is the model's context, or what the pool holds where that is less.
        """

    @property
    def model_context_tokens(self) -> int:
        """Return the model's context in tokens, whatever the pool holds."""

    async def start(self) -> None:
        """Load the model and start the engine's thread.

        Raises:
            ConfigError: it can never start so, with the reason.
            Unavailable: another start may do.
        """

    async def stop(self) -> None:
        """End every request with Unavailable and stop the thread; return when it has. It may be repeated.

        An engine with a successor leaves the thread to that.
        """

    def succeed(self, before: "Engine") -> None:
        """Begin with what `before`, an engine of the other role, has loaded and cached, once that has
        stopped. `start` raises Unavailable where it has failed."""

    async def crashed(self) -> bool:
        """Return when the engine can never work again; the process should end and be restarted.

        The answer is True where it should within seconds, for a thread of it hangs, and may write to other
        ranks when it goes on.
        """

    def load(self) -> RankLoad:
        """Return a snapshot of its load; this is cheap and never blocks."""

    def metrics(self) -> Iterable[Metric]:
        """Return what libraries of the engine's count themselves, by names of theirs.

        Any thread may call it, once the engine has started; it may block for seconds.
        """

    @property
    def reports_checkpoints(self) -> bool:
        """Return whether `cache_events` say which blocks are resumable, where the layout has windows or
        states."""

    @property
    def lends(self) -> bool:
        """Return whether it writes what it holds of a prompt to ranks that ask (PullRequest)."""

    @property
    def pulls(self) -> bool:
        """Return whether it asks the source that a request names before it computes the prompt."""

    @property
    def hands_over(self) -> HandsOver | None:
        """Return what hands over what it has cached; None where it does not lend and pull."""

    @property
    def adapters(self) -> Adapters | None:
        """Return its adapters; None where the engine serves none."""

    @property
    def takes_turns(self) -> bool:
        """Return whether a tenant that asks for little does not wait behind another's crowd."""

    async def cache_events(self) -> AsyncIterator[CacheEvents]:
        """Yield what the radix tree gained and lost, from the first page on, to one consumer."""
        yield CacheEvents()

    @property
    def has_tiers(self) -> bool:
        """Return whether it keeps KV below its pool. Known once it has started."""

    @property
    def shared_files(self) -> str:
        """Return what names the directory whose files it reads, other ranks' too; empty where it reads none.
        Known once it has started."""

    async def below_events(self) -> AsyncIterator[CacheEvents]:
        """Yield likewise what its tiers gained and lost; nothing where it has none."""
        yield CacheEvents()

    async def books(self) -> PageBooks:
        """Walk every page and return how many are where.

        Raises:
            AssertionError: a page is in two places, or in none, or a lock count is wrong.
        """


class DecodeEngine(Engine, Protocol):
    def handshake(self) -> HandshakeServicer | None:
        """Return what the service serves at its endpoint beside Decode, once the engine has been started.

        It is None where the engine writes to nobody.
        """

    @property
    def plans(self) -> frozenset[Plan]:
        """Return the plans that `generate` can be asked for; the router chooses no other."""

    @property
    def moves_penalties(self) -> bool:
        """Return whether penalties count over `output_ids_so_far` too."""

    def generate(
        self,
        request: GenerationRequest,
        remote_prefill: RemotePrefill | None,
        tell: Callable[[int], None] | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate after `request.all_ids`; `remote_prefill` is given under plan remote.

        A token of which there is nothing else to report may be passed to `tell` instead of being yielded, in
        its place among the others: nobody who waits for the next output is woken for it. The first output
        carries `admitted`; the last one `finished`: LENGTH also where the pool holds no more, though the
        request would go on. Closing early aborts.

        Raises:
            InvalidRequest: the ids can never fit or are out of the vocabulary.
            NoCapacity: the pool is too small for the request for good.
            PeerFailed: the prefill leg failed; nothing was yielded, so a retry is invisible.
            Unavailable: the engine failed, or it does not move penalties and the request has such, and output
                so far.
        """


class PrefillEngine(Engine, Protocol):
    def handshake(self) -> HandshakeServicer:
        """Return what the service serves at its endpoint beside Prefill, once the engine has been started."""

    async def prefill(self, request: GenerationRequest, rendezvous: Rendezvous) -> PrefillResult:
        """Compute `request.all_ids`, write the delta where the transfer's ticket says, and return the chosen
        token.

        Cancelling the call stops the writes.

        Raises:
            InvalidRequest, NoCapacity: as for generate.
            PeerFailed: no ticket came, the ticket was refused, or a write failed.
            Aborted: the decode rank gave the transfer up; nobody awaits the answer.
        """
