"""Only this module imports a transport's library, and only if that transport is chosen."""

import re

import services.transfer.ucx_log  # noqa: F401  # names in the environment, before there are threads
from services.transfer.nixl_settings import NixlSettings
from services.transfer.transport import Transport
from services.values.errors import ConfigError

_DEFAULTS = NixlSettings()
# nixl says this if the NIXL wheel for torch's CUDA is not installed.
_OTHER_CUDA = re.compile(r"detected CUDA (\d+) but (nixl-cu\d+) is not installed")


def _missing(said: str) -> str:
    if (match := _OTHER_CUDA.search(said)) is None:
        return ""
    cuda, package = match.groups()
    return (
        f": this torch is built for CUDA {cuda}, and nixl looks for the wheel of that. Install {package} of "
        "nixl's version, or a torch for the CUDA of the wheel that is there"
    )


def open_transport(name: str, nixl: NixlSettings = _DEFAULTS) -> Transport:
    """Return a transport with nothing registered. It must be called on the thread that will own it.

    Raises:
        ConfigError: the name is unknown, or the transport's library cannot be loaded here.
    """
    if name == "local":
        from services.transfer.local import LocalTransport

        return LocalTransport()
    if name == "nixl":
        try:
            from services.transfer.nixl import NixlTransport
        except ImportError as error:
            raise ConfigError(
                f"the nixl transport cannot be loaded: {error}{_missing(str(error))}"
            ) from error
        return NixlTransport(settings=nixl)
    raise ConfigError(f"the transport must be nixl or local, got {name!r}")
