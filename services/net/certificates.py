"""The TLS files of a process are read again when they have changed.

    look: unchanged --> what was read last           (a stat of each file)
          changed, and they fit --> the new ones, a log line
          changed, and unreadable, or the key is not the certificate's --> what was read last, a warning;
          they are read again at each look: they may be half written

Nothing watches the files; their users look: a server at each new connection, a channel before it connects
again, a probe and a scrape. Open connections go on with what they began with.

Kubernetes swaps a symlink under all files of a Secret at once (not under those mounted by subPath, which
never change). Other writers may replace one file after another, and a look may come in between: therefore we
check that certificate and key fit.
"""

import os
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from logging import WARNING, getLogger
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.net.x509 import Validity, validities
from services.observe.log_lines import event
from services.process.health import Health
from services.values.errors import ConfigError

log = getLogger(__name__)

_Stamp = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Pem:
    """This is the content of the files at one time. A pair is complete and fits; None means no file."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    client_ca: bytes | None = None  # This authority vouches for further clients.

    @property
    def client_authorities(self) -> bytes | None:
        known = [pem for pem in (self.ca, self.client_ca) if pem is not None]
        return b"\n".join(known) if known else None

    def server_context(self, mutual: bool) -> ssl.SSLContext:
        if self.cert is None or self.key is None:
            raise ConfigError("a TLS server needs a certificate and its key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with _as_file(self.cert) as cert, _as_file(self.key) as key:
                # With a password OpenSSL refuses an encrypted key, and does not ask.
                context.load_cert_chain(cert, key, password="")
            if mutual and (authorities := self.client_authorities) is not None:
                with _as_file(authorities) as ca:
                    context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # SSLError is an OSError.
            raise ConfigError(str(error)) from error
        return context

    def validities(self) -> dict[str, Validity]:
        """Return when the certificates of each file ("cert", "ca" and "client_ca") begin and end.

        Of a chain the first certificate counts, which is the service's own. Of authorities the one that ends
        last counts, for during a replacement the file has both. Raises ConfigError.
        """
        found = {}
        if self.cert is not None:
            found["cert"] = _validities("the certificate", self.cert)[0]
        if self.ca is not None:
            found["ca"] = _latest("the authority", self.ca)
        if self.client_ca is not None:
            found["client_ca"] = _latest("the clients' authority", self.client_ca)
        return found


def _latest(what: str, pem: bytes) -> Validity:
    return max(_validities(what, pem), key=lambda validity: validity.not_after)


def _validities(what: str, pem: bytes) -> list[Validity]:
    try:
        found = validities(pem)
    except ValueError as error:
        raise ConfigError(f"{what}'s file: {error}") from error
    if not found:
        raise ConfigError(f"{what}'s file holds no certificate in PEM")
    return found


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("pem")  # OpenSSL loads a pair only from files.
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class Certificates:
    def __init__(
        self, ca: Path | None, cert: Path | None, key: Path | None, client_ca: Path | None = None
    ) -> None:
        self._paths = (ca, cert, key, client_ca)
        self._lock = threading.Lock()
        self._stamp = self._stat()
        self._refused = ""  # This is the problem with the files while an older pair is in use.
        self._take(self._read())

    def __repr__(self) -> str:
        return f"Certificates({self._name()}, ends={_day(self.ends)}, refused={self._refused!r})"

    @property
    def cert(self) -> Path | None:
        return self._paths[1]

    @property
    def ends(self) -> float:
        """Return when our own certificate (or without one, the authority) ends, in Unix time."""
        validity = self.validities.get("cert") or self.validities.get("ca")
        return float("inf") if validity is None else validity.not_after

    def look(self) -> Pem:
        """Return the files as they are now, or as they were when they were last usable."""
        with self._lock:
            stamp = self._stat()
            if stamp != self._stamp or self._refused:
                self._stamp = stamp
                self._reload()
            return self._pem

    def _reload(self) -> None:
        try:
            pem = self._read()
            if pem != self._pem:
                self._take(pem)
                event(log, "tls_files_reloaded", file=self._name(), ends=_day(self.ends))
            self._refused = ""
        except ConfigError as error:
            if str(error) != self._refused:  # A problem is logged once, however often we look.
                event(log, "tls_files_kept", WARNING, file=self._name(), ends=_day(self.ends), error=error)
            self._refused = str(error)

    def _take(self, pem: Pem) -> None:
        self.validities = pem.validities()
        self._pem = pem
        if self.ends < time.time():
            event(log, "tls_certificate_ended", WARNING, file=self._name(), ended=_day(self.ends))

    def _read(self) -> Pem:
        pem = Pem(*(_read(path) for path in self._paths))
        try:
            pem.validities()
            if pem.cert is not None:
                pem.server_context(mutual=True)
        except ConfigError as error:
            raise ConfigError(f"cannot use the TLS files {self._name()}: {error}") from error
        return pem

    def _stat(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._paths)

    def _name(self) -> str:
        return ", ".join(str(path) for path in self._paths if path is not None)


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the TLS file {path}: {error.strerror}") from error


def _stamp(path: Path | None) -> tuple[int, int, int] | None:
    try:
        status = None if path is None else path.stat()
    except OSError:
        return None
    return None if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _day(time_s: float) -> str:
    return "never" if time_s == float("inf") else datetime.fromtimestamp(time_s, UTC).isoformat()


@cache
def certificates_of(
    ca: Path | None, cert: Path | None, key: Path | None, client_ca: Path | None = None
) -> Certificates:
    """Return one object for all users of these files in a process: a change is read and logged once."""
    return Certificates(ca, cert, key, client_ca)


def certificate_health(certificates: Certificates, clock: Callable[[], float] = time.time) -> Health:
    """Report not ready after our own certificate has ended, since new connections are then refused.

    Unusable files do not matter while the ones that were read before are valid.
    """
    if certificates.cert is None:
        return Health()
    certificates.look()
    if clock() <= certificates.ends:
        return Health()
    return Health(ready=f"the certificate {certificates.cert} ended at {_day(certificates.ends)}")


class CertificateCollector(Collector):
    def __init__(self, uses: dict[str, Certificates]) -> None:
        self._uses = uses

    def collect(self) -> Iterator[Metric]:
        labels = ["use", "file"]
        begins = GaugeMetricFamily(
            "isthmus_tls_not_before_seconds",
            "When the certificate begins that is in use; Unix time.",
            labels=labels,
        )
        ends = GaugeMetricFamily(
            "isthmus_tls_not_after_seconds",
            "When the certificate ends that is in use; Unix time.",
            labels=labels,
        )
        for use, certificates in self._uses.items():
            certificates.look()
            for file, validity in certificates.validities.items():
                begins.add_metric([use, file], validity.not_before)
                ends.add_metric([use, file], validity.not_after)
        yield begins
        yield ends
