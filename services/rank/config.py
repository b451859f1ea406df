"""Settings of prefill and decode workers and of their ranks."""

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from services.engine.paged.core import Limits
from services.engine.paged.decode import WriteLease
from services.engine.settings import EngineSettings
from services.host.ports import check_port, is_wildcard
from services.settings.cluster import ClusterConfig
from services.settings.flags import Bounds, setting
from services.transfer.nixl_settings import NixlSettings, parameters_of
from services.values.errors import ConfigError
from services.values.rank import Role

_NOT_SGLANG = (
    "itl_target_ms",
    "protected_cache_share",
    "write_lease_s",
    "fence_margin_s",
    "kv_digest_share",
    "step_limit_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig(ClusterConfig):
    """Settings of a prefill or decode worker and of its ranks."""

    model: str = setting("", "directory of the checkpoint")
    worker: str = setting(help="name of this worker, unique in the cluster")
    dp_size: int = setting(
        1, "number of DP ranks; a process each, but with engine sglang", bounds=Bounds(at_least=1)
    )
    rank_index: int | None = setting(
        None, "be this one rank instead of the supervisor of all", bounds=Bounds(at_least=0)
    )
    port: int = setting(0, "gRPC port of rank 0, the others follow; 0: free ones")
    advertise_host: str = setting("", "address that others reach us at; default: --host, if it is one")
    restart_timeout_s: float | None = setting(
        None,
        "seconds in which a rank that had started must be up again, or /live fails; default: no limit",
        bounds=Bounds(above=0),
    )
    engine: Literal["torch", "fake", "sglang"] = setting("torch", "what computes")
    engine_arg: tuple[str, ...] = setting(
        (),
        "engine sglang: a flag of its server, as it is",
        split=False,
        bounds=Bounds(pattern=r"--[a-z].*", form="one --flag or --flag=value of SGLang's"),
    )
    device: str = setting(
        "cpu",
        "cpu, cuda or cuda:N; with cuda, rank N of engine torch takes cuda:N",
        bounds=Bounds(pattern=r"cpu|cuda(:[0-9]+)?", form="cpu, cuda or cuda:N"),
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        None, "of weights and KV; default: the checkpoint's"
    )
    num_threads: int | None = setting(
        None, "CPU threads of a rank; default: cores / dp-size", bounds=Bounds(at_least=1)
    )
    kv_pages: int = setting(2048, "pages in a rank's KV pool", bounds=Bounds(at_least=1))
    page_size: int = setting(64, "tokens per page", bounds=Bounds(at_least=1))
    decode_cache: Literal["on", "off"] = setting("on", "keep a radix cache of prefixes (decode)")
    prefill_cache: Literal["on", "off"] = setting("on", "keep a radix cache of prefixes (prefill)")
    protected_cache_share: float = setting(
        0.3,
        "share of the pool kept for prefixes requested more than once",
        bounds=Bounds(at_least=0, at_most=1),
    )
    transport: Literal["nixl", "local"] = setting("nixl", "KV transport; local: same host only")
    nixl_backend: Literal["UCX", "LIBFABRIC", "MOONCAKE", "UCCL"] = setting(
        "UCX", "NIXL's plugin that moves KV, if NIXL has it; tried with UCX alone"
    )
    nixl_parameter: tuple[str, ...] = setting(
        (),
        "of that plugin, NAME=VALUE: ucx_devices=mlx5_0:1",
        split=False,
        bounds=Bounds(pattern=r"[A-Za-z_][A-Za-z0-9_]*=.+", form="NAME=VALUE"),
    )
    expect_kv_path: Literal["any", "rdma"] = setting(
        "any", "rdma: warn and alert where KV is transferred over TCP (prefill)"
    )
    chunk_size: int = setting(512, "prompt tokens computed per step", bounds=Bounds(at_least=1))
    max_running_requests: int = setting(64, "sequences in a batch", bounds=Bounds(at_least=1))
    itl_target_ms: float | None = setting(
        None,
        "target ITL: bounds batch and prompt chunks by measured step time (decode)",
        bounds=Bounds(above=0),
    )
    step_limit_s: float = setting(
        120.0,
        "seconds after which a hung step, or transport call (30 s at most), ends its rank; 0: never",
        bounds=Bounds(at_least=0),
    )
    write_lease_s: float = setting(
        10.0,
        "seconds that prefill may write KV without renewal of its lease (decode)",
        bounds=Bounds(above=0),
    )
    fence_margin_s: float = setting(
        5.0,
        "seconds after that lease before pages of a silent writer are reused (decode)",
        bounds=Bounds(at_least=0),
    )
    kv_digest_share: float = setting(
        0.01,
        "share of transfers whose pages are verified by digests of what prefill wrote (decode)",
        bounds=Bounds(at_least=0, at_most=1),
    )
    lease_ttl_s: int = setting(
        10, "TTL of the rank's etcd lease; without it the rank counts as suspect", bounds=Bounds(at_least=1)
    )
    index_flush_ms: float = setting(
        50.0, "least time between two writes of a rank's index to etcd", bounds=Bounds(at_least=0)
    )
    index_writes_per_s: float = setting(
        2000.0,
        "budget of index writes for all ranks together; each flushes less often to keep to its share",
        bounds=Bounds(above=0),
    )
    fake_step_s: float = setting(0.0, "engine fake: seconds per step", bounds=Bounds(at_least=0))
    fake_prompt_token_s: float = setting(
        0.0, "engine fake: seconds per prompt token", bounds=Bounds(at_least=0)
    )

    def __post_init__(self) -> None:
        ClusterConfig.__post_init__(self)
        num_ports = self.dp_size if self.rank_index is None else 1
        check_port("--port", self.port, num_ports)
        check_port("--metrics-port", self.metrics_port, num_ports)
        if is_wildcard(self.advertise_host or self.host):
            raise ConfigError(
                f"--host={self.host} is every address of this machine: --advertise-host must name the one "
                "that others reach"
            )
        if self.engine != "fake" and not self.model:
            raise ConfigError(f"--model is required with --engine={self.engine}")
        parameters_of(self.nixl_parameter)
        if self.transport != "nixl" and (self.nixl_parameter or self.nixl_backend != "UCX"):
            raise ConfigError(f"--nixl-backend and --nixl-parameter are not for --transport={self.transport}")
        if self.engine_arg and self.engine != "sglang":
            raise ConfigError("--engine-arg is for --engine=sglang")
        if self.engine == "torch" and self.dp_size > 1 and self.device.startswith("cuda:"):
            raise ConfigError(
                f"--device={self.device} is one GPU, and --dp-size={self.dp_size} ranks need one each: "
                "--device=cuda gives rank N cuda:N"
            )
        if self.engine == "sglang":
            self._check_sglang_knows()

    def _check_sglang_knows(self) -> None:
        """SGLang has its own way with what it caches and with the pages of a failed transfer."""
        for field in fields(self):
            if field.name in _NOT_SGLANG and getattr(self, field.name) != field.default:
                raise ConfigError(f"--{field.name.replace('_', '-')} is not for --engine=sglang")

    @property
    def ranks_per_process(self) -> int:
        """SGLang has all its DP ranks in one."""
        return self.dp_size if self.engine == "sglang" else 1

    @property
    def rank_device(self) -> str:
        """Where this rank computes. SGLang places its ranks itself."""
        if self.engine == "torch" and self.device == "cuda" and self.dp_size > 1:
            return f"cuda:{self.rank_index or 0}"
        return self.device

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.model).name or "fake"

    def engine_settings(self, role: Role) -> EngineSettings:
        """Raises ConfigError when the values do not go together."""
        cores = os.cpu_count() or 1
        cache = self.decode_cache if role is Role.DECODE else self.prefill_cache
        itl_target_ms = self.itl_target_ms if role is Role.DECODE else None
        return EngineSettings(
            engine=self.engine,
            model_path=self.model,
            model_name=self.served_name,
            device=self.rank_device,
            dtype=self.dtype,
            num_threads=self.num_threads or max(1, cores // self.dp_size),
            num_pages=self.kv_pages,
            page_size=self.page_size,
            index_block=self.index_block,
            cache_enabled=cache == "on",
            protected_cache_share=self.protected_cache_share,
            digest_share=self.kv_digest_share,
            transport=self.transport,
            nixl=NixlSettings(
                self.nixl_backend, parameters_of(self.nixl_parameter), self.expect_kv_path == "rdma"
            ),
            limits=Limits(
                self.max_running_requests,
                self.chunk_size,
                itl_target_s=itl_target_ms / 1e3 if itl_target_ms is not None else None,
                step_limit_s=self.step_limit_s,
            ),
            lease=WriteLease(self.write_lease_s, self.fence_margin_s),
            fake_step_s=self.fake_step_s,
            fake_prompt_token_s=self.fake_prompt_token_s,
            engine_args=self.engine_arg,
            host=self.host,
            advertise_host=self.advertise_host or self.host,
        )
