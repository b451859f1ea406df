"""What an engine of either role is built with."""

from dataclasses import dataclass, field

from services.engine.paged.core import Limits
from services.engine.paged.decode import WriteLease
from services.transfer.nixl_settings import NixlSettings
from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Of one rank, or of all in its process."""

    engine: str  # torch, fake or sglang
    model_path: str
    model_name: str
    device: str
    dtype: str | None
    num_threads: int | None
    num_pages: int
    page_size: int
    index_block: int
    cache_enabled: bool
    transport: str
    limits: Limits
    lease: WriteLease = field(default_factory=WriteLease)
    nixl: NixlSettings = field(default_factory=NixlSettings)
    protected_cache_share: float = 0.3
    digest_share: float = 0.0
    fake_step_s: float = 0.0
    fake_prompt_token_s: float = 0.0
    # Of an engine that listens itself:
    engine_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    advertise_host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.index_block % self.page_size != 0:
            raise ConfigError(
                f"--index-block {self.index_block} must be a multiple of --page-size {self.page_size}"
            )
