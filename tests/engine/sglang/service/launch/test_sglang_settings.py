"""These tests show what SGLang is started with, and what is refused beforehand."""

import json
from contextlib import nullcontext

import pytest

from engine.sglang.settings import sglang_settings
from services.engine.sglang.plugin_settings import VARIABLE, PluginSettings
from services.engine.sglang.service.sglang_settings import IDLE_CONNECTION_S, Nodes
from services.values.errors import ConfigError
from services.values.rank import Role


def settings(tmp_path, **changes):
    return sglang_settings(tmp_path, **{"dp_size": 2, "index_block": 64, **changes})


def test_flags_that_sglang_is_started_with(subtests, tmp_path):
    with subtests.test("decode has the radix cache"):
        arguments = settings(tmp_path).arguments(7000)
        assert "--disaggregation-decode-enable-radix-cache" in arguments
        assert {"--dp-size=2", "--max-total-tokens=8192"} <= set(arguments)
        without = settings(tmp_path, decode_cache="off").arguments(7000)
        assert "--disaggregation-decode-enable-radix-cache" not in without
    for engine_args, limits in [
        ((), {"--max-running-requests=8", "--chunked-prefill-size=64"}),
        # SGLang divides them by the number of DP ranks.
        (("--enable-dp-attention",), {"--max-running-requests=16", "--chunked-prefill-size=128"}),
    ]:
        with subtests.test(engine_args=engine_args, limits=limits):
            assert limits <= set(settings(tmp_path, engine_arg=engine_args).arguments(7000))
    with subtests.test("prefill without a cache"):
        arguments = settings(tmp_path, role=Role.PREFILL, prefill_cache="off").arguments(7000)
        assert "--disable-radix-cache" in arguments
        assert not any("decode" in text for text in arguments)
    for role in Role:
        with subtests.test(role=role):
            assert "--enable-metrics" in settings(tmp_path, role=role).arguments(7000)
    for role in Role:
        with subtests.test(role=role):
            arguments = settings(tmp_path, role=role, engine_arg=("--grammar-backend=xgrammar",)).arguments(
                7000
            )
            assert arguments.index("--grammar-backend=llguidance") < arguments.index(
                "--grammar-backend=xgrammar"
            )
            assert "--constrained-json-disable-any-whitespace" in arguments
    with subtests.test("the users arguments come last and whole"):
        ours = ("--mem-fraction-static=0.8", '--json-model-override-args={"a": 1, "b": 2}')
        assert tuple(settings(tmp_path, engine_arg=ours).arguments(7000)[-2:]) == ours
    for device, gpu in [("cuda", 0), ("cuda:3", 3)]:
        with subtests.test(device=device, gpu=gpu):
            assert {"--device=cuda", f"--base-gpu-id={gpu}"} <= set(
                settings(tmp_path, device=device).arguments(7000)
            )
            assert not any(text.startswith("--base-gpu-id") for text in settings(tmp_path).arguments(7000))


