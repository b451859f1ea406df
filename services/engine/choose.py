"""This is the one place that imports an engine's libraries, and only when it is chosen."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from services.engine.base import DecodeEngine, PrefillEngine
from services.engine.engine_config import EngineConfig
from services.engine.paged.drafters import Speculation
from services.engine.paged.model_runner import ModelRunner
from services.engine.paged.shell.decode_engine import PagedDecodeEngine
from services.engine.paged.shell.paged_engine import CacheSettings
from services.engine.paged.shell.prefill_engine import PagedPrefillEngine
from services.net.channels import open_channel
from services.settings.named_models import gguf_weights_of
from services.transfer.open_transport import open_transport
from services.transfer.transport import Transport
from services.values.errors import ConfigError
from services.values.rank import RankId, Role

if TYPE_CHECKING:
    from services.engine.sglang.service.nodes import Follower
    from services.engine.sglang.service.sglang_settings import SglangSettings
    from services.engine.sglang.service.worker import SglangWorker

E = TypeVar("E", PagedDecodeEngine, PagedPrefillEngine)


def decode_engines(settings: EngineConfig, own_ids: Sequence[RankId]) -> Sequence[DecodeEngine]:
    if settings.engine != "sglang":
        return [decode_engine(settings, own_id) for own_id in own_ids]
    worker = _sglang_worker(settings, Role.DECODE, own_ids)
    from services.engine.sglang.service.sglang_engines import SglangDecodeEngine

    return [SglangDecodeEngine(worker, own_id) for own_id in own_ids]


def prefill_engines(settings: EngineConfig, own_ids: Sequence[RankId]) -> Sequence[PrefillEngine]:
    if settings.engine != "sglang":
        return [prefill_engine(settings, own_id) for own_id in own_ids]
    worker = _sglang_worker(settings, Role.PREFILL, own_ids)
    from services.engine.sglang.service.sglang_engines import SglangPrefillEngine

    return [SglangPrefillEngine(worker, own_id) for own_id in own_ids]


def decode_engine(settings: EngineConfig, own_id: RankId) -> PagedDecodeEngine:
    """Return the decode engine that the settings name, not started. Raises ConfigError."""
    return _paged(PagedDecodeEngine, settings, Role.DECODE, own_id)


def prefill_engine(settings: EngineConfig, own_id: RankId) -> PagedPrefillEngine:
    """Return the prefill engine that the settings name, not started. Raises ConfigError."""
    return _paged(PagedPrefillEngine, settings, Role.PREFILL, own_id)


def _paged(kind: type[E], settings: EngineConfig, role: Role, own_id: RankId) -> E:
    pulls = settings.pulls(role)
    return kind(
        _runner_factory(settings, role),
        own_id,
        limits=settings.limits(role),
        cache=_cache(settings, role, own_id),
        lease=settings.lease,
        open_writer=partial(_open_writer, settings) if pulls or role is Role.PREFILL else None,
        open_listener=partial(_open_listener, settings) if pulls or role is Role.DECODE else None,
        pulls=pulls,
        digest_share=settings.kv_digest_share,
        speculation=settings.speculates if role is Role.DECODE else Speculation(),
        model_directory=settings.model_directory,
        open_channel=partial(open_channel, tls=settings.tls()),
    )


def _cache(settings: EngineConfig, role: Role, own_id: RankId) -> CacheSettings:
    cache = settings.cache(role)
    return replace(cache, tiers=replace(cache.tiers, rank=f"{own_id.worker}.{own_id.rank}"))


def _open_writer(settings: EngineConfig) -> Transport:
    """Return a transport for who writes. Over TCP one agent at both ends would take ten times as long."""
    return open_transport(settings.transport, replace(settings.nixl, writes=True))


def _open_listener(settings: EngineConfig) -> Transport:
    return open_transport(settings.transport, settings.nixl)


def check_checkpoint(engine: str, directory: Path) -> None:
    """Raise ConfigError, or Unavailable, when the checkpoint's files say that `engine` would refuse it."""
    if engine == "sglang":
        _require_safetensors(directory)
        from services.engine.sglang.service.model_shape import ModelShape

        ModelShape.read(str(directory))
    else:
        from services.engine.torch.checkpoint import open_checkpoint

        open_checkpoint(directory)


