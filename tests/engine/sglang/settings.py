"""Settings of one SGLang, for tests that change what they are about."""

from services.engine.paged.core import Limits
from services.engine.sglang.service.settings import SglangSettings
from services.values.rank import Role


def sglang_settings(model, **changes):
    fields = dict(
        engine="sglang",
        role=Role.DECODE,
        worker="w",
        model_path=str(model),
        model_name="m",
        dp_size=1,
        device="cpu",
        dtype=None,
        num_pages=512,
        page_size=16,
        index_block=16,
        cache_enabled=True,
        transport="nixl",
        limits=Limits(max_running_requests=8, chunk_size=64),
        num_threads=1,
    )
    return SglangSettings(**{**fields, **changes})