def test_flags_that_are_refused(subtests, tmp_path):
    for argument in [
        "page-size=16",
        "--page-size=16",
        "--disable-radix-cache",
        "--dp-size=4",
        "--disaggregation-transfer-backend=mooncake",
        "--enable-hisparse",
        "--enable-pd-role-switch",
        "--radix-cache-backend=mine",
        "--disaggregation-decode-allocation-policy=prefill_complete",
        "--pp-size=2",
        "--pipeline-parallel-size=2",
        "--attn-cp-size=2",
        "--dcp-size=2",
        "--enable-prefill-cp",
        "--attn-dp-size=2",
        "--enable-lora",
        "--lora-paths=a=/adapters/a",
        "--config=flags.yaml",
    ]:
        with subtests.test(argument=argument), pytest.raises(ConfigError, match=argument.split("=")[0]):
            settings(tmp_path, engine_arg=(argument,))
    for argument in [
        "--enable-hicache",
        "--hicache-storage-backend=file",
        "--enable-lmcache",
        "--lmcache-config-file=x.yaml",
        "--enable-flexkv",
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=mooncake",
        "--disaggregation-decode-enable-offload-kvcache",
        "--disaggregation-decode-retraction-backup=host_pool",
        "--disaggregation-decode-host-receive-threshold=0.5",
    ]:
        with (
            subtests.test(argument=argument),
            pytest.raises(ConfigError, match=f"{argument.split('=')[0]}.*: the index knows one tier"),
        ):
            settings(tmp_path, engine_arg=(argument,))
    for argument in [
        "--speculative-algo=EAGLE",
        "--enable-hier",
        "--hi=2",
        "--dp=2",
        "--enable-dp-att",
        "--tp=2",
    ]:
        with (
            subtests.test(argument=argument),
            pytest.raises(ConfigError, match=f"{argument.split('=')[0]}: write the flag out"),
        ):
            settings(tmp_path, engine_arg=(argument,))
    for argument in ["--enable-hierarchical-cache", "--hicache-ratio=2", "--hicache-size=8"]:
        with subtests.test(argument=argument):
            with pytest.raises(ConfigError, match=f"{argument.split('=')[0]}: only prefill can have it"):
                settings(tmp_path, engine_arg=(argument,))
            assert argument in settings(tmp_path, engine_arg=(argument,), role=Role.PREFILL).arguments(7000)
    for device in ["gpu", "cuda:", "cuda:x", "cpu:0", ""]:
        with subtests.test(device=device), pytest.raises(ConfigError, match="--device"):
            settings(tmp_path, device=device)
    for argument in [
        "--disaggregation-decode-retraction-backup=cpu_tensor",
        "--pp-size=1",
        "--nnodes=1",
        "--enable-metrics",
        "--enable-lora-overlap-loading",  # begins like a flag that is refused, and is another
    ]:
        with subtests.test(argument=argument):
            settings(tmp_path, engine_arg=(argument,))
    with subtests.test("a checkpoint is a directory"), pytest.raises(ConfigError):
        settings("meta-llama/Llama-3.1-8B")


def test_memory_for_adapters_is_reserved_where_they_may_be_loaded(subtests, tmp_path):
    with subtests.test("not otherwise"):
        assert not any("lora" in text for text in settings(tmp_path).arguments(7000))
    for device, backend in (("cpu", True), ("cuda", False)):
        with subtests.test(device):
            own = settings(tmp_path, lora_dir=tmp_path, device=device)
            arguments = own.arguments(7000)
            assert {"--enable-lora", "--max-lora-rank=64"} < {*arguments} and own.has_adapters
            assert ("--lora-backend=torch_native" in arguments) == backend
    with subtests.test("the operator's word comes last"):
        own = settings(tmp_path, lora_dir=tmp_path, engine_arg=("--max-lora-rank=8",))
        assert own.arguments(7000)[-1] == "--max-lora-rank=8"
    with subtests.test("DP attention"), pytest.raises(ConfigError, match="pinned adapters alone"):
        settings(tmp_path, lora_dir=tmp_path, engine_arg=("--enable-dp-attention",))


FIRST = "--dist-init-addr=10.0.0.1:5000"


