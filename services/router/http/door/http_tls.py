"""TLS of the HTTP front."""

import ssl
from collections.abc import Callable
from typing import Any, Self

from services.net.certificates import Pem
from services.net.tls import TlsConfig


class HttpTls(ssl.SSLContext):
    """What asyncio is given for a listener: each new connection is under the files as they are then.

    Contexts that are loaded anew would keep the authorities that they had: so a changed file makes another.
    """

    _of_files: Callable[[], ssl.SSLContext]

    def __new__(cls, tls: TlsConfig) -> Self:
        """Raises ConfigError when the files cannot be used."""
        made = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        made._of_files = _contexts(tls)
        made._of_files()
        return made

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._of_files().wrap_bio(*args, **kwargs)


def _contexts(tls: TlsConfig) -> Callable[[], ssl.SSLContext]:
    """A function that returns the context for the files as they are."""
    held: tuple[Pem, ssl.SSLContext] | None = None

    def current() -> ssl.SSLContext:
        nonlocal held
        pem = tls.certificates.look()
        if held is None or held[0] is not pem:
            held = pem, pem.server_context(tls.mutual)
        return held[1]

    return current
