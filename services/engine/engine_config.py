"""This module has those flags of a rank that its engine is built with; services/rank/rank_config.py adds the
rest.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from services.engine.paged.admitting import Limits
from services.engine.paged.drafters import Mode, Speculation
from services.engine.paged.shell.delta import WriteLease
from services.engine.paged.shell.paged_engine import CacheSettings
from services.engine.paged.shell.tiers import TIER_FORM, TierSettings, tier_places
from services.kv.tails import PoolSizes
from services.net.channels import TlsConfig
from services.settings.cluster_config import ClusterConfig
from services.settings.flags import Bounds, setting
from services.settings.named_models import MODEL_HELP
from services.transfer.nixl_settings import UCX, NixlSettings, check_parameters, parameters_of
from services.values.adapter import NAME_FORM
from services.values.errors import ConfigError
from services.values.rank import Role

_CATCH_UP_BY_TARGET = 64  # It counts tokens.
_MOST_GRAPH_ROWS = 512  # Above that a step computes longer than its host takes.
DEFAULT_KV_PAGES = 2048
LORA_BOUNDS = Bounds(pattern=f"{NAME_FORM}=.+", form="NAME=DIRECTORY")
TIER_BOUNDS = Bounds(pattern=TIER_FORM, form="memory:SIZE or /DIRECTORY:SIZE, SIZE in KiB, MiB, GiB or TiB")
_CHUNK_TOKENS, _GPU_CHUNK_TOKENS = 512, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ClusterConfig):
    """These settings are of one rank, or of all in its process. Raises ConfigError if they do not go
    together."""

    model: str = setting("", MODEL_HELP)
    dp_size: int = setting(
        1, "number of DP ranks; a process each, but with engine sglang", bounds=Bounds(at_least=1)
    )
    rank_index: int | None = setting(
        None, "be this one rank instead of the supervisor of all", bounds=Bounds(at_least=0)
    )
    tls_peer_name: str = setting(
        "",
        "with --tls-mutual, name that certificates of a rank's clients must carry (a DNS alternative name); "
        "default: --tls-server-name",
    )
    advertise_host: str = setting("", "address that others reach us at; default: --host, if it is one")
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
    kv_dtype: Literal["fp8_e4m3"] | None = setting(
        None, "engine torch: of KV, in half the memory of bfloat16 and a little less exact; default: --dtype"
    )
    weights: Literal["stored", "dequantized"] = setting(
        "stored",
        "engine torch on a GPU, in half precision: FP8 and INT4 weights are multiplied as they are stored, "
        "which rounds what FP8 is multiplied by; or dequantized",
    )
    num_threads: int | None = setting(
        None, "CPU threads of a rank; default: cores / dp-size", bounds=Bounds(at_least=1)
    )
    kv_pages: int | None = setting(
        None,
        "pages in a rank's KV pool; default: 2048, or fewer on a CPU whose memory would not hold them",
        bounds=Bounds(at_least=1),
    )
    page_size: int = setting(64, "tokens per page", bounds=Bounds(at_least=1))
    window_pages: int | None = setting(
        None,
        "pages for each window of a model that has some; default: twice what running sequences take",
        bounds=Bounds(at_least=1),
    )
    state_slots: int | None = setting(
        None,
        "recurrent states of a model that has some; default: 2 for each that may run, and 32",
        bounds=Bounds(at_least=1),
    )
    self_check: Literal["on", "off"] = setting(
        "on",
        "engine torch: try at the start whether the model computed in pieces is the model; off: nobody "
        "notices where it is not",
    )
    graph_mib: int | None = setting(
        None,
        "engine torch on a GPU: MiB for CUDA graphs of steps; default: a 64th of the card, 256 at "
        "least; 0: none",
        bounds=Bounds(at_least=0),
    )
    share_weights: Literal["on", "off"] = setting(
        "off",
        "engine torch on a CPU: keep weights in files of the user's cache, which this machine's ranks share",
    )
    decode_cache: Literal["on", "off"] = setting("on", "keep a radix cache of prefixes (decode)")
    prefill_cache: Literal["on", "off"] = setting("on", "keep a radix cache of prefixes (prefill)")
    protected_cache_share: float = setting(
        0.3,
        "share of the pool kept for prefixes requested more than once",
        bounds=Bounds(at_least=0, at_most=1),
    )
    kv_tier: tuple[str, ...] = setting(
        (),
        "keep what each rank's KV pool evicts in so much memory, memory:20GiB, or in a file below a "
        "directory, /nvme/isthmus:1TiB, in the order given; KV in a file is as secret as its prompt",
        split=False,
        bounds=TIER_BOUNDS,
    )
    kv_tier_fd: int | None = setting(
        None, "open file of --kv-tier=memory, which the supervisor keeps", bounds=Bounds(at_least=0)
    )
    kv_tier_write_mbps: float | None = setting(
        None,
        "MB that each rank writes to files of --kv-tier in a second, at most; default: no limit",
        bounds=Bounds(above=0),
    )
    kv_tier_shared: Literal["on", "off"] = setting(
        "off", "read what other ranks keep in the directory of --kv-tier, on this machine or a shared disk"
    )
    pull: Literal["on", "off"] = setting(
        "on",
        "pull what other ranks hold of a prompt, and let them pull, where a router finds that worth it",
    )
    transport: Literal["nixl", "local"] = setting("nixl", "KV transport; local: same host only")
    nixl_backend: Literal["UCX", "LIBFABRIC", "MOONCAKE", "UCCL"] = setting(
        "UCX", "NIXL's plugin that moves KV, if NIXL has it; tried with UCX alone"
    )
    nixl_parameter: tuple[str, ...] = setting(
        (),
        "of that plugin, NAME=VALUE: device_list=mlx5_0,mlx5_1",
        split=False,
        bounds=Bounds(pattern=r"[A-Za-z_][A-Za-z0-9_]*=.+", form="NAME=VALUE"),
    )
    expect_kv_path: Literal["any", "rdma"] = setting(
        "any", "rdma: warn and alert where KV is transferred over TCP (prefill)"
    )
    chunk_size: int | None = setting(
        None,
        "prompt tokens computed per step; default: 512, or 2048 where engine torch computes on a GPU",
        bounds=Bounds(at_least=1),
    )
    shorter_first: float = setting(
        2.0,
        "let shorter prompts overtake a longer one, that together have at most so many times the tokens that "
        "it lacks; 0: compute them in the order of arrival",
        bounds=Bounds(at_least=0, at_most=1000),
    )
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
        "seconds that another rank may write KV here without renewal of its lease",
        bounds=Bounds(above=0),
    )
    fence_margin_s: float = setting(
        5.0,
        "seconds after that lease before pages of a silent writer are reused",
        bounds=Bounds(at_least=0),
    )
    kv_digest_share: float = setting(
        0.01,
        "share of transfers whose pages are verified by digests of what was written",
        bounds=Bounds(at_least=0, at_most=1),
    )
    fake_step_s: float = setting(0.0, "engine fake: seconds per step", bounds=Bounds(at_least=0))
    fake_prompt_token_s: float = setting(
        0.0, "engine fake: seconds per prompt token", bounds=Bounds(at_least=0)
    )
    speculation: Mode = setting(
        "off",
        "draft what follows; text stays the same: lookup goes on as the request itself did, tree also as "
        "others of its cache salt, draft as --draft-model does (decode)",
    )
    draft_tokens: int = setting(
        5, "drafts of a sequence in a step, at most (decode)", bounds=Bounds(at_least=1, at_most=64)
    )
    speculate_unsalted: bool = setting(
        False,
        "--speculation=tree: requests without a cache salt learn from each other, too; speed then tells "
        "clients what others were answered (decode)",
    )
    draft_model: str = setting(
        "",
        "engine torch: directory of a small checkpoint with the model's tokenizer, to draft with; prefill "
        "ranks that have it compute and send its KV, too",
    )
    lora: tuple[str, ...] = setting(
        (),
        "a LoRA adapter of PEFT, NAME=DIRECTORY; clients ask for it as the model MODEL:NAME",
        split=False,
        bounds=LORA_BOUNDS,
    )
    lora_dir: Path | None = setting(
        None, "let operators load adapters that are below this directory (isthmus lora); default: none"
    )
    fake_draft: str = setting(
        "",
        "engine fake: a draft model, right in a share of positions, agree:0.8, with seconds agree:0.8:0.001",
    )
    fake_carried: str = setting(
        "",
        "engine fake: groups beside full attention, as window:8,chunk:16,state; state:500 weighs 500 tokens",
    )

    def __post_init__(self) -> None:
        ClusterConfig.__post_init__(self)
        parameters = parameters_of(self.nixl_parameter)
        if self.nixl_backend == UCX:
            check_parameters(UCX, parameters)
        if self.speculation != "off" and self.engine == "sglang":
            raise ConfigError(
                "--speculation is for --engine=torch: SGLang has --engine-arg=--speculative-algorithm=..."
            )
        if self.kv_dtype and self.engine != "torch":
            also = ": SGLang has --engine-arg=--kv-cache-dtype=..." * (self.engine == "sglang")
            raise ConfigError(f"--kv-dtype is for --engine=torch{also}")
        if self.draft_model and self.engine != "torch":
            also = ": SGLang has --engine-arg=--speculative-draft-model-path=..." * (self.engine == "sglang")
            raise ConfigError(f"--draft-model is for --engine=torch{also}")
        in_files = any(place.directory is not None for place in tier_places(self.kv_tier))
        if self.kv_tier_write_mbps is not None and not in_files:
            raise ConfigError("--kv-tier-write-mbps limits --kv-tier=/DIRECTORY:SIZE, and there is none")
        if self.kv_tier_shared == "on" and not in_files:
            raise ConfigError(
                "--kv-tier-shared reads a directory of --kv-tier=/DIRECTORY:SIZE, and none is given"
            )
        if len(self.adapters) < len(self.lora):
            raise ConfigError(f"--lora gives one name to two adapters: {', '.join(self.lora)}")
        if self.speculation == "draft" and not self.has_draft:
            raise ConfigError("--speculation=draft needs --draft-model")

    def tls(self) -> TlsConfig | None:
        """Return the rank's TLS: it obeys the cluster's services alone, for a CA may have signed for others,
        too."""
        tls = ClusterConfig.tls(self)
        if tls is None or not tls.mutual:
            if self.tls_peer_name:
                raise ConfigError("--tls-peer-name needs --tls-mutual, which asks clients for a certificate")
            return tls
        return replace(tls, peer_name=self.tls_peer_name or self.tls_server_name)

    @property
    def chunk_tokens(self) -> int:
        """Return --chunk-size, or its default: a GPU is idle with short chunks."""
        on_gpu = self.engine == "torch" and self.device != "cpu"
        return self.chunk_size or (_GPU_CHUNK_TOKENS if on_gpu else _CHUNK_TOKENS)

    @property
    def has_draft(self) -> bool:
        return bool(self.fake_draft if self.engine == "fake" else self.draft_model)

    @property
    def draft_catch_up_tokens(self) -> int:
        """Return how many prompt tokens a draft model computes in a step at most.

        With a target for the time between tokens they are few: what they take is known only afterwards.
        """
        most = self.chunk_tokens
        return most if self.itl_target_ms is None else min(most, _CATCH_UP_BY_TARGET)

    @property
    def graph_rows(self) -> int:
        """Return how many single tokens a decode rank's step has at most, drafts included."""
        return min(self.max_running_requests * (1 + self.most_drafts), _MOST_GRAPH_ROWS)

    @property
    def most_drafts(self) -> int:
        """Return how many drafts a sequence has in a step at most."""
        return self.draft_tokens if self.speculation != "off" else 0

    @property
    def draft_graph_rows(self) -> int:
        """Return how many sequences a draft model drafts for in a round at most."""
        return min(self.max_running_requests, _MOST_GRAPH_ROWS) if self.speculation == "draft" else 0

    @property
    def speculates(self) -> Speculation:
        return Speculation(self.speculation, self.draft_tokens, self.speculate_unsalted)

    @property
    def model_directory(self) -> Path | None:
        return Path(self.model) if self.model else None

    @property
    def adapters(self) -> dict[str, Path]:
        """Return the directories of --lora by name."""
        named = (each.partition("=") for each in self.lora)
        return {name: Path(directory) for name, _, directory in named}

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.model).name or "fake"

    @property
    def reached_at(self) -> str:
        return self.advertise_host or self.host

    @property
    def rank_device(self) -> str:
        """Return where this rank computes. SGLang places its ranks itself."""
        if self.engine == "torch" and self.device == "cuda" and self.dp_size > 1:
            return f"cuda:{self.rank_index or 0}"
        return self.device

    @property
    def threads(self) -> int:
        return self.num_threads or max(1, (os.cpu_count() or 1) // self.dp_size)

    @property
    def pool_pages(self) -> int:
        return self.kv_pages or DEFAULT_KV_PAGES

    @property
    def pool_sizes(self) -> PoolSizes:
        return PoolSizes(
            num_window_pages=self.window_pages,
            num_slots=self.state_slots,
            max_running_requests=self.max_running_requests,
            chunk_size=self.chunk_tokens,
        )

    @property
    def nixl(self) -> NixlSettings:
        parameters = parameters_of(self.nixl_parameter)
        return NixlSettings(self.nixl_backend, parameters, self.expect_kv_path == "rdma")

    @property
    def lease(self) -> WriteLease:
        return WriteLease(self.write_lease_s, self.fence_margin_s)

    def has_cache(self, role: Role) -> bool:
        return (self.decode_cache if role is Role.DECODE else self.prefill_cache) == "on"

    def pulls(self, role: Role) -> bool:
        """Return whether ranks of this role lend what they hold, and pull what they lack."""
        return self.pull == "on" and self.has_cache(role)

    def check_blocks(self) -> None:
        """Raise ConfigError unless blocks of the index are whole pages."""
        if self.index_block % self.page_size != 0:
            raise ConfigError(
                f"--index-block {self.index_block} must be a multiple of --page-size {self.page_size}"
            )

    def cache(self, role: Role) -> CacheSettings:
        """Return the cache's settings. Raises ConfigError as check_blocks."""
        self.check_blocks()
        enabled = self.has_cache(role)
        if self.kv_tier and not enabled:
            raise ConfigError(f"--kv-tier keeps what --{role.value}-cache has, which is off")
        return CacheSettings(
            self.served_name, self.index_block, enabled, self.protected_cache_share, self.tiers
        )

    @property
    def tiers(self) -> TierSettings:
        call_limit_s = self.step_limit_s or math.inf
        mbps = self.kv_tier_write_mbps
        return TierSettings(
            tier_places(self.kv_tier),
            memory_fd=self.kv_tier_fd,
            call_limit_s=call_limit_s,
            write_bytes_per_s=math.inf if mbps is None else 1e6 * mbps,
            shares=self.kv_tier_shared == "on",
        )

    def limits(self, role: Role) -> Limits:
        target_ms = self.itl_target_ms if role is Role.DECODE else None
        return Limits(
            self.max_running_requests,
            self.chunk_tokens,
            itl_target_s=target_ms / 1e3 if target_ms is not None else None,
            shorter_first=self.shorter_first,
            step_limit_s=self.step_limit_s,
        )