def test_nodes_of_one_worker(subtests, tmp_path):
    with subtests.test("the service's port is the one before SGLang's"):
        given = ("--nnodes=2", "--tp-size=4", FIRST)
        assert settings(tmp_path, dp_size=1, engine_arg=given).nodes == Nodes(2, 0, "10.0.0.1", 4999)
        second = settings(tmp_path, dp_size=1, engine_arg=(*given, "--node-rank=1"))
        assert second.nodes == Nodes(2, 1, "10.0.0.1", 4999)
        assert tuple(second.arguments(7000)[-4:]) == (*given, "--node-rank=1")
    with subtests.test("one node"):
        assert settings(tmp_path, engine_arg=("--nnodes=1", FIRST)).nodes is None
    for given, why in [
        (("--nnodes=2", "--tp-size=2"), "--nnodes=2 needs --dist-init-addr=HOST:PORT"),
        (("--nnodes=2", "--tp-size=2", "--dist-init-addr=first"), "needs --dist-init-addr=HOST:PORT"),
        (("--nnodes=2", "--tp-size=2", "--dist-init-addr=first:1"), "needs --dist-init-addr=HOST:PORT"),
        (("--nnodes=two", "--tp-size=2", FIRST), "--nnodes must be a number, got 'two'"),
        (("--nnodes=2", "--tp-size=2", FIRST, "--node-rank=2"), "--nnodes is 2, so the last one is 1"),
        (("--nnodes=2", "--tp-size=3", FIRST), "each node has as many processes, and --tp-size is 3"),
        (("--nnodes=2", FIRST), "and --tp-size is 1"),
    ]:
        with subtests.test(given=given), pytest.raises(ConfigError, match=why):
            settings(tmp_path, dp_size=1, engine_arg=given)
    with subtests.test("DP ranks over nodes"):
        given = ("--nnodes=2", "--tp-size=2", FIRST)
        with pytest.raises(ConfigError, match="over nodes with --enable-dp-attention only"):
            settings(tmp_path, engine_arg=given)
        assert settings(tmp_path, engine_arg=(*given, "--enable-dp-attention")).nodes


ALGORITHM = "--speculative-algorithm"


def test_speculation_with_the_decode_cache(subtests, tmp_path):
    for algorithm in ["EAGLE", "EAGLE3", "eagle3", "NEXTN", "DSPARK"]:
        with subtests.test(algorithm=algorithm):
            own = settings(tmp_path, engine_arg=(f"{ALGORITHM}={algorithm}",))
            assert f"{ALGORITHM}={algorithm}" in own.arguments(7000)
    for algorithm in REFUSED:
        with subtests.test(algorithm=algorithm):
            argument = (f"{ALGORITHM}={algorithm}",)
            with pytest.raises(
                ConfigError, match=f"{ALGORITHM}={algorithm}: .* EAGLE, EAGLE3, NEXTN and DSPARK only"
            ):
                settings(tmp_path, engine_arg=argument)
            settings(tmp_path, engine_arg=argument, decode_cache="off")
            settings(tmp_path, engine_arg=argument, role=Role.PREFILL)
    for flag in ["--speculative-draft-model-path", "--speculative-draft-model"]:
        for algorithm in ["EAGLE", "nextn"]:
            with subtests.test(flag=flag, algorithm=algorithm):
                draft = tmp_path / f"draft-{algorithm}{flag}"
                draft.mkdir()
                arguments = (f"{ALGORITHM}={algorithm}", f"{flag}={draft}")
                with pytest.raises(ConfigError, match=f"config.json of the draft {draft}"):
                    settings(tmp_path, engine_arg=arguments)
                for architecture, refused in (
                    ("LlamaForCausalLMEagle", False),
                    ("Gemma4AssistantForCausalLM", True),
                ):
                    (draft / "config.json").write_text(json.dumps({"architectures": [architecture]}))
                    with (
                        pytest.raises(ConfigError, match="FROZEN_KV_MTP with this draft")
                        if refused
                        else nullcontext()
                    ):
                        settings(tmp_path, engine_arg=arguments)
                settings(tmp_path, engine_arg=arguments, role=Role.PREFILL)


REFUSED = ["STANDALONE", "NGRAM", "DFLASH", "FROZEN_KV_MTP", "UNO", "NONE", "", "a-plugin's"]


