"""A worker's SGLang is started with these settings, some of which are refused before.

This module is pure except for paths.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from services.engine.engine_config import EngineConfig
from services.engine.sglang.service import speculation_flags
from services.engine.sglang.service.adapters import lora_arguments
from services.transfer.nixl_settings import NixlSettings
from services.values.errors import ConfigError
from services.values.rank import Role

# The service decides these: a user's value would break what it relies on.
_OURS = (
    "--model-path",
    "--model",
    "--host",
    "--port",
    "--dp-size",
    "--data-parallel-size",
    "--attn-dp-size",
    "--attention-data-parallel-size",
    "--page-size",
    "--max-total-tokens",
    "--max-running-requests",
    "--kv-events-config",
    "--skip-tokenizer-init",
    "--incremental-streaming-output",
    "--disaggregation-mode",
    "--disaggregation-transfer-backend",
    "--disaggregation-bootstrap-port",
    "--disaggregation-decode-enable-radix-cache",
    "--disable-radix-cache",
)
_ONE_STAGE = "every process of a rank must hold all layers of every page, only heads are shared out"
_ONE_TIER = (
    "the index knows one tier of pages, the device's: what SGLang moves to another counts as gone, and a "
    "restore that fails there fails its request (sglang#30322)"
)
_RESTORES = (
    "only prefill can have it, which computes what it cannot restore: on decode a restore that fails fails "
    "its request (sglang#30322)"
)
_ADAPTERS = "the service's own --lora and --lora-dir load adapters, whose ids it must know"
# SGLang does not support these with the decode radix cache, or with our handshake.
_UNSUPPORTED = {
    "--config": "what a file says would not be checked: give each flag by itself",
    "--enable-hisparse": "SGLang does not support it with the decode radix cache",
    "--enable-pd-role-switch": "SGLang's NIXL backend does not support it",
    "--enable-lora": _ADAPTERS,
    "--lora-paths": _ADAPTERS,
    "--enable-prefill-cp": _ONE_STAGE,
    "--enable-kv-cache-sharding": _ONE_STAGE,
    "--enable-hicache": _ONE_TIER,
    "--enable-lmcache": _ONE_TIER,
    "--enable-flexkv": _ONE_TIER,
    "--enable-unified-cache-external-linker": _ONE_TIER,
    "--disaggregation-decode-enable-offload-kvcache": _ONE_TIER,
    "--disaggregation-decode-host-receive-threshold": _ONE_TIER,
    "--radix-cache-backend": "the index follows the events of SGLang's own radix trees",
}
# Every flag with such a prefix is refused, too.
_UNSUPPORTED_FAMILIES = {
    "--hicache-storage-": _ONE_TIER,
    "--lmcache-": _ONE_TIER,
    "--flexkv-": _ONE_TIER,
    "--unified-cache-external-linker-": _ONE_TIER,
}
# Decode refuses flags with these prefixes. What prefill has below its pool is not in the index.
_UNSUPPORTED_ON_DECODE = {"--enable-hierarchical-cache": _RESTORES, "--hicache-": _RESTORES}
# These must be 1.
_UNSUPPORTED_SIZES = {
    "--pp-size": _ONE_STAGE,
    "--pipeline-parallel-size": _ONE_STAGE,
    "--attn-cp-size": _ONE_STAGE,
    "--attention-context-parallel-size": _ONE_STAGE,
    "--dcp-size": _ONE_STAGE,
    "--decode-context-parallel-size": _ONE_STAGE,
    "--dwdp-size": "it makes DP ranks of its own",
}
# The values of these are checked.
_ALLOCATION = "--disaggregation-decode-allocation-policy"
_RETRACTION = "--disaggregation-decode-retraction-backup"
_CONTEXT = "--context-length"
_RESERVED = "--num-reserved-decode-tokens"
_PROCESSES = ("--tp-size", "--tensor-parallel-size")
_CONFIG = "--json-model-override-args"
_PRIORITIES = "--enable-priority-scheduling"
_DP_ATTENTION = "--enable-dp-attention"
_NODES, _NODE_RANK, _FIRST_NODE = "--nnodes", "--node-rank", "--dist-init-addr"
# Windows' KV is stored whole, as if every layer saw all, or in memory of its own with this ratio.
KEEP_WHOLE = "--disable-hybrid-swa-memory"
WINDOW_MEMORY_FLAG = "--swa-full-tokens-ratio"
# These are all flags that are known here, so that abbreviations of them are recognized.
_KNOWN = (
    *_OURS,
    *_UNSUPPORTED,
    *_UNSUPPORTED_FAMILIES,
    *_UNSUPPORTED_ON_DECODE,
    *_UNSUPPORTED_SIZES,
    *speculation_flags.FLAGS,
    *(
        _ALLOCATION,
        _RETRACTION,
        _CONTEXT,
        _RESERVED,
        *_PROCESSES,
        _CONFIG,
        _PRIORITIES,
        _DP_ATTENTION,
        *(_NODES, _NODE_RANK, _FIRST_NODE),
        KEEP_WHOLE,
        WINDOW_MEMORY_FLAG,
    ),
)
_SET = "the service sets it itself"
# A chart can refuse these before there is a service; the values are the reasons for each flag or prefix.
REFUSED_FLAGS = {**dict.fromkeys(_OURS, _SET), **_UNSUPPORTED}
REFUSED_FAMILIES = _UNSUPPORTED_FAMILIES
REFUSED_ON_DECODE = _UNSUPPORTED_ON_DECODE
REFUSED_SIZES = _UNSUPPORTED_SIZES  # These are refused at more than 1.
IDLE_CONNECTION_S = 15.0  # After so long we close an unused connection to SGLang.
# An abort that prefill does not acknowledge waits so long; environ.py's default is the least that is safe.
_RELEASE_TIMEOUT = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
_LEAST_RELEASE_TIMEOUT_S = 30.0
_NIXL_BACKEND = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
_NIXL_PARAMETERS = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
# This is max_req_input_len of managers/tp_worker.py.
_CONTEXT_ASIDE = 6
# This is the default of arg_groups/fields/disagg.py.
_RESERVED_DECODE_TOKENS = 512
_CPU_STAND_INS = Path(__file__).parents[1] / "cpu_stand_ins"


@dataclass(frozen=True, slots=True)
class Nodes:
    """These are the nodes of one worker, and which of them this one is."""

    size: int
    rank: int  # The service of node 0 is the worker.
    host: str  # Node 0 is reached there.
    port: int  # Node 0's service listens there for the others', on the port before SGLang's own.

    @classmethod
    def read(cls, values: Mapping[str, str]) -> "Nodes | None":
        """Return None where the worker has one node. Raises ConfigError."""
        size = _whole(_NODES, values.get(_NODES, "1"))
        if size < 2:
            return None
        rank = _whole(_NODE_RANK, values.get(_NODE_RANK, "0"))
        host, _, port = values.get(_FIRST_NODE, "").rpartition(":")
        if not host or not port.isdecimal() or not 1 < int(port) < 1 << 16:
            raise ConfigError(
                f"--engine-arg={_NODES}={size} needs {_FIRST_NODE}=HOST:PORT of the first node, where that "
                "port, those after it and the one before it are free"
            )
        if rank >= size:
            raise ConfigError(
                f"--engine-arg={_NODE_RANK}={rank}: {_NODES} is {size}, so the last one is {size - 1}"
            )
        return cls(size, rank, host, int(port) - 1)


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--engine-arg={flag} must be a number, got {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class SglangSettings:
    """These belong to one worker with all its DP ranks: those of its engine, its role and its name."""

    engine: EngineConfig
    role: Role
    worker: str

    def __post_init__(self) -> None:
        self.engine.check_blocks()
        for text in self.engine.engine_arg:
            _check_argument(text, self.role)
        _check_values(_values(self.engine.engine_arg))
        if self.role is Role.DECODE and self.engine.has_cache(self.role):
            speculation_flags.check_decode_cache(_values(self.engine.engine_arg))
        self._check_nodes()
        if self.has_adapters and _DP_ATTENTION in self.engine.engine_arg:
            raise ConfigError(
                f"--engine-arg={_DP_ATTENTION}: SGLang then serves pinned adapters alone, and --lora and "
                "--lora-dir pin none"
            )
        if self.engine.transport != "nixl":
            raise ConfigError("--engine=sglang moves KV over NIXL only: --transport=nixl")
        if not Path(self.engine.model).is_dir():
            raise ConfigError(f"--engine=sglang needs a checkpoint directory, {self.engine.model!r} is none")

    @property
    def nodes(self) -> Nodes | None:
        return Nodes.read(_values(self.engine.engine_arg))

    def _check_nodes(self) -> None:
        if (nodes := self.nodes) is None:
            return
        if self._processes_per_rank() % nodes.size:
            raise ConfigError(
                f"--engine-arg={_NODES}={nodes.size}: each node has as many processes, and --tp-size is "
                f"{self._processes_per_rank()}"
            )
        if self.engine.dp_size > 1 and _DP_ATTENTION not in self.engine.engine_arg:
            raise ConfigError(
                f"--engine-arg={_NODES}={nodes.size}: SGLang has several DP ranks over nodes with "
                f"{_DP_ATTENTION} only"
            )

    def arguments(self, port: int) -> list[str]:
        """Return the arguments of `python -m sglang.launch_server`; the user's come last."""
        arguments = [
            f"--model-path={self.engine.model}",
            "--host=127.0.0.1",  # Only this service speaks to it.
            f"--port={port}",
            f"--dp-size={self.engine.dp_size}",
            f"--page-size={self.engine.page_size}",
            f"--max-total-tokens={self.engine.pool_pages * self.engine.page_size}",
            f"--max-running-requests={self.engine.max_running_requests * self._shares}",
            f"--chunked-prefill-size={self.engine.chunk_tokens * self._shares}",
            f"--disaggregation-mode={self.role.value}",
            "--disaggregation-transfer-backend=nixl",
            f"--kv-events-config={json.dumps({'publisher': 'isthmus'})}",
            "--skip-tokenizer-init",
            "--grammar-backend=llguidance",  # These are as the torch engine's (inside/grammar_tokenizer.py).
            "--constrained-json-disable-any-whitespace",
            "--skip-server-warmup",
            "--log-level-http=warning",  # Otherwise each of our polls would log a line.
            "--incremental-streaming-output",
            "--enable-metrics",  # They are passed on; without them no answer has its time in the queue.
        ]
        if self.engine.dtype is not None:
            arguments.append(f"--dtype={self.engine.dtype}")
        arguments += self._cache_arguments() + self._device_arguments() + self._lora_arguments()
        return arguments + list(self.engine.engine_arg)

    @property
    def has_adapters(self) -> bool:
        return bool(self.engine.lora) or self.engine.lora_dir is not None

    def _lora_arguments(self) -> list[str]:
        """Return flags of adapters. Raises as `read_adapter`."""
        if not self.has_adapters:
            return []
        backend = ["--lora-backend=torch_native"] if self.engine.device == "cpu" else []
        return backend + lora_arguments(self.engine.adapters, self.engine.lora_dir is not None)

    @property
    def heeds_priority(self) -> bool:
        return _PRIORITIES in self.engine.engine_arg

    @property
    def keeps_window_memory(self) -> bool:
        return WINDOW_MEMORY_FLAG in _values(self.engine.engine_arg)

    @property
    def keeps_windows_whole(self) -> bool:
        """Return whether it was requested; it is the default where SGLang would do otherwise."""
        return KEEP_WHOLE in self.engine.engine_arg

    @property
    def _shares(self) -> int:
        """Return the number of parts into which SGLang divides these limits.

        With DP attention they are those of all DP ranks together (arg_groups/parallel_hook.py,
        resolve_max_num_reqs), otherwise of each.
        """
        return self.engine.dp_size if _DP_ATTENTION in self.engine.engine_arg else 1

    def draft(self) -> speculation_flags.DraftShape | None:
        return speculation_flags.DraftShape.read(_values(self.engine.engine_arg))

    def max_context_tokens(self, of_checkpoint: int) -> int:
        """Return how many tokens prompt and output may have together. Raises ConfigError.

        SGLang reserves a few tokens of the context and two pages of the pool. Its decode does not refuse a
        prompt that leaves less of the pool than it reserves for output: the prompt waits for ever, and so do
        all after it.
        """
        reserved = self._number(_RESERVED, _RESERVED_DECODE_TOKENS)
        aside = max(2 * self.engine.page_size, reserved if self.role is Role.DECODE else 0, self._draft_slots)
        pool_pages = self.engine.pool_pages - -(-aside // self.engine.page_size)
        if pool_pages < 1:
            raise ConfigError(
                f"--kv-pages={self.engine.pool_pages}: nothing is left of {aside} tokens that SGLang sets "
                f"aside; for a small pool lower --engine-arg={_RESERVED}"
            )
        return min(self.model_context_tokens(of_checkpoint), pool_pages * self.engine.page_size)

    def model_context_tokens(self, of_checkpoint: int) -> int:
        """Return the model's context as far as SGLang supports it, whatever the pool holds.

        Raises ConfigError.
        """
        return self._number(_CONTEXT, of_checkpoint) - _CONTEXT_ASIDE

    def stretching(self, stated: int, context: int) -> tuple[list[str], dict[str, str]]:
        """Return flags and environment for a context other than the `stated` max_position_embeddings.

        SGLang keeps to that with yarn (get_context_length). There are none where the user's flags may set
        another context.
        """
        if context == stated or {_CONTEXT, _CONFIG} & _values(self.engine.engine_arg).keys():
            return [], {}
        return [f"{_CONTEXT}={context}"], {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}

    @property
    def _draft_slots(self) -> int:
        """Return the token slots that a running sequence keeps for drafts, after those of its tokens."""
        values = _values(self.engine.engine_arg)
        return speculation_flags.draft_slots(values, self.engine.page_size) if self.role is Role.DECODE else 0

    def _number(self, flag: str, default: int) -> int:
        return _whole(flag, _values(self.engine.engine_arg).get(flag, str(default)))

    def _cache_arguments(self) -> list[str]:
        if self.role is Role.DECODE:
            cache = ["--disaggregation-decode-enable-radix-cache"] if self.engine.has_cache(self.role) else []
            return cache + self._reserve_arguments()
        return [] if self.engine.has_cache(self.role) else ["--disable-radix-cache"]

    def _reserve_arguments(self) -> list[str]:
        """Return flags that leave a sequence room for its drafts.

        SGLang admits a sequence where so much is left for its growth. If that is less than it keeps for
        drafts, an admitted sequence is soon retracted. The user's own value comes later, and takes
        precedence.
        """
        slots = self._draft_slots
        return [f"{_RESERVED}={slots}"] if slots > _RESERVED_DECODE_TOKENS else []

    def _device_arguments(self) -> list[str]:
        if self.engine.device != "cpu":
            _, _, first_gpu = self.engine.device.partition(":")
            return ["--device=cuda", f"--base-gpu-id={first_gpu or 0}"]
        return [
            "--device=cpu",
            "--attention-backend=torch_native",
            "--sampling-backend=pytorch",
            # Both call torch.cuda.
            "--disable-overlap-schedule",
            "--disable-cuda-graph",
            "--mem-fraction-static=0.15",
            "--sleep-on-idle",  # Otherwise each process keeps a core busy while idle.
        ]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of SGLang's processes, without the plugin's settings. Raises ConfigError."""
        if inherited.get("SGLANG_DISAGG_STAGING_BUFFER", "0").lower() not in ("", "0", "false"):
            raise ConfigError("SGLANG_DISAGG_STAGING_BUFFER: the Handshake does not carry staging messages")
        environment = {
            # Prometheus's files would stay there; without it SGLang creates a folder of its own for them.
            **{name: value for name, value in inherited.items() if name != "PROMETHEUS_MULTIPROC_DIR"},
            "SGLANG_PLUGINS": "isthmus",  # This loads no other package's plugin.
            # NIXL would read pages before they are written: it drops the event that fires then.
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",
            # Otherwise a decode rank frees the pages of an aborted request while prefill may still write
            # them.
            "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "1",
            _RELEASE_TIMEOUT: _release_timeout_s(inherited.get(_RELEASE_TIMEOUT, "")),
            # We close idle connections, and SGLang never does: a request could meet one that is being closed.
            "SGLANG_TIMEOUT_KEEP_ALIVE": str(int(4 * IDLE_CONNECTION_S)),
            **_nixl_environment(self.engine.nixl, inherited),
        }
        if self.engine.device == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
            threads = self.engine.threads
            environment.setdefault("OMP_NUM_THREADS", str(threads))
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", self._binding(threads))
            if find_spec("sgl_kernel") is None:
                paths = (str(_CPU_STAND_INS), inherited.get("PYTHONPATH", ""))
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return environment

    def _processes_per_rank(self) -> int:
        short, long = _PROCESSES
        return self._number(short, self._number(long, 1))

    def _binding(self, threads: int) -> str:
        """Return the cores of each computing process: `threads` neighbours each, in rotation."""
        cores = os.cpu_count() or 1
        sets = []
        for rank in range(self.engine.dp_size * self._processes_per_rank()):
            first = rank * threads % cores
            last = min(first + threads, cores) - 1
            sets.append(str(first) if first == last else f"{first}-{last}")
        return "|".join(sets)


def _nixl_environment(nixl: NixlSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return NIXL's settings where SGLang reads them (environ.py).

    Raises ConfigError where others are set.
    """
    environment = {_NIXL_BACKEND: nixl.backend, _NIXL_PARAMETERS: json.dumps(nixl.parameters)}
    for name, value in environment.items():
        if inherited.get(name, value) != value:
            raise ConfigError(f"{name}={inherited[name]}: say it by --nixl-backend and --nixl-parameter")
    return environment


def _check_argument(text: str, role: Role) -> None:
    flag = text.split("=", 1)[0]
    refused = {**REFUSED_FAMILIES, **(REFUSED_ON_DECODE if role is Role.DECODE else {})}
    reasons = [reason for prefix, reason in refused.items() if flag.startswith(prefix)]
    if flag in REFUSED_FLAGS:
        reasons.append(REFUSED_FLAGS[flag])
    if reasons:
        raise ConfigError(f"--engine-arg={flag}: {reasons[0]}")
    _check_whole(flag)


def _release_timeout_s(inherited: str) -> str:
    try:
        timeout_s = float(inherited or _LEAST_RELEASE_TIMEOUT_S)
    except ValueError:
        raise ConfigError(f"{_RELEASE_TIMEOUT} is a number of seconds, got {inherited!r}") from None
    if not timeout_s >= _LEAST_RELEASE_TIMEOUT_S:
        raise ConfigError(
            f"{_RELEASE_TIMEOUT}={inherited}: pages would be lent again while prefill may still write them, "
            f"for which it can take {_LEAST_RELEASE_TIMEOUT_S:g} s to learn of an abort"
        )
    return str(timeout_s)


def _check_whole(flag: str) -> None:
    """Raise ConfigError for an abbreviation, which SGLang accepts, and which would evade every check here."""
    meant = [known for known in _KNOWN if known.startswith(flag)]
    if meant and flag not in meant:
        raise ConfigError(f"--engine-arg={flag}: write the flag out, it may stand for {meant[0]}")


def _values(engine_args: tuple[str, ...]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in engine_args if "=" in text)


def _check_values(values: Mapping[str, str]) -> None:
    if values.get(_ALLOCATION, "early") != "early":
        raise ConfigError(f"{_ALLOCATION}: SGLang's NIXL backend knows only early")
    if values.get(_RETRACTION) == "host_pool":
        raise ConfigError(f"--engine-arg={_RETRACTION}=host_pool: {_ONE_TIER}")
    for flag, reason in REFUSED_SIZES.items():
        if values.get(flag, "1") != "1":
            raise ConfigError(f"--engine-arg={flag}={values[flag]}: {reason}")
