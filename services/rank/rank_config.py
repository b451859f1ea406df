from dataclasses import dataclass, fields

from services.engine.engine_config import EngineConfig
from services.host.ports import check_port, is_wildcard
from services.index.keys import NAME, NAME_FORM
from services.settings.flags import Bounds, setting
from services.values.errors import ConfigError

DEFAULT_HAND_OVER_S = 10.0
_NOT_SGLANG = (
    "itl_target_ms",
    "shorter_first",
    "protected_cache_share",
    "write_lease_s",
    "fence_margin_s",
    "kv_digest_share",
    "kv_tier",
    "pull",
    "hand_over_s",
    "move_running",
    "step_limit_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig(EngineConfig):
    worker: str = setting(
        help="name of this worker, unique in the cluster", bounds=Bounds(pattern=NAME, form=NAME_FORM)
    )
    port: int = setting(0, "gRPC port of rank 0, the others follow; 0: free ones")
    restart_timeout_s: float | None = setting(
        None,
        "seconds in which a rank that had started must be up again, or /live fails; default: no limit",
        bounds=Bounds(above=0),
    )
    lease_ttl_s: int = setting(
        10, "TTL of the rank's etcd lease; without it the rank counts as suspect", bounds=Bounds(at_least=1)
    )
    hand_over_s: float = setting(
        DEFAULT_HAND_OVER_S,
        "seconds in which other ranks may take over what this one has cached, when it is drained or, on top "
        "of --grace-s, stopped; 0: none are asked",
        bounds=Bounds(at_least=0),
    )
    move_running: bool = setting(
        False,
        "decode ranks: when one is drained or stopped, its requests go on at another, which pulls their KV",
    )
    index_flush_ms: float = setting(
        50.0, "least time between two writes of a rank's index to etcd", bounds=Bounds(at_least=0)
    )
    index_writes_per_s: float = setting(
        2000.0,
        "budget of index writes for all ranks together; each flushes less often to keep to its share",
        bounds=Bounds(above=0),
    )

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        num_ports = self.dp_size if self.rank_index is None else 1
        check_port("--port", self.port, num_ports)
        check_port("--metrics-port", self.metrics_port, num_ports)
        if is_wildcard(self.reached_at):
            raise ConfigError(
                f"--host={self.host} is every address of this machine: --advertise-host must name the one "
                "that others reach"
            )
        if self.engine != "fake" and not self.model:
            raise ConfigError(f"--model is required with --engine={self.engine}")
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
        for field in fields(self):
            if field.name in _NOT_SGLANG and getattr(self, field.name) != field.default:
                raise ConfigError(f"--{field.name.replace('_', '-')} is not for --engine=sglang")

    def check_role_changes(self) -> None:
        """Raise ConfigError unless its ranks can go on in their other role."""
        if self.engine == "sglang":
            raise ConfigError("a rank of engine sglang keeps its role: SGLang's processes start with one")
        if self.decode_cache != self.prefill_cache:
            raise ConfigError("a rank keeps its role where --decode-cache and --prefill-cache differ")

    @property
    def leaving_s(self) -> float:
        """Return the seconds in which requests may end, and others may take over what is cached."""
        return self.grace_s + self.hand_over_s

    @property
    def ranks_per_process(self) -> int:
        return self.dp_size if self.engine == "sglang" else 1
