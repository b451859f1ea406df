"""Pods as processes: a network namespace each, joined by a bridge, with a cluster's names for each other.

Needs root and iproute2. What is not here: images, volumes, a kubelet, policies.
"""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

_SUBNET = "10.213.77"


class PodNetwork:
    """`with PodNetwork({"decode": ["isthmus-decode-0.isthmus-decode.llm.svc"], ...}) as network`."""

    def __init__(self, names: dict[str, list[str]]) -> None:
        self._mark = f"i{os.getpid() % 100_000}"
        self._addresses = {pod: f"{_SUBNET}.{number}" for number, pod in enumerate(names, start=2)}
        lines = [f"{self._addresses[pod]} {name}" for pod, of_pod in names.items() for name in of_pod]
        self._hosts = "\n".join(["127.0.0.1 localhost", *lines]) + "\n"
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "PodNetwork":
        with contextlib.ExitStack() as stack:
            bridge = f"{self._mark}br"
            _ip("link", "add", bridge, "type", "bridge")
            stack.callback(_ip, "link", "del", bridge)
            _ip("link", "set", bridge, "up")
            for number, (pod, address) in enumerate(self._addresses.items()):
                self._add(stack, pod, address, f"{self._mark}v{number}", bridge)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def command(self, pod: str, command: Sequence[str | Path]) -> list[str | Path]:
        """The command, run where the pod is."""
        return ["ip", "netns", "exec", self._namespace(pod), *command]

    def _namespace(self, pod: str) -> str:
        return f"{self._mark}-{pod}"

    def _add(self, stack: contextlib.ExitStack, pod: str, address: str, link: str, bridge: str) -> None:
        namespace = self._namespace(pod)
        hosts = Path("/etc/netns") / namespace / "hosts"  # ip-netns(8): bound over /etc/hosts
        hosts.parent.mkdir(parents=True)
        stack.callback(hosts.parent.rmdir)
        hosts.write_text(self._hosts)
        stack.callback(hosts.unlink)
        _ip("netns", "add", namespace)
        stack.callback(_ip, "netns", "del", namespace)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    """Raises OSError or CalledProcessError where this is not allowed."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
