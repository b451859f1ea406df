"""Settings of one SGLang, for tests that change what they are about."""

from services.engine.engine_config import EngineConfig
from services.engine.sglang.service.sglang_settings import SglangSettings
from services.values.rank import Role


def sglang_settings(model, role=Role.DECODE, worker="w", **changes):
    fields = dict(
        engine="sglang",
        model=str(model),
        model_name="m",
        kv_pages=512,
        page_size=16,
        index_block=16,
        max_running_requests=8,
        chunk_size=64,
        num_threads=1,
    )
    return SglangSettings(EngineConfig(**{**fields, **changes}), role, worker)
