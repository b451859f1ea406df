"""Which engine: the one place that imports an engine's libraries, and only when it is chosen."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.engine.base import DecodeEngine
from services.engine.paged.core import Limits
from services.engine.paged.decode import Lease, PagedDecodeEngine
from services.engine.paged.engine import CacheSettings
from services.engine.paged.prefill import PagedPrefillEngine
from services.engine.paged.runner import ModelRunner
from services.errors import ConfigError
from services.kv.types import RankId
from services.rpc import TlsConfig, open_channel
from services.transfer.choose import open_transport


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What either role needs to build its engine."""

    engine: str  # torch or fake
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
    lease: Lease
    fake_step_s: float = 0.0
    fake_prompt_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.index_block % self.page_size != 0:
            raise ConfigError(
                f"--index-block {self.index_block} must be a multiple of --page-size {self.page_size}"
            )


def decode_engine(settings: EngineSettings, own_id: RankId, tls: TlsConfig | None = None) -> DecodeEngine:
    """The decode engine that the settings name, not started. Raises ConfigError."""
    return PagedDecodeEngine(
        _runner_factory(settings),
        lambda: open_transport(settings.transport),
        own_id,
        limits=settings.limits,
        cache=_cache(settings),
        lease=settings.lease,
        open_channel=partial(open_channel, tls=tls),
    )


def prefill_engine(settings: EngineSettings, own_id: RankId) -> PagedPrefillEngine:
    """The prefill engine that the settings name, not started. Raises ConfigError."""
    return PagedPrefillEngine(
        _runner_factory(settings),
        lambda: open_transport(settings.transport),
        own_id,
        limits=settings.limits,
        cache=_cache(settings),
    )


def _cache(settings: EngineSettings) -> CacheSettings:
    return CacheSettings(settings.model_name, settings.index_block, settings.cache_enabled)


def _runner_factory(settings: EngineSettings) -> Callable[[], ModelRunner]:
    if settings.engine == "torch":
        from services.engine.torch.runner import TorchRunner

        return lambda: TorchRunner(
            settings.model_path,
            device=settings.device,
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            dtype=settings.dtype,
            num_threads=settings.num_threads,
        )
    if settings.engine == "fake":
        from services.engine.fake import FakeRunner, FakeSpeed

        speed = FakeSpeed(settings.fake_step_s, settings.fake_prompt_token_s)
        return lambda: FakeRunner(num_pages=settings.num_pages, page_size=settings.page_size, speed=speed)
    raise ConfigError(f"--engine must be torch or fake, got {settings.engine!r}")
