"""`isthmus up` shows its steps at a terminal until all is ready, then the services' log in short lines.

Until then only what is wrong is shown of the log, and what no service of ours wrote.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TextIO

from services.cli.local.local_cluster import Shape
from services.cli.table import format_bytes
from services.observe.short_lines import LogLine, read_line

_QUIET = ("DEBUG", "INFO")
_STEP = 10  # These are columns.


@dataclass(slots=True)
class StartProgress:
    num_ranks: int
    color: bool
    stream: TextIO = field(default_factory=lambda: sys.stderr)
    _ready: set[str] = field(default_factory=set)
    _is_over: bool = False

    def step(self, name: str, what: str) -> None:
        head = f"{name:<{_STEP}}"
        print(
            f"\x1b[1m{head}\x1b[0m {what}" if self.color else f"{head} {what}", file=self.stream, flush=True
        )

    def line(self, child: str, text: str) -> None:
        line = read_line(text)
        if line is None:
            print(f"{child:<9}| {text}", file=self.stream, flush=True)
        elif self._is_over or line.level not in _QUIET:
            print(line.short(self.color), file=self.stream, flush=True)
        else:
            self._tell(line)

    def _tell(self, line: LogLine) -> None:
        fields = line.fields
        if line.event == "weights_loading":
            self.step("loading", f"{line.service}: {fields['done']} of {fields['of']} weights")
        if line.event == "kv_pool":
            size = format_bytes(int(fields["bytes_of_each"]))
            self.step("pool", f"{line.service}: {fields['pages']} pages of KV a rank, up to {size}")
        if line.event == "rank_ready":
            self._ready.add(fields["rank"])
            self.step("ready", f"{fields['rank']} ({len(self._ready)} of {self.num_ranks} ranks)")
        if line.event == "router_ready":
            self.step("ready", line.service)

    def over(self, addresses: Mapping[str, str]) -> None:
        self._is_over = True
        for what, address in addresses.items():
            self.step("", f"{what:<11} {address}")


def planned(shape: Shape) -> str:
    counts = {"router": shape.routers, "prefill rank": shape.prefill_ranks, "decode rank": shape.decode_ranks}
    parts = [f"{count} {what}{'s' * (count > 1)}" for what, count in counts.items() if count]
    return ", ".join(parts if shape.etcd else ["etcd", *parts])
