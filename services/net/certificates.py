"""The TLS files of a process are read again when they have changed.

    look: as they were --> what was read last        (a stat of each file)
          changed, and they fit --> the new ones, a log line
          changed, and cannot be read, or the key is not the certificate's --> what was read last, a warning;
          looked at again each time: somebody may be writing them

Nothing watches the files: whoever needs them looks. That is a server at each new connection, a channel before
it connects again, a probe and a scrape. Connections that stand go on under what they began with.

Kubernetes swaps a symlink under all files of a Secret at once (not those mounted by subPath: these never
change). Whoever writes one file after the other is met in between: hence the check that a pair fits.
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
    """This is what the files held at one time. A pair is there whole, and fits; None stands for a file that
    is not used.
    """

    ca: bytes | None
    cert: bytes | None
    key: bytes | None
    client_ca: bytes | None = None  # This is an authority of further clients.

    @property
    def client_authorities(self) -> bytes | None:
        """These authorities vouch for a server's clients."""
        known = [pem for pem in (self.ca, self.client_ca) if pem is not None]
        return b"\n".join(known) if known else None

    def server_context(self, mutual: bool) -> ssl.SSLContext:
        """Make the context of a server that shows the certificate. Raises
        ConfigError if it cannot be used.
        """
        if self.cert is None or self.key is None:
            raise ConfigError("a TLS server needs a certificate and its key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            with _as_file(self.cert) as cert, _as_file(self.key) as key:
                context.load_cert_chain(
                    cert, key, password=""
                )  # An encrypted key is refused, not asked about.
            if mutual and (authorities := self.client_authorities) is not None:
                with _as_file(authorities) as ca:
                    context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ValueError) as error:  # SSLError is an OSError.
            raise ConfigError(str(error)) from error
        return context

    def validities(self) -> dict[str, Validity]:
        """Return when the certificates of each file ("cert", "ca" and "client_ca") begin and end.

        Of a chain the first certificate counts, which is the service's own; of authorities the one that ends
        last, for while they are being replaced both are there. Raises ConfigError.
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
    """Give a path to what stays in memory, for OpenSSL takes a pair from files only."""
    descriptor = os.memfd_create("pem")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class Certificates:
    """These are the files at some paths, which any thread may look at.

    Raises:
        ConfigError: The files cannot be used now.
    """

    def __init__(
        self, ca: Path | None, cert: Path | None, key: Path | None, client_ca: Path | None = None
    ) -> None:
        self._paths = (ca, cert, key, client_ca)
        self._lock = threading.Lock()
        self._stamp = self._stat()
        self._refused = ""  # This says what is the matter with the files, where an older pair goes on.
        self._take(self._read())

    def __repr__(self) -> str:
        return f"Certificates({self._name()}, ends={_day(self.ends)}, refused={self._refused!r})"

    @property
    def cert(self) -> Path | None:
        return self._paths[1]

    @property
    def ends(self) -> float:
        """Return when our own certificate ends, or the authority without one, in Unix time."""
        validity = self.validities.get("cert") or self.validities.get("ca")
        return float("inf") if validity is None else validity.not_after

    def look(self) -> Pem:
        """Return the files as they are now, or as they were when they could last be used."""
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
            if str(error) != self._refused:  # It is told once, however often it is looked at.
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
    """Return one object for all of a process that use these files: a change is read once, and told once."""
    return Certificates(ca, cert, key, client_ca)


def certificate_health(certificates: Certificates, clock: Callable[[], float] = time.time) -> Health:
    """Tell that we are not ready once our own certificate has ended: whoever connects anew is turned away.

    Files that cannot be used do not matter while what was read before is good.
    """
    if certificates.cert is None:
        return Health()
    certificates.look()
    if clock() <= certificates.ends:
        return Health()
    return Health(ready=f"the certificate {certificates.cert} ended at {_day(certificates.ends)}")


class CertificateCollector(Collector):
    """This collector names what the files are for in `uses`: "services", "etcd"."""

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
