"""A Hello is each side's first message on a Handshake stream. It says who we are and where our pools are."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.kv.ticket import check_layouts
from services.values.errors import ProtocolError
from services.values.kv import KvLayout, PoolMemory
from services.values.rank import RankId
from services.wire import convert
from services.wire.fields import finite
from services.wire.isthmus.v1 import handshake_pb2


@dataclass(frozen=True, slots=True)
class Hello:
    rank: RankId
    layout: KvLayout
    memory: PoolMemory
    transport: str
    agent_metadata: bytes
    # These are the pools of the layout's other groups, in the layout's order.
    carried_memory: tuple[PoolMemory, ...] = ()
    draft_memory: PoolMemory | None = None  # This is set if the layout has a draft.

    @classmethod
    def of(
        cls,
        rank: RankId,
        layout: KvLayout,
        memories: Sequence[PoolMemory],
        transport: str,
        agent_metadata: bytes,
    ) -> "Hello":
        """`memories` are by group, then the draft model's."""
        carried_end = 1 + len(layout.carried)
        draft = memories[carried_end] if layout.draft is not None else None
        memory, *carried = memories[:carried_end]
        return cls(rank, layout, memory, transport, agent_metadata, tuple(carried), draft)

    @property
    def memories(self) -> tuple[PoolMemory, ...]:
        draft = (self.draft_memory,) if self.draft_memory is not None else ()
        return (self.memory, *self.carried_memory, *draft)

    def memories_of(self, shared: KvLayout) -> tuple[PoolMemory, ...]:
        """Return the pools in use with a peer; `shared` comes from KvLayout.shared_with."""
        return self.memories[: len(shared.unit_bytes)]

    def message(self, monotonic_s: float) -> handshake_pb2.HandshakeMessage:
        """Return it as a message to be sent at once: `monotonic_s` is our clock now."""
        hello = handshake_pb2.Hello(
            version=self.layout.handshake_version,
            rank=convert.rank_id_to_proto(self.rank),
            layout=convert.layout_to_proto(self.layout),
            agent_metadata=self.agent_metadata,
            memory=convert.memory_to_proto(self.memory),
            transport=self.transport,
            monotonic_s=monotonic_s,
            carried_memory=[convert.memory_to_proto(memory) for memory in self.carried_memory],
            draft_memory=convert.memory_to_proto(self.draft_memory) if self.draft_memory else None,
        )
        return handshake_pb2.HandshakeMessage(hello=hello)


def read_hello(message: handshake_pb2.HandshakeMessage) -> tuple[Hello, float]:
    """Return the peer's Hello, and the time of the peer's clock when it was sent.

    Raises:
        ProtocolError: the message is not a Hello, is malformed, or its pools do not fit its layout.
    """
    if message.WhichOneof("message") != "hello":
        raise ProtocolError("the first message of a Handshake stream must be Hello")
    pb = message.hello
    hello = Hello(
        convert.rank_id_from_proto(pb.rank),
        convert.layout_from_proto(pb.layout, pb.version),
        convert.memory_from_proto(pb.memory),
        pb.transport,
        pb.agent_metadata,
        tuple(convert.memory_from_proto(memory) for memory in pb.carried_memory),
        convert.memory_from_proto(pb.draft_memory) if pb.HasField("draft_memory") else None,
    )
    if len(hello.carried_memory) != (due := len(hello.layout.carried)):
        raise ProtocolError(f"hello.carried_memory has {len(hello.carried_memory)} pools, its layout {due}")
    if (hello.draft_memory is None) != (hello.layout.draft is None):
        raise ProtocolError("hello has draft_memory or its layout a draft, but not both")
    return hello, finite("hello.monotonic_s", pb.monotonic_s)


def check_hello(own: Hello, peer: Hello) -> None:
    """Raise ProtocolError, with a whole sentence, unless KV may cross between the two."""
    if peer.transport != own.transport:
        raise ProtocolError(f"the transports differ: ours is {own.transport}, the peer's {peer.transport}")
    check_layouts(own.layout, peer.layout)
