"""What can be told of a local cluster before anything of it is started: in a sentence, at once.

flags of every service -> their configs      a value that no service takes
the model's directory                        no checkpoint, or one that --engine does not run
the ports that were named                    taken by somebody else
memory, on the CPU                           too little for the weights of all ranks
etcd                                         none is named, and none is installed
the data directory                           another cluster's
"""

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from services.cli.table import format_bytes
from services.etcd.embedded import etcd_binary
from services.host.ports import listen
from services.model.architectures import disagreement, is_quantized
from services.model.sizing import ITEM_BYTES, kv_dtype
from services.model.weights import weights
from services.rank.config import RankConfig
from services.router.config import RouterConfig
from services.settings.flags import load
from services.values.errors import ConfigError

_LOCK = "in-use"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


def router_config(name: str, flags: list[str]) -> RouterConfig:
    """Raises SystemExit (2) as `config.load` does, with the sentence on standard error; so do all below."""
    return load(RouterConfig, flags, prog=f"isthmus, {name}")


def rank_config(name: str, flags: list[str]) -> RankConfig:
    return load(RankConfig, flags, prog=f"isthmus, {name}")


def check_checkpoint(directory: Path, engine: str) -> None:
    """Cheaply: what the services would find out by themselves, once their libraries are loaded.

    Raises:
        ConfigError: there is no checkpoint that `engine` could run.
    """
    if directory.is_file():
        raise ConfigError(f"--model: {directory} is a file, and a checkpoint is a directory")
    if not directory.is_dir():
        raise ConfigError(f"--model: there is no directory {directory}")
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"--model: {directory} holds no tokenizer (none of {', '.join(_TOKENIZERS)})")
    if engine == "fake":
        return
    config = _read_config(directory)
    files = [*directory.glob("*.safetensors")]
    if not files:
        raise ConfigError(f"--model: {directory} holds no weights (*.safetensors)")
    if unreadable := [file for file in files if not os.access(file, os.R_OK)]:
        raise ConfigError(f"--model: {unreadable[0]} cannot be read: give yourself the right to (chmod u+r)")
    if engine == "torch":
        _check_architecture(directory, config)


def check_memory(directory: Path, ranks: Sequence[RankConfig], available_bytes: int | None) -> None:
    """Of engine torch on the CPU, where each rank has the weights for itself. Their pools are not counted: of
    these only what is used is taken.

    Raises:
        ConfigError: the weights of all `ranks`, a config a worker, do not fit into what is free.
    """
    here = [rank for rank in ranks if rank.engine == "torch" and rank.device == "cpu"]
    if not here or available_bytes is None:
        return
    config, count = _read_config(directory), sum(rank.dp_size for rank in here)
    try:
        own_bytes, own_dtype = weights(config).bytes_per_gpu(), kv_dtype(config)
    except ConfigError:  # of a family whose size nobody reckons
        return
    item_bytes = [ITEM_BYTES[rank.dtype or own_dtype] * rank.dp_size for rank in here]
    needed = own_bytes / ITEM_BYTES[own_dtype] * sum(item_bytes)
    if needed > available_bytes:
        raise ConfigError(
            f"--model: the weights of {count} ranks take {format_bytes(needed)}, and "
            f"{format_bytes(available_bytes)} of memory are free: take a smaller model, fewer ranks "
            "(--decode-dp-size=1), or --rank-flag=dtype=bfloat16"
        )


def check_etcd(endpoints: Sequence[str]) -> None:
    """Raises ConfigError where none is named, and there is none to start."""
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
    if said := disagreement(config):
        raise ConfigError(f"--model: {directory}/config.json contradicts itself: {said}")
    if is_quantized(config):
        raise ConfigError(f"--model: {directory} is quantized; engine torch takes float weights alone")


def check_ports(host: str, wanted: Mapping[str, int], count: int) -> None:
    """`wanted` is the first of `count` ports, by the flag that named it.

    Raises:
        ConfigError: somebody listens on one of them, or nobody can.
    """
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
    """Hold `data_dir`, which is made, for as long as the context is. The kernel lets go of it if we die.

    Raises:
        ConfigError: another process holds it, or it cannot be made.
    """
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
