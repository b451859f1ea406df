"""What SGLang is started with, and what is refused beforehand."""

import json
from contextlib import nullcontext

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.plugin_settings import VARIABLE, PluginSettings
from services.engine.sglang.service.launch.settings import IDLE_CONNECTION_S
from services.values.errors import ConfigError
from services.values.rank import Role


def settings(tmp_path, **changes):
    return sglang_settings(tmp_path, **{"dp_size": 2, "index_block": 64, **changes})


def test_decode_has_the_radix_cache(tmp_path):
    arguments = settings(tmp_path).arguments(7000)
    assert "--disaggregation-decode-enable-radix-cache" in arguments
    assert {"--dp-size=2", "--max-total-tokens=8192"} <= set(arguments)
    without = settings(tmp_path, decode_cache="off").arguments(7000)
    assert "--disaggregation-decode-enable-radix-cache" not in without


@pytest.mark.parametrize(
    "engine_args,limits",
    [
        ((), {"--max-running-requests=8", "--chunked-prefill-size=64"}),
        # SGLang divides them by the number of DP ranks.
        (("--enable-dp-attention",), {"--max-running-requests=16", "--chunked-prefill-size=128"}),
    ],
)
def test_limits_are_those_of_each_rank(tmp_path, engine_args, limits):
    assert limits <= set(settings(tmp_path, engine_arg=engine_args).arguments(7000))


def test_prefill_without_a_cache(tmp_path):
    arguments = settings(tmp_path, role=Role.PREFILL, prefill_cache="off").arguments(7000)
    assert "--disable-radix-cache" in arguments
    assert not any("decode" in text for text in arguments)


@pytest.mark.parametrize("role", Role)
def test_sglang_counts_for_itself_and_tells_how_long_a_request_queued(tmp_path, role):
    assert "--enable-metrics" in settings(tmp_path, role=role).arguments(7000)


@pytest.mark.parametrize("role", Role)
def test_grammars_are_llguidances_unless_asked_otherwise(tmp_path, role):
    arguments = settings(tmp_path, role=role, engine_arg=("--grammar-backend=xgrammar",)).arguments(7000)
    assert arguments.index("--grammar-backend=llguidance") < arguments.index("--grammar-backend=xgrammar")
    assert "--constrained-json-disable-any-whitespace" in arguments


def test_the_users_arguments_come_last_and_whole(tmp_path):
    ours = ("--mem-fraction-static=0.8", '--json-model-override-args={"a": 1, "b": 2}')
    assert tuple(settings(tmp_path, engine_arg=ours).arguments(7000)[-2:]) == ours


@pytest.mark.parametrize(
    "argument",
    [
        "page-size=16",
        "--page-size=16",
        "--disable-radix-cache",
        "--dp-size=4",
        "--disaggregation-transfer-backend=mooncake",
        "--enable-hisparse",
        "--enable-pd-role-switch",
        "--radix-cache-backend=mine",
        "--disaggregation-decode-allocation-policy=prefill_complete",
        "--nnodes=2",
        "--pp-size=2",
        "--pipeline-parallel-size=2",
        "--attn-cp-size=2",
        "--dcp-size=2",
        "--enable-prefill-cp",
        "--attn-dp-size=2",
        "--enable-lora",
        "--lora-paths=a=/adapters/a",
        "--config=flags.yaml",
    ],
)
def test_what_cannot_work_is_refused_with_its_name(tmp_path, argument):
    with pytest.raises(ConfigError, match=argument.split("=")[0]):
        settings(tmp_path, engine_arg=(argument,))


ALGORITHM = "--speculative-algorithm"


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "eagle3", "NEXTN", "DSPARK"])
def test_speculation_that_sglang_does_with_its_decode_cache_passes(tmp_path, algorithm):
    own = settings(tmp_path, engine_arg=(f"{ALGORITHM}={algorithm}",))
    assert f"{ALGORITHM}={algorithm}" in own.arguments(7000)


REFUSED = ["STANDALONE", "NGRAM", "DFLASH", "FROZEN_KV_MTP", "UNO", "NONE", "", "a-plugin's"]


@pytest.mark.parametrize("algorithm", REFUSED)
def test_speculation_that_sglang_refuses_with_its_decode_cache_is_refused_there_alone(tmp_path, algorithm):
    argument = (f"{ALGORITHM}={algorithm}",)
    with pytest.raises(
        ConfigError, match=f"{ALGORITHM}={algorithm}: .* EAGLE, EAGLE3, NEXTN and DSPARK only"
    ):
        settings(tmp_path, engine_arg=argument)
    settings(tmp_path, engine_arg=argument, decode_cache="off")
    settings(tmp_path, engine_arg=argument, role=Role.PREFILL)


