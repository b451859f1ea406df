"""`isthmus health` asks a service on this machine for its health; an image's HEALTHCHECK runs it."""

import http.client
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Literal

from services.host.ports import host_port
from services.settings.flags import load, setting

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Ask the --health-port of a router or worker; exit code 1 when the probe fails or nobody answers."""

    host: str = setting("127.0.0.1", "address of the service")
    port: int = setting(8080, "its --health-port")
    probe: Literal["startup", "ready", "live"] = setting("live", "what to ask")


def run(argv: list[str]) -> int:
    config = load(HealthConfig, argv, prog="isthmus health")
    url = f"http://{host_port(config.host, config.port)}/{config.probe}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            print(answer.read().decode(errors="replace").strip())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace").strip(), file=sys.stderr)
    # The URL is invalid, or no HTTP server answers there.
    except (OSError, http.client.HTTPException, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
    return 1
