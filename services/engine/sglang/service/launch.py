"""SGLang is started alike on a worker's first node and on others: by these arguments, in this environment."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.sglang.plugin_settings import PluginSettings
from services.engine.sglang.reports import Incarnation
from services.engine.sglang.service.leftovers import RunFolder
from services.engine.sglang.service.model_shape import (
    RECURRENT_WARNING,
    WINDOW_MEMORY_WARNING,
    ModelShape,
    has_window_memory,
)
from services.engine.sglang.service.sglang_settings import KEEP_WHOLE, SglangSettings
from services.engine.torch.checkpoint import model_fingerprint

log = logging.getLogger(__name__)


class Launch:
    def __init__(self, settings: SglangSettings) -> None:
        """Read the checkpoint. Raises ConfigError."""
        self.settings = settings
        self.shape = ModelShape.read(settings.engine.model)
        self.fingerprint = model_fingerprint(Path(settings.engine.model))
        stated, context = self.shape.max_position_embeddings, self.shape.max_context_tokens
        self._stretched, self._allows_stretched = settings.stretching(stated, context)
        self.context_tokens = context if self._stretched else stated
        self._draft = settings.draft()

    def incarnation(self, generations: tuple[int, ...]) -> Incarnation:
        return Incarnation(self.settings.worker, list(generations), self.fingerprint)

    async def command(
        self, folder: RunFolder, port: int, incarnation: Incarnation, reports_path: str
    ) -> tuple[list[str], dict[str, str]]:
        """Return arguments and environment. Its HTTP server has `port`; it reports to `reports_path`."""
        environment = folder.environment(self.settings.environment(os.environ))
        environment |= self._allows_stretched
        environment |= self._plugin_settings(incarnation, reports_path).to_environment()
        arguments = [*self.settings.arguments(port), *self._stretched]
        return [*arguments, *await self.window_arguments(environment)], environment

    async def window_arguments(self, environment: Mapping[str, str]) -> list[str]:
        """Return flags that store windows' KV whole, unless others are requested; log SGLang's limits."""
        settings, shape = self.settings, self.shape
        if shape.is_recurrent:
            log.warning("sglang_recurrent said=%r", RECURRENT_WARNING)
        if not shape.is_windowed or settings.keeps_windows_whole:
            return []
        if not await has_window_memory(settings.engine.model, environment):
            return []
        if settings.keeps_window_memory:
            log.warning("sglang_window_memory said=%r", WINDOW_MEMORY_WARNING)
            return []
        log.info("sglang_windows_kept_whole flag=%s", KEEP_WHOLE)
        return [KEEP_WHOLE]

    def _plugin_settings(self, incarnation: Incarnation, reports_path: str) -> PluginSettings:
        engine, tls = self.settings.engine, self.settings.engine.tls()
        paths = ("", "", "") if tls is None else tuple(str(p or "") for p in (tls.ca, tls.cert, tls.key))
        return PluginSettings(
            worker=incarnation.worker,
            generations=tuple(incarnation.generations),
            model_fingerprint=self.fingerprint,
            num_kv_heads=self.shape.num_kv_heads,
            head_dim=self.shape.head_dim,
            host=engine.host,
            advertise_host=engine.reached_at,
            reports_path=reports_path,
            tls_ca=paths[0],
            tls_cert=paths[1],
            tls_key=paths[2],
            tls_mutual=tls is not None and tls.mutual,
            tls_server_name="" if tls is None else tls.server_name,
            tls_peer_name="" if tls is None else tls.peer_name,
            nixl_backend=engine.nixl.backend,
            expects_rdma=engine.nixl.expects_rdma,
            **self._draft_settings(),
        )

    def _draft_settings(self) -> dict[str, Any]:
        draft = self._draft
        if draft is None:  # If there is one, it is in the model's checkpoint.
            return {"draft_fingerprint": self.fingerprint}
        return {
            "draft_fingerprint": draft.fingerprint(),
            "draft_kv_heads": draft.num_kv_heads,
            "draft_head_dim": draft.head_dim,
            "draft_is_latent": draft.is_latent,
        }
