"""This module finds what is wrong with a local cluster before anything is started, and says it in one
sentence.

    flags of every service -> their configs      a value that no service takes
    the model's directory                        no checkpoint, or one that --engine does not run
    the ports that were named                    used by another process
    memory, on the CPU                           too little for the weights and pools of all ranks
    etcd                                         no endpoint is named, and no etcd is installed
    the data directory                           another cluster uses it
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.engine.pool_memory import free_beside_tiers, pool_pages, ranks_memory
from services.etcd.embedded import etcd_binary
from services.host.ports import listen
from services.model.model_config import disagreement
from services.model.quantization import quantization_of
from services.rank.rank_config import RankConfig
from services.router.router_config import RouterConfig
from services.settings.flags import load
from services.settings.named_models import GGUF_LINK
from services.values.errors import ConfigError

_LOCK = "in-use"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def router_config(name: str, flags: list[str]) -> RouterConfig:
    return load(RouterConfig, flags, prog=f"isthmus, {name}")


def rank_config(name: str, flags: list[str]) -> RankConfig:
    return load(RankConfig, flags, prog=f"isthmus, {name}")


def check_checkpoint(directory: Path, engine: str) -> None:
    """Raise ConfigError unless `engine` could run the checkpoint. It imports no library of the services."""
    if directory.is_file():
        raise ConfigError(f"--model: {directory} is a file, and a checkpoint is a directory")
    if not directory.is_dir():
        raise ConfigError(f"--model: there is no directory {directory}")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"--model: {directory} holds no tokenizer (none of {', '.join(_TOKENIZERS)})")
    if engine == "fake":
        return
    config = _read_config(directory)
    files = [*directory.glob("*.safetensors"), *directory.glob(GGUF_LINK)]
    if not files:
        raise ConfigError(f"--model: {directory} holds no weights (*.safetensors)")
    if unreadable := [file for file in files if not os.access(file, os.R_OK)]:
        raise ConfigError(f"--model: {unreadable[0]} cannot be read: give yourself the right to (chmod u+r)")
    if engine == "torch":
        _check_architecture(directory, config)


def check_memory(
    directory: Path, ranks: Sequence[RankConfig], free_bytes: int | None, total_bytes: int | None
) -> int | None:
    """Return the pages for each rank without --kv-pages, or None if there is no such rank or the model's size
    is unknown. `ranks` has a config for each worker.

    Raises Unavailable if weights and pools of all ranks on the CPU, or tiers in memory, need more memory than
    is free, and ConfigError if they need more than the machine has."""
    if not ranks or free_bytes is None or total_bytes is None:
        return None
    free_bytes = free_beside_tiers(ranks, free_bytes, total_bytes)
    config = {} if ranks[0].engine == "fake" else _read_config(directory)
    here = [found for rank in ranks if (found := ranks_memory(rank, config)) is not None]
    if not here:
        return None
    pages = pool_pages(here, free_bytes, total_bytes)
    return pages if any(each.kv_pages is None for each in here) else None


def check_etcd(endpoints: Sequence[str]) -> None:
    if not endpoints and not os.access(etcd_binary(), os.X_OK):
        raise ConfigError(
            f"{etcd_binary()} cannot be run: install isthmus[embedded] again, or name an --etcd"
        )


def _read_config(directory: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: {directory} holds no readable config.json: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {directory}/config.json is not a JSON object")
    return config


def _check_architecture(directory: Path, config: Mapping[str, Any]) -> None:
    if problem := disagreement(config):
        raise ConfigError(f"--model: {directory}/config.json contradicts itself: {problem}")
    try:
        quantization_of(config)
    except ConfigError as error:
        raise ConfigError(f"--model: {directory}: {error}") from error


def check_ports(host: str, wanted: Mapping[str, int], count: int) -> None:
    """Raise ConfigError unless `count` ports can be opened from each port of `wanted` on. Its keys are flags,
    which the error names."""
    for flag, first in wanted.items():
        for port in range(first, first + count):
            try:
                listen(host, port).close()
            except OSError as error:
                raise ConfigError(
                    f"{flag}: cannot listen on port {port} of {host}: {error.strerror or error}"
                    " (does another cluster run here? name other ports with --port and --http-port)"
                ) from error


@contextmanager
def sole_user(data_dir: Path) -> Iterator[None]:
    """Create `data_dir` and lock it for this process. The kernel releases the lock if the process dies.
    Raises ConfigError if another process holds it, or the directory cannot be created."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        file = (data_dir / _LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"--data-dir: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(f"--data-dir: {data_dir} is in use by {holder}; name another one") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} ({Path(sys.argv[0]).name})")
        file.flush()
        yield
