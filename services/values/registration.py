"""What a rank says of itself for as long as it lives. Pure."""

from dataclasses import dataclass

from services.values.kv import KvLayout
from services.values.rank import RankAddress, RankId, Role

# A capability of a decode rank whose engine computes no prompts: plan local does not work there.
REMOTE_ONLY = "remote-only"
# Of a decode rank whose engine counts penalties over its own output alone: a request that has penalties and
# output from elsewhere cannot go on there.
NO_MOVED_PENALTIES = "no-moved-penalties"
# Of a rank of either role that keeps no radix cache: no request will find there what an earlier one computed.
NO_CACHE = "no-cache"
# Of a rank of either role whose layout carries tails or states, and whose engine does not tell where it keeps
# them: wherever it holds a prefix counts as resumable, until its answers say otherwise.
NO_RESUME_POINTS = "no-resume-points"
# Of a rank of either role whose engine lets no tenants take turns: who asks for little beside another's crowd
# waits for the crowd.
NO_TENANT_TURNS = "no-tenant-turns"


@dataclass(frozen=True, slots=True)
class Registration:
    """What a rank says of itself for as long as its lease lives."""

    role: Role
    address: RankAddress
    layout: KvLayout
    model: str
    max_context_tokens: int  # that the rank can hold, prompt and output together; on prefill, the prompt
    total_pages: int
    engine: str
    model_path: str = ""
    capabilities: tuple[str, ...] = ()
    draining: bool = False  # takes no new requests: it is being stopped, or an operator wants it so
    model_context_tokens: int = 0  # whatever its pool holds of it; 0: not said

    @property
    def id(self) -> RankId:
        return self.address.id

    @property
    def tells_resume_points(self) -> bool:
        """Else it can go on computing wherever it holds, as far as is known."""
        return bool(self.layout.carried) and NO_RESUME_POINTS not in self.capabilities