def test_the_environment_that_sglang_gets(subtests, tmp_path):
    with subtests.test("the early send is off whatever is inherited"):
        name = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
        assert settings(tmp_path).environment({name: "1"})[name] == "0"
    with subtests.test("pages wait for their writer whatever is inherited"):
        name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
        assert settings(tmp_path).environment({name: "0"})[name] == "1"
    for inherited, expected in [("", 30.0), ("30", 30.0), ("120", 120.0)]:
        with subtests.test(inherited=inherited, expected=expected):
            name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
            assert float(settings(tmp_path).environment({name: inherited})[name]) == expected
            assert float(settings(tmp_path).environment({})[name]) == 30.0
    for inherited in ["0.5", "29.9", "nan", "soon"]:
        with subtests.test(inherited=inherited):
            name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"
            with pytest.raises(ConfigError, match=name):
                settings(tmp_path).environment({name: inherited})
    with subtests.test("no folder for metrics is inherited"):
        assert "PROMETHEUS_MULTIPROC_DIR" not in settings(tmp_path).environment(
            {"PROMETHEUS_MULTIPROC_DIR": "/x"}
        )
    with subtests.test("only our plugin is loaded"):
        assert settings(tmp_path).environment({"SGLANG_PLUGINS": "smg-zmq"})["SGLANG_PLUGINS"] == "isthmus"
    with subtests.test("staging buffers are refused"), pytest.raises(ConfigError):
        settings(tmp_path).environment({"SGLANG_DISAGG_STAGING_BUFFER": "1"})
    with subtests.test("sglang keeps idle connections longer than we do"):
        assert int(settings(tmp_path).environment({})["SGLANG_TIMEOUT_KEEP_ALIVE"]) > IDLE_CONNECTION_S
    with subtests.test("sglang s nixl is told what ours would be"):
        backend, parameters = (
            "SGLANG_DISAGGREGATION_NIXL_BACKEND",
            "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS",
        )
        nixl = {"nixl_backend": "LIBFABRIC", "nixl_parameter": ("a=1",)}
        told = settings(tmp_path, **nixl).environment({backend: "LIBFABRIC"})
        assert (told[backend], json.loads(told[parameters])) == ("LIBFABRIC", {"a": "1"})
        assert settings(tmp_path).environment({})[backend] == "UCX"
        with pytest.raises(ConfigError, match=f"{backend}=UCX: say it by --nixl-backend"):
            settings(tmp_path, **nixl).environment({backend: "UCX"})


def test_processes_have_cores_of_their_own_where_there_are_enough(subtests, tmp_path, monkeypatch):
    with subtests.test("each rank has cores of its own where there are enough"):
        for cores, threads, expected in ((2, 1, "0|1"), (8, 2, "0-1|2-3"), (1, 1, "0|0")):
            monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
            environment = settings(tmp_path, num_threads=threads).environment({})
            assert environment["SGLANG_CPU_OMP_THREADS_BIND"] == expected
    with subtests.test("each process of a tensor parallel rank has its cores"):
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


def test_how_long_a_context_may_be(subtests, tmp_path):
    for changes, expected in [
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
    ]:
        with subtests.test(changes=changes, expected=expected):
            own = settings(tmp_path, **changes)
            assert own.max_context_tokens(of_checkpoint=4096) == expected
            context = 1000 if "--context-length=1000" in own.engine.engine_arg else 4096
            assert own.model_context_tokens(of_checkpoint=4096) == context - 6  # however small the pool
    with (
        subtests.test("a pool that holds no prompt is refused"),
        pytest.raises(ConfigError, match="--kv-pages=32"),
    ):
        settings(tmp_path, kv_pages=32).max_context_tokens(of_checkpoint=4096)
    for stated, engine_args, expected in [
        (40960, (), STRETCHED),
        (262144, (), STRETCHED),
        (131072, (), ([], {})),
        (40960, ("--context-length=60000",), ([], {})),
        (40960, ('--json-model-override-args={"max_position_embeddings": 9}',), ([], {})),
    ]:
        with subtests.test(stated=stated, engine_args=engine_args, expected=expected):
            assert settings(tmp_path, engine_arg=engine_args).stretching(stated, 131072) == expected


def test_the_plugin_reads_what_the_service_wrote():
    written = PluginSettings(
        "w", (1, 2**64 - 1), 3, 2, 64, "0.0.0.0", "10.0.0.1", "/tmp/reports", "ca", "", ""
    )
    assert PluginSettings.from_environment(written.to_environment()) == written
    assert written.tls().ca.name == "ca"
    with pytest.raises(ConfigError, match=VARIABLE):
        PluginSettings.from_environment({})


STRETCHED = (["--context-length=131072"], {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
