"""Which transport: the one place that imports a transport's library, and only when it is chosen."""

import services.transfer.ucx_log  # noqa: F401  # names in the environment, before there are threads
from services.transfer.base import Transport
from services.transfer.nixl_settings import NixlSettings
from services.values.errors import ConfigError

_DEFAULTS = NixlSettings()


def open_transport(name: str, nixl: NixlSettings = _DEFAULTS) -> Transport:
    """A transport with nothing registered; to be called on the thread that will own it.

    Raises:
        ConfigError: the name is unknown, or its library cannot be loaded here.
    """
    if name == "local":
        from services.transfer.local import LocalTransport

        return LocalTransport()
    if name == "nixl":
        try:
            from services.transfer.nixl import NixlTransport
        except ImportError as error:
            raise ConfigError(f"the nixl transport cannot be loaded: {error}") from error
        return NixlTransport(settings=nixl)
    raise ConfigError(f"the transport must be nixl or local, got {name!r}")
