from dataclasses import dataclass, field

from services.net.tls import TlsConfig
from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """`endpoints` are HOST:PORT; a scheme in front is accepted when it agrees with `tls`.

    Raises ConfigError when they cannot work.
    """

    endpoints: tuple[str, ...]
    tls: TlsConfig | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = 5.0  # It bounds one call with all its attempts.
    attempt_timeout_s: float = 2.0  # It bounds one attempt at one endpoint.
    connect_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("at least one etcd endpoint is needed")
        targets = tuple(_target(endpoint, self.tls is not None) for endpoint in self.endpoints)
        object.__setattr__(self, "endpoints", targets)


def _target(endpoint: str, tls: bool) -> str:
    scheme, separator, rest = endpoint.strip().rpartition("://")
    if separator and scheme != ("https" if tls else "http"):
        wanted = "without a CA file for TLS" if not tls else "with a CA file for TLS"
        raise ConfigError(f"the etcd endpoint {endpoint!r} does not go {wanted}")
    host, _, port = rest.rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"an etcd endpoint is HOST:PORT, got {endpoint!r}")
    return f"{host}:{port}"