@pytest.mark.parametrize("flag", ["--speculative-draft-model-path", "--speculative-draft-model"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "nextn"])
def test_an_assistant_of_gemma_4_makes_another_algorithm_of_it(tmp_path, algorithm, flag):
    draft = tmp_path / "draft"
    draft.mkdir()
    arguments = (f"{ALGORITHM}={algorithm}", f"{flag}={draft}")
    with pytest.raises(ConfigError, match=f"config.json of the draft {draft}"):
        settings(tmp_path, engine_arg=arguments)
    for architecture, refused in (("LlamaForCausalLMEagle", False), ("Gemma4AssistantForCausalLM", True)):
        (draft / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        with pytest.raises(ConfigError, match="FROZEN_KV_MTP with this draft") if refused else nullcontext():
            settings(tmp_path, engine_arg=arguments)
    settings(tmp_path, engine_arg=arguments, role=Role.PREFILL)


@pytest.mark.parametrize(
    "argument",
    [
        "--enable-hierarchical-cache",
        "--enable-hicache",
        "--hicache-ratio=2",
        "--hicache-storage-backend=file",
        "--enable-lmcache",
        "--lmcache-config-file=x.yaml",
        "--enable-flexkv",
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=mooncake",
        "--disaggregation-decode-enable-offload-kvcache",
        "--disaggregation-decode-retraction-backup=host_pool",
        "--disaggregation-decode-host-receive-threshold=0.5",
    ],
)
def test_a_second_tier_of_pages_is_refused_with_the_reason(tmp_path, argument):
    with pytest.raises(ConfigError, match=f"{argument.split('=')[0]}.*: the index knows one tier"):
        settings(tmp_path, engine_arg=(argument,))


@pytest.mark.parametrize(
    "argument",
    ["--speculative-algo=EAGLE", "--enable-hier", "--hi=2", "--dp=2", "--enable-dp-att", "--tp=2"],
)
def test_an_abbreviation_of_what_is_looked_at_is_refused(tmp_path, argument):
    with pytest.raises(ConfigError, match=f"{argument.split('=')[0]}: write the flag out"):
        settings(tmp_path, engine_arg=(argument,))


@pytest.mark.parametrize("device,gpu", [("cuda", 0), ("cuda:3", 3)])
def test_the_first_gpu_is_the_one_asked_for(tmp_path, device, gpu):
    assert {"--device=cuda", f"--base-gpu-id={gpu}"} <= set(settings(tmp_path, device=device).arguments(7000))
    assert not any(text.startswith("--base-gpu-id") for text in settings(tmp_path).arguments(7000))


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", ""])
def test_a_device_that_is_none_is_refused(tmp_path, device):
    with pytest.raises(ConfigError, match="--device"):
        settings(tmp_path, device=device)


@pytest.mark.parametrize(
    "argument",
    [
        "--disaggregation-decode-retraction-backup=cpu_tensor",
        "--pp-size=1",
        "--nnodes=1",
        "--enable-metrics",
        "--enable-lora-overlap-loading",  # begins like a flag that is refused, and is another
    ],
)
def test_what_works_passes(tmp_path, argument):
    settings(tmp_path, engine_arg=(argument,))


def test_a_checkpoint_is_a_directory(tmp_path):
    with pytest.raises(ConfigError):
        settings("meta-llama/Llama-3.1-8B")


def test_the_early_send_is_off_whatever_is_inherited(tmp_path):
    name = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
    assert settings(tmp_path).environment({name: "1"})[name] == "0"


def test_pages_wait_for_their_writer_whatever_is_inherited(tmp_path):
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    assert settings(tmp_path).environment({name: "0"})[name] == "1"


@pytest.mark.parametrize(("inherited", "expected"), [("", 30.0), ("30", 30.0), ("120", 120.0)])
def test_they_wait_as_long_as_is_safe_or_longer(tmp_path, inherited, expected):
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
    assert float(settings(tmp_path).environment({name: inherited})[name]) == expected
    assert float(settings(tmp_path).environment({})[name]) == 30.0


@pytest.mark.parametrize("inherited", ["0.5", "29.9", "nan", "soon"])
def test_they_wait_no_shorter(tmp_path, inherited):
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
    with pytest.raises(ConfigError, match=name):
        settings(tmp_path).environment({name: inherited})


def test_no_folder_for_metrics_is_inherited(tmp_path):
    assert "PROMETHEUS_MULTIPROC_DIR" not in settings(tmp_path).environment(
        {"PROMETHEUS_MULTIPROC_DIR": "/x"}
    )


def test_only_our_plugin_is_loaded(tmp_path):
    assert settings(tmp_path).environment({"SGLANG_PLUGINS": "smg-zmq"})["SGLANG_PLUGINS"] == "isthmus"


def test_staging_buffers_are_refused(tmp_path):
    with pytest.raises(ConfigError):
        settings(tmp_path).environment({"SGLANG_DISAGG_STAGING_BUFFER": "1"})


def test_each_rank_has_cores_of_its_own_where_there_are_enough(tmp_path, monkeypatch):
    for cores, threads, expected in ((2, 1, "0|1"), (8, 2, "0-1|2-3"), (1, 1, "0|0")):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        environment = settings(tmp_path, num_threads=threads).environment({})
        assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == expected


def test_each_process_of_a_tensor_parallel_rank_has_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for argument in ("--tp-size=2", "--tensor-parallel-size=2"):
        environment = settings(tmp_path, dp_size=1, engine_arg=(argument,)).environment({})
        assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    with pytest.raises(ConfigError, match="--tp-size"):
        settings(tmp_path, engine_arg=("--tp-size=two",)).environment({})


EAGLE = "--speculative-algorithm=EAGLE"
# Four draft tokens in a chain.
CHAIN = (
    EAGLE,
    "--num-reserved-decode-tokens=0",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
)


def test_more_is_reserved_where_drafts_take_more(tmp_path):
    def reserved(*more, **changes):
        arguments = settings(tmp_path, engine_arg=(EAGLE, *more), **changes).arguments(7000)
        return [text for text in arguments if text.startswith("--num-reserved-decode-tokens")]

    assert reserved() == []  # SGLang's own is enough
    assert reserved("--speculative-eagle-topk=8") == [f"--num-reserved-decode-tokens={2 * 8 * 32 + 16}"]
    assert reserved("--speculative-eagle-topk=8", role=Role.PREFILL) == []
    assert reserved("--speculative-eagle-topk=8", "--num-reserved-decode-tokens=9")[-1].endswith("=9")
    with pytest.raises(ConfigError, match="--speculative-eagle-topk must be a number"):
        reserved("--speculative-eagle-topk=many")


@pytest.mark.parametrize(
    "changes,expected",
    [
        ({"kv_pages": 4096}, 4096 - 6),  # the checkpoint's context
        ({"kv_pages": 4096, "engine_arg": ("--context-length=1000",)}, 1000 - 6),
        ({"kv_pages": 64}, 1024 - 512),  # SGLang reserves 512 tokens of a decode rank's pool by default
        ({"kv_pages": 64, "engine_arg": ("--num-reserved-decode-tokens=100",)}, 1024 - 112),
        ({"kv_pages": 64, "engine_arg": ("--num-reserved-decode-tokens=0",)}, 1024 - 32),
        ({"kv_pages": 64, "role": Role.PREFILL}, 1024 - 32),
        # Pages of 16: what SGLang keeps for drafts behind a sequence's tokens, where that is more.
        ({"kv_pages": 64, "engine_arg": (EAGLE, "--num-reserved-decode-tokens=0")}, 1024 - (2 * 4 * 32 + 16)),
        ({"kv_pages": 64, "engine_arg": (EAGLE,)}, 1024 - 512),
        ({"kv_pages": 64, "engine_arg": CHAIN}, 1024 - (2 * 4 + 8 + 16)),
        ({"kv_pages": 64, "engine_arg": CHAIN, "role": Role.PREFILL}, 1024 - 32),
    ],
)
def test_what_can_wait_for_ever_is_beyond_the_context(tmp_path, changes, expected):
    own = settings(tmp_path, **changes)
    assert own.max_context_tokens(of_checkpoint=4096) == expected
    context = 1000 if "--context-length=1000" in own.engine.engine_arg else 4096
    assert own.model_context_tokens(of_checkpoint=4096) == context - 6  # however small the pool


def test_a_pool_that_holds_no_prompt_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--kv-pages=32"):
        settings(tmp_path, kv_pages=32).max_context_tokens(of_checkpoint=4096)


def test_the_plugin_reads_what_the_service_wrote():
    written = PluginSettings(
        "w", (1, 2**64 - 1), 3, 2, 64, "0.0.0.0", "10.0.0.1", "/tmp/reports", "ca", "", ""
    )
    assert PluginSettings.from_environment(written.to_environment()) == written
    assert written.tls().ca.name == "ca"
    with pytest.raises(ConfigError, match=VARIABLE):
        PluginSettings.from_environment({})


def test_sglang_keeps_idle_connections_longer_than_we_do(tmp_path):
    assert int(settings(tmp_path).environment({})["SGLANG_TIMEOUT_KEEP_ALIVE"]) > IDLE_CONNECTION_S


STRETCHED = (["--context-length=131072"], {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})


@pytest.mark.parametrize(
    "stated,engine_args,expected",
    [
        (40960, (), STRETCHED),
        (262144, (), STRETCHED),
        (131072, (), ([], {})),
        (40960, ("--context-length=60000",), ([], {})),
        (40960, ('--json-model-override-args={"max_position_embeddings": 9}',), ([], {})),
    ],
)
def test_sglang_is_told_of_a_context_that_it_would_not_find(tmp_path, stated, engine_args, expected):
    assert settings(tmp_path, engine_arg=engine_args).stretching(stated, 131072) == expected


def test_sglang_s_nixl_is_told_what_ours_would_be(tmp_path):
    backend, parameters = "SGLANG_DISAGGREGATION_NIXL_BACKEND", "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
    nixl = {"nixl_backend": "LIBFABRIC", "nixl_parameter": ("a=1",)}
    told = settings(tmp_path, **nixl).environment({backend: "LIBFABRIC"})
    assert (told[backend], json.loads(told[parameters])) == ("LIBFABRIC", {"a": "1"})
    assert settings(tmp_path).environment({})[backend] == "UCX"
    with pytest.raises(ConfigError, match=f"{backend}=UCX: say it by --nixl-backend"):
        settings(tmp_path, **nixl).environment({backend: "UCX"})