def _require_safetensors(directory: Path) -> None:
    if gguf_weights_of(directory) is not None:
        raise ConfigError(f"{directory} is of a GGUF file, which engine torch alone reads")


def _sglang_settings(settings: EngineConfig, role: Role, worker: str) -> "SglangSettings":
    if find_spec("sglang") is None or find_spec("sglang.srt") is None:
        raise ConfigError("--engine=sglang: SGLang is not installed in this environment")
    _require_safetensors(Path(settings.model))
    from services.engine.sglang.service.sglang_settings import SglangSettings

    return SglangSettings(settings, role, worker)


def _sglang_worker(settings: EngineConfig, role: Role, own_ids: Sequence[RankId]) -> "SglangWorker":
    worker = _sglang_settings(settings, role, own_ids[0].worker)
    from services.engine.sglang.service.worker import SglangWorker

    return SglangWorker(worker, {own_id.rank: own_id for own_id in own_ids})


def follower(settings: EngineConfig, module: str) -> "Follower | None":
    """Return what runs another node's part of a worker, or None where this process is a worker.

    `module` is `services.prefill` or `services.decode` with engine sglang, and does not matter otherwise.

    Raises ConfigError.
    """
    if settings.engine != "sglang":
        return None
    role = Role(module.removeprefix("services."))
    sglang = _sglang_settings(settings, role, worker="")  # The first node says its name.
    if sglang.nodes is None or sglang.nodes.rank == 0:
        return None
    from services.engine.sglang.service.nodes import Follower

    return Follower(sglang, sglang.nodes)


def _runner_factory(settings: EngineConfig, role: Role) -> Callable[[], ModelRunner]:
    if settings.engine == "torch":
        from services.engine.torch.draft import DraftModelSettings
        from services.engine.torch.runner import TorchRunner

        draft = DraftModelSettings(
            Path(settings.draft_model),
            every_chunk=role is Role.PREFILL,
            catch_up_tokens=settings.draft_catch_up_tokens,
            scratch_pages=settings.max_running_requests,
            self_check=settings.self_check == "on",
            kv_dtype=settings.kv_dtype,
            max_rows=settings.draft_graph_rows if role is Role.DECODE else 0,
        )
        return lambda: TorchRunner(
            settings.model,
            device=settings.rank_device,
            num_pages=settings.pool_pages,
            page_size=settings.page_size,
            dtype=settings.dtype,
            num_threads=settings.threads,
            sizes=settings.pool_sizes,
            index_block=settings.index_block,
            self_check=settings.self_check == "on",
            shares_weights=settings.share_weights == "on" and settings.device == "cpu",
            draft=draft if settings.draft_model else None,
            max_rows=settings.graph_rows if role is Role.DECODE else 0,
            max_prompt_tokens=settings.chunk_tokens,
            max_drafts=settings.most_drafts if role is Role.DECODE else 0,
            graph_mib=settings.graph_mib,
            weights="dequantized" if settings.weights == "dequantized" else None,
            kv_dtype=settings.kv_dtype,
            lora=settings.adapters,
        )
    if settings.engine == "fake":
        return _fake_factory(settings, role)
    raise ConfigError(f"--engine must be torch, fake or sglang, got {settings.engine!r}")


def _fake_factory(settings: EngineConfig, role: Role) -> Callable[[], ModelRunner]:
    from services.engine.fake import FakeRunner, FakeSpeed, parse_carried
    from services.engine.fake_draft import FakeDraftingRunner, parse_draft

    make_runner: Callable[..., ModelRunner] = FakeRunner
    if settings.fake_draft:
        every_chunk, most = role is Role.PREFILL, settings.draft_catch_up_tokens
        draft = parse_draft(settings.fake_draft, every_chunk=every_chunk, catch_up_tokens=most)
        make_runner = partial(FakeDraftingRunner, draft)
    carried, sizes = parse_carried(settings.fake_carried), settings.pool_sizes
    return lambda: make_runner(
        num_pages=settings.pool_pages,
        page_size=settings.page_size,
        speed=FakeSpeed(settings.fake_step_s, settings.fake_prompt_token_s),
        carried=carried,
        carried_units=[sizes.num_units(g, settings.page_size, settings.pool_pages) for g in carried],
        lora=settings.adapters,
    )
