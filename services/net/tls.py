"""Our gRPC servers and channels run TLS under files that may change while they run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from services.net.certificates import Certificates, Pem, certificates_of
from services.net.reloading_channel import ReloadingChannel
from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """These are PEM files. With `mutual` each side shows its certificate and checks the other's against `ca`.

    `server_name` is what a server's certificate must carry; "" stands for the host in the endpoint. Ranks
    that are reached at addresses which no certificate can foresee (a pod's) share a name. `peer_name` is what
    a client's certificate must carry, where a server asks for one; with "" any of the CA's will do.
    `client_ca` vouches for further clients of a server, and for no server.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    mutual: bool = False
    server_name: str = ""
    peer_name: str = ""
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("TLS needs both a certificate and its key, or neither")
        if self.mutual and (self.ca is None or self.cert is None):
            raise ConfigError("mutual TLS needs a CA, a certificate and its key")
        if (self.client_ca or self.peer_name) and not self.mutual:
            raise ConfigError("what clients' certificates must be is for mutual TLS, which asks for them")

    @property
    def certificates(self) -> Certificates:
        return certificates_of(self.ca, self.cert, self.key, self.client_ca)

    def for_server(self) -> grpc.ServerCredentials:
        """Make credentials by which each new connection is under the files as they are then. Raises
        ConfigError.
        """
        if self.cert is None:
            raise ConfigError("a TLS server needs a certificate and its key")
        certificates = self.certificates
        shown = certificates.look()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return None to go on with what it has; a thread of gRPC's calls this at each handshake."""
            nonlocal shown
            if (pem := certificates.look()) is shown:
                return None
            shown = pem
            return self._server_configuration(pem)

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(shown), changed, require_client_authentication=self.mutual
        )

    def _server_configuration(self, pem: Pem) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(pem.key, pem.cert)], pem.client_authorities if self.mutual else None
        )

    def for_channel(self, pem: Pem) -> grpc.ChannelCredentials:
        """Make credentials that trust the system's own authorities where there is no CA."""
        key, cert = (pem.key, pem.cert) if self.mutual else (None, None)
        return grpc.ssl_channel_credentials(pem.ca, key, cert)

    def open_channel(self, endpoint: str, options: Sequence[tuple[str, int | str]]) -> grpc.aio.Channel:
        """Open a channel that connects under the files as they are whenever it does. Raises ConfigError."""
        if self.server_name:
            options = [*options, ("grpc.ssl_target_name_override", self.server_name)]

        def connect(pem: Pem) -> grpc.aio.Channel:
            return grpc.aio.secure_channel(endpoint, self.for_channel(pem), options=options)

        return ReloadingChannel(self.certificates, connect)
