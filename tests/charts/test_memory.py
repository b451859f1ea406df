"""Every sample fits into the memory that it asks for, as `isthmus size` reckons it; and its routers scale."""

import math
import re
from pathlib import Path

import pytest

from charts.rendering import LEAST, SAMPLES, merged, render, rendered, sample
from exactness.model_configs import DEEPSEEK_V3, LLAMA_3_1_8B, QWEN3_8B
from services.cli.look.size import SizeConfig, fit_of

GIB = 2**30
GENERATED = {  # `isthmus make-model`, which needs torch
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
MODELS = {
    "tiny": GENERATED,
    "Qwen3-8B": QWEN3_8B,
    "Llama-3.1-8B-Instruct": LLAMA_3_1_8B,
    "DeepSeek-V3": DEEPSEEK_V3,
}
# Of `nvidia-smi`, MiB. The second is what the sample itself says: GPUs of 80 GB.
GPUS_GIB = {"NVIDIA-H200": 143771 / 1024, "NVIDIA-H100-80GB-HBM3": 81559 / 1024, "one-node-gpu": 81559 / 1024}
SGLANG_RUNTIME_GIB = 3  # CUDA, NCCL and graphs, which SGLang takes out of its static share
RANK_GIB = 1  # docs/operations.md: Python and torch
ROLES = [(name, role) for name in SAMPLES for role in ("prefill", "decode")]


def arguments(config):
    return dict(text.split("=") if "=" in text else (text, "") for text in config.engine_arg)


def fit_on_a_gpu(name, role):
    config, pod = rendered(name).config(role), rendered(name).pods()[role]
    gpu_gib = GPUS_GIB[pod.get("nodeSelector", {}).get("nvidia.com/gpu.product", name)]
    given = arguments(config)
    processes = int(given.get("--tp-size", 1))
    shares = config.dp_size if "--enable-dp-attention" in given else 1
    reserve_gib = gpu_gib / 10
    if config.engine == "sglang":
        reserve_gib = gpu_gib * (1 - float(given["--mem-fraction-static"])) + SGLANG_RUNTIME_GIB
    assert processes == sample(name)[role]["gpus"]
    size = SizeConfig(
        model=Path(config.model),
        kv_pages=config.kv_pages,
        page_size=config.page_size,
        tp_size=processes // shares,
        dp_attention_size=shares,
        reserve_gib=reserve_gib,
    )
    return fit_of(size, MODELS[Path(config.model).name], gpu_gib)


def bytes_of(quantity):
    number, unit = re.fullmatch(r"([0-9.]+)([KMGT]i)", quantity).groups()
    return float(number) * 1024 ** (1 + "KMGT".index(unit[0]))


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_weights_and_pool_fit_into_what_the_sample_asks_for(name, role):
    config = rendered(name).config(role)
    limit_bytes = bytes_of(rendered(name).container(role)["resources"]["limits"]["memory"])
    if config.device == "cuda":
        fit = fit_on_a_gpu(name, role)
        assert fit.missing_bytes <= 0, fit.lines
        assert limit_bytes >= fit.weights_bytes  # while it loads
        return
    limit_gib = limit_bytes / GIB - bytes_of(sample(name)[role]["sharedMemory"]) / GIB
    size = SizeConfig(
        model=Path(config.model),
        kv_pages=config.kv_pages,
        page_size=config.page_size,
        reserve_gib=RANK_GIB,
        kv_tier=config.kv_tier,
    )
    fit = fit_of(size, MODELS[Path(config.model).name], limit_gib / config.dp_size)
    assert fit.missing_bytes <= 0, fit.lines


def test_gpus_of_80_gb_do_not_hold_what_is_meant_for_others(monkeypatch):
    """The reckoning can say no: DeepSeek-V3 on eight of them, and a page too many."""
    monkeypatch.setitem(GPUS_GIB, "NVIDIA-H200", 81559 / 1024)
    assert fit_on_a_gpu("sglang-dp-attention", "decode").lines[-1].endswith("the weights alone are too much")
    held = fit_on_a_gpu("production", "decode")
    assert 0 < -held.missing_bytes < 20 * GIB


# -- routers ---------------------------------------------------------------------------------------------


def replicas_wanted(now, cores_used, cores_requested, target_percent):
    """Kubernetes' HorizontalPodAutoscaler: nothing within a tenth, else in proportion."""
    ratio = 100 * cores_used / cores_requested / target_percent
    return now if abs(ratio - 1) <= 0.1 else math.ceil(now * ratio)


def scaling(objects):
    scaler = objects.of("HorizontalPodAutoscaler")["router"]["spec"]
    (metric,) = scaler["metrics"]
    cpu = objects.container("router")["resources"]["requests"][metric["resource"]["name"]]
    cores = float(cpu[:-1]) / 1000 if str(cpu).endswith("m") else float(cpu)
    return scaler["minReplicas"], cores, metric["resource"]["target"]["averageUtilization"]


SCALED = [name for name in ("least", *SAMPLES) if rendered(name).of("HorizontalPodAutoscaler")]


@pytest.mark.parametrize("name", SCALED)
def test_routers_that_use_their_core_get_others_beside_them(name):
    replicas, cores, target = scaling(rendered(name))
    assert replicas_wanted(replicas, 1.0, cores, target) > replicas
    assert replicas_wanted(replicas, 0.1, cores, target) < replicas
    assert replicas_wanted(replicas, 1.0, 2 * cores, target) == replicas  # as it was: it could never fire


@pytest.mark.parametrize(("cpu", "target"), [("1", 90), ("900m", 100), ("1300m", 69), ("500m", 100)])
def test_what_the_chart_takes_can_fire(cpu, target):
    router = {
        "resources": {"requests": {"cpu": cpu}},
        "autoscaling": {"targetCPUUtilizationPercentage": target},
    }
    replicas, cores, share = scaling(render(merged(LEAST, {"router": router})))
    assert replicas_wanted(replicas, 1.0, cores, share) > replicas


@pytest.mark.parametrize("name", ["production", "sglang-dp-attention"])
def test_one_prefill_pod_can_go_while_another_serves(name):
    objects = rendered(name)
    replicas = objects.of("StatefulSet")["prefill"]["spec"]["replicas"]
    assert replicas - objects.of("PodDisruptionBudget")["prefill"]["spec"]["maxUnavailable"] >= 1
