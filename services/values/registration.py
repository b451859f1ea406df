"""A rank says this of itself for as long as it lives."""

from dataclasses import dataclass

from services.values.kv import KvLayout
from services.values.rank import RankAddress, RankId, Role

# A decode rank with this capability has an engine that computes no prompts: plan local does not work there.
REMOTE_ONLY = "remote-only"
# A decode rank with this one has an engine that counts penalties over its own output alone: a request that
# has penalties and output from elsewhere cannot go on there.
NO_MOVED_PENALTIES = "no-moved-penalties"
# A rank of either role with this one keeps no radix cache: no request will find there what an earlier one
# computed.
NO_CACHE = "no-cache"
# A rank of either role with this one has a layout with tails or states, and an engine that does not tell
# where it keeps them: wherever it holds a prefix counts as resumable, until its answers say otherwise.
NO_RESUME_POINTS = "no-resume-points"
# A rank of either role with this one has an engine that lets no tenants take turns: who asks for little
# beside another's crowd waits for the crowd.
NO_TENANT_TURNS = "no-tenant-turns"


@dataclass(frozen=True, slots=True)
class Registration:
    role: Role
    address: RankAddress
    layout: KvLayout
    model: str
    max_context_tokens: int  # The rank can hold so many, prompt and output together; on prefill, the prompt.
    total_pages: int
    engine: str
    model_path: str = ""
    capabilities: tuple[str, ...] = ()
    draining: bool = False  # It takes no new requests: it is being stopped, or an operator wants it so.
    model_context_tokens: int = 0  # This holds whatever its pool holds of it; 0 says that it is not told.

    @property
    def id(self) -> RankId:
        return self.address.id

    @property
    def tells_resume_points(self) -> bool:
        """Return whether the rank reports where it can go on. One that does not can, as far as is known,
        wherever it holds."""
        return bool(self.layout.carried) and NO_RESUME_POINTS not in self.capabilities
