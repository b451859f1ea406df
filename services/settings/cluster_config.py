"""This module has the settings that every service of a cluster shares."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.etcd.connection import EtcdSettings
from services.host.ports import check_port
from services.index.keys import NAME, NAME_FORM
from services.net.certificates import Certificates, certificate_health
from services.net.channels import TlsConfig
from services.process.health import Health
from services.settings.flags import Bounds, check_bounds, setting
from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """A router and a rank have these in common; each has a config of its own that extends it."""

    model_name: str = setting(
        "", "name the model is served under; default: that of --model, or its directory's"
    )
    cluster: str = setting(
        "default",
        "name of the cluster in etcd",
        bounds=Bounds(pattern=NAME, form=NAME_FORM),
    )
    etcd: tuple[str, ...] = setting((), "etcd endpoints, HOST:PORT,...")
    etcd_ca: Path | None = setting(None, "PEM of etcd's authority; turns TLS to etcd on")
    etcd_cert: Path | None = setting(None, "PEM of our certificate for etcd")
    etcd_key: Path | None = setting(None, "PEM of its key")
    etcd_user: str = setting(
        "", "etcd user; its role needs readwrite on the prefix /isthmus/CLUSTER/, no more"
    )
    etcd_password_file: Path | None = setting(None, "file that holds the etcd user's password")
    tls_ca: Path | None = setting(None, "PEM of the authority of the services' certificates")
    tls_cert: Path | None = setting(None, "PEM of this service's certificate; turns TLS on")
    tls_key: Path | None = setting(None, "PEM of its key")
    tls_mutual: bool = setting(False, "clients must show a certificate too")
    tls_server_name: str = setting(
        "", "name that every service's certificate carries; default: the host it is reached at"
    )
    host: str = setting("127.0.0.1", "address to listen on; :: is every one, IPv4's too")
    metrics_port: int = setting(0, "port of /metrics; 0: a free one")
    health_port: int | None = setting(
        None, "port of /startup, /ready and /live for probes, always plain HTTP; default: none"
    )
    index_block: int = setting(
        64, "tokens per block of the cluster's prefix index", bounds=Bounds(at_least=1)
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting("info", "least level that is logged")
    log_format: Literal["text", "json"] = setting(
        "text", "json: each line is a JSON object, those of libraries and child processes too"
    )
    otlp_endpoint: str | None = setting(None, "send OpenTelemetry spans to http://HOST:PORT")
    trace_sample_ratio: float = setting(
        1.0, "share of the traces that begin here that is recorded", bounds=Bounds(at_least=0, at_most=1)
    )
    grace_s: float = setting(
        30.0, "seconds that running requests get to finish after SIGTERM", bounds=Bounds(at_least=0)
    )

    def __post_init__(self) -> None:
        check_bounds(self)
        check_port("--metrics-port", self.metrics_port)
        check_port("--health-port", self.health_port)

    def etcd_settings(self) -> EtcdSettings:
        if self.etcd_ca is None and (self.etcd_cert or self.etcd_key):
            raise ConfigError("--etcd-cert and --etcd-key need --etcd-ca, which turns TLS to etcd on")
        tls = None
        if self.etcd_ca is not None:
            mutual = self.etcd_cert is not None
            tls = TlsConfig(self.etcd_ca, self.etcd_cert, self.etcd_key, mutual)
        if self.etcd_password_file is not None and not self.etcd_user:
            raise ConfigError("--etcd-password-file needs --etcd-user, whose password it is")
        password = ""
        if self.etcd_password_file is not None:
            try:
                password = self.etcd_password_file.read_text().strip()
            except OSError as error:
                raise ConfigError(f"--etcd-password-file: {error}") from error
        return EtcdSettings(self.etcd, tls, self.etcd_user, password)

    def tls(self) -> TlsConfig | None:
        if not (self.tls_ca or self.tls_cert or self.tls_key or self.tls_mutual or self.tls_server_name):
            return None
        return TlsConfig(self.tls_ca, self.tls_cert, self.tls_key, self.tls_mutual, self.tls_server_name)

    def certificates(self) -> dict[str, Certificates]:
        """Return the TLS files in use by purpose, "services" and "etcd". Raises ConfigError for bad files."""
        uses = {"services": self.tls(), "etcd": self.etcd_settings().tls}
        return {use: tls.certificates for use, tls in uses.items() if tls is not None}

    def tls_health(self) -> Health:
        tls = self.tls()
        return Health() if tls is None else certificate_health(tls.certificates)
