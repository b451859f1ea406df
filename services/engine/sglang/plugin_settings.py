"""Our service passes these settings to the plugin in SGLang's processes, in an environment variable."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from services.net.channels import TlsConfig
from services.transfer.nixl_settings import UCX, NixlSettings
from services.values.errors import ConfigError

VARIABLE = "ISTHMUS_SGLANG_PLUGIN"


@dataclass(frozen=True, slots=True)
class PluginSettings:
    worker: str
    generations: tuple[int, ...]  # The index is the DP rank.
    model_fingerprint: int
    num_kv_heads: int  # These are the whole model's.
    head_dim: int
    host: str  # The process listens on it.
    advertise_host: str
    reports_path: str  # This is the service's Unix socket.
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_mutual: bool = False
    tls_server_name: str = ""
    tls_peer_name: str = ""
    nixl_backend: str = UCX
    expects_rdma: bool = False
    # These belong to the draft's checkpoint, if it has one of its own, with all of its heads.
    draft_fingerprint: int = 0
    draft_kv_heads: int = 0  # 0 means as many as the model's.
    draft_head_dim: int = 0
    draft_is_latent: bool = False

    def nixl(self, writes: bool) -> NixlSettings:
        return NixlSettings(self.nixl_backend, {}, self.expects_rdma, writes)

    def tls(self) -> TlsConfig | None:
        if not (self.tls_ca or self.tls_cert):
            return None
        ca, cert, key = (Path(name) if name else None for name in (self.tls_ca, self.tls_cert, self.tls_key))
        return TlsConfig(ca, cert, key, self.tls_mutual, self.tls_server_name, self.tls_peer_name)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "PluginSettings":
        """Read the settings. Raises ConfigError outside of a process that our service started."""
        if VARIABLE not in environment:
            raise ConfigError(f"{VARIABLE} is not set: SGLang was not started by an Isthmus service")
        fields = json.loads(environment[VARIABLE])
        return cls(**{**fields, "generations": tuple(fields["generations"])})
