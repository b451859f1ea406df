"""This module decides what cluster a round of the fuzz runs on."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cluster.harness import FakeCluster
from exactness.checkpoints import shaped_checkpoint, tiny_checkpoint

SHAPES = (
    *("llama3-rope", "yarn", "tied-qwen3", "biased", "head-dim-128", "one-kv-head"),
    *("groups-of-7", "vocabulary-517", "three-layers", "head-dim-6"),
)
# That keep more than full attention's pages, or choose experts.
FAMILIES = (
    *("qwen3_5", "qwen3_5_moe", "nemotron_h", "falcon_h1", "gpt_oss", "gemma3", "llama4"),
    *("minimax_m2", "deepseek_v3"),
)
_TIERS = (("memory:256KiB",), ("FOLDER:256KiB",), ("memory:128KiB", "FOLDER:512KiB"))
# For blocks of up to 256 KiB, and for two checkpoints.
_LARGE = (("memory:2MiB",), ("FOLDER:2MiB",), ("memory:1MiB", "FOLDER:4MiB"))
_ATTEMPTS = 100
_PLANS = (("remote",), ("remote",), ("local",), ("remote", "local"), ("remote", "local"))


@dataclass(frozen=True)
class Setup:
    """`shape` is one of SHAPES or of FAMILIES, `rank` are settings of all ranks.

    tight   sequences are let in as if they were to generate nothing more, so that pools overflow
    kills   ranks are killed all the while, and started again
    eager   whoever computes pulls whatever another rank holds more of a prompt
    """

    shape: str
    plans: tuple[str, ...]
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    tight: bool
    kills: bool
    rank: MappingProxyType[str, Any]
    eager: bool = False

    def __str__(self) -> str:
        rank = " ".join(f"{name}={value}" for name, value in self.rank.items())
        flags = "".join(f" {name}" for name in ("tight", "kills", "eager") if getattr(self, name))
        return (
            f"{self.shape} {'+'.join(self.plans)} decode={self.decode} prefill={self.prefill}{flags} {rank}"
        )

    def cluster(self, etcd: str, name: str, folder: Path) -> FakeCluster:
        """`folder` is for files of tiers."""
        make = tiny_checkpoint if self.shape in FAMILIES else shaped_checkpoint
        directory = make(self.shape)
        tiers = tuple(each.replace("FOLDER", str(folder)) for each in self.rank.get("kv_tier", ()))
        cluster = FakeCluster(
            etcd,
            directory,
            name,
            decode=self.decode,
            prefill=self.prefill,
            plans=self.plans,
            engine="torch",
            self_check="off",
            model=str(directory),
            num_threads=1,
            **{"index_block": 64, **self.rank, "kv_tier": tiers},
        )
        # Ranks are killed faster than a client would want to try again: a slow request meets many.
        cluster.router_config = replace(cluster.router_config, max_attempts=_ATTEMPTS)
        return cluster


def draw_setup(chance: random.Random) -> Setup:
    tight = chance.random() < 0.4
    kills = not tight and chance.random() < 0.35
    page_size = chance.choice([1, 2, 4, 16, 32, 64])
    shape = chance.choice(SHAPES if chance.random() < 0.5 else FAMILIES)
    rank = _draw_rank(chance, page_size, tight)
    if chance.random() < 0.6:
        is_small = shape in (*SHAPES, "minimax_m2", "deepseek_v3") and shape != "head-dim-128"
        tiers = chance.choice(_TIERS if is_small else _LARGE)
        rank |= {"kv_tier": tiers, "decode_cache": "on", "prefill_cache": "on"}
        if "FOLDER" in str(rank["kv_tier"]) and chance.random() < 0.5:
            rank["kv_tier_shared"] = "on"
    return Setup(
        shape=shape,
        plans=chance.choice(_PLANS),
        decode=chance.choice([(1, 1), (1, 1, 1)] if kills else [(1,), (2,), (1, 1), (3,)]),
        prefill=(1, 1) if kills else chance.choice([(1,), (1, 1)]),
        tight=tight,
        kills=kills,
        rank=MappingProxyType(rank),
        eager=chance.random() < 0.6,
    )


def _draw_rank(chance: random.Random, page_size: int, tight: bool) -> dict[str, Any]:
    pool_tokens = chance.choice([96, 128, 160] if tight else [96, 128, 192, 256, 512, 1024])
    return {
        "page_size": page_size,
        "index_block": chance.choice([64, max(16, page_size)]),
        "kv_pages": max(3, pool_tokens // page_size),
        "chunk_size": chance.choice([1, 7, 16, 33, 64, 512]),
        "max_running_requests": chance.choice([4, 8, 32] if tight else [1, 2, 4, 8, 32]),
        "decode_cache": chance.choice(["on", "on", "on", "off"]),
        "prefill_cache": chance.choice(["on", "on", "on", "off"]),
        "transport": chance.choice(["local", "local", "local", "nixl"]),
        "kv_digest_share": chance.choice([0.0, 1.0]),
        "itl_target_ms": chance.choice([None, None, None, 5.0]),
        "shorter_first": chance.choice([0.0, 1.0, 1.0, 50.0]),
        "protected_cache_share": chance.choice([0.0, 0.3, 1.0]),
    }
