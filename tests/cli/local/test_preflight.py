"""What is wrong is told before anything is started."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.local import local_cluster, preflight
from services.cli.local.local_cluster import LocalCluster, Shape
from services.values.errors import ConfigError, Unavailable

pytestmark = pytest.mark.long


def whole_checkpoint(folder):
    """Write all files that a look from outside looks for."""
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").touch()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    return whole_checkpoint(tmp_path)


def check(checkpoint, **shape):
    LocalCluster(Shape(checkpoint, checkpoint, **shape), lambda name, line: None).check()


def test_checkpoints(subtests, tmp_path_factory):
    with subtests.test("one that can work passes, and nothing is written"):
        checkpoint = whole_checkpoint(tmp_path_factory.mktemp("whole"))
        before = sorted(checkpoint.iterdir())
        check(checkpoint)
        assert sorted(checkpoint.iterdir()) == before
    with (
        subtests.test("no directory"),
        pytest.raises(ConfigError, match=r"--model: there is no directory .*nowhere"),
    ):
        check(checkpoint / "nowhere")
    for name, content, said in [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"quantization_config": {"quant_method": "quark"}}', "quantized by 'quark' are not"),
        (
            "config.json",
            '{"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}',
            "contradicts itself",
        ),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
    ]:
        with subtests.test(name=name, content=content):
            checkpoint = whole_checkpoint(tmp_path_factory.mktemp("broken"))
            (checkpoint / name).unlink()
            if content is not None:
                (checkpoint / name).write_text(content)
            with pytest.raises(ConfigError, match=r"--model: .*") as refusal:
                check(checkpoint)
            assert said in str(refusal.value)


def test_demands_of_other_engines_flags_and_files(subtests, checkpoint, capsys):
    for flags, said in [
        ({"rank_flags": ("--kv-pages=-5",)}, "isthmus, decode: --kv-pages"),
        ({"router_flags": ("--plans=both",)}, "isthmus, router: --plans"),
        ({"common_flags": ("--no-such=1",)}, "there is no flag --no-such"),
    ]:
        with subtests.test("flags that a service would refuse are", flags=flags, said=said):
            with pytest.raises(SystemExit) as refusal:
                check(checkpoint, **flags)
            assert refusal.value.code == 2
            assert said in capsys.readouterr().err
    with subtests.test("a key that is not there"), pytest.raises(ConfigError, match="--api-key-file"):
        check(checkpoint, router_flags=("--api-key-file=/nowhere",))
    with (
        subtests.test("tokens alone, of which it has none"),
        pytest.raises(ConfigError, match="--jwks-file needs"),
    ):
        check(checkpoint, router_flags=("--jwks-file=/nowhere",))
    with subtests.test("other engines bring their own demands"):
        (checkpoint / "model.safetensors").unlink()
        (checkpoint / "config.json").unlink()
        check(checkpoint, rank_flags=("--engine=fake",))
        with pytest.raises(ConfigError, match=r"config\.json"):
            check(checkpoint, rank_flags=("--engine=sglang",))


def test_a_port_that_somebody_listens_on_is_told(subtests, checkpoint):
    for flag, name in [("port", "--port"), ("http_port", "--http-port")]:
        with subtests.test(flag=flag, name=name), socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"{name}: cannot listen on port {port}"):
                check(checkpoint, **{flag: port})
            with pytest.raises(ConfigError, match=f"{name}: cannot listen on port {port}"):
                check(checkpoint, routers=2, **{flag: port - 1})  # of the second router


def test_a_folder_has_one_cluster(subtests, tmp_path):
    # Whoever holds it is named; it is free as soon as that process is gone, however it went.
    with subtests.test("a folder has one cluster"):
        code = (
            "import sys, time; from pathlib import Path; from services.cli.local.preflight import sole_user\n"
            f"with sole_user(Path({str(tmp_path)!r})): print('held', flush=True); time.sleep(60)"
        )
        env = {**os.environ, "PYTHONPATH": str(Path(preflight.__file__).parents[3])}
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as holder:
            assert holder.stdout.readline() == b"held\n"
            refusal = f"--data-dir: .* is in use by process {holder.pid} "
            with pytest.raises(ConfigError, match=refusal), preflight.sole_user(tmp_path):
                pass
            holder.kill()
        with preflight.sole_user(tmp_path):
            pass
    with subtests.test("a folder that cannot be made is told"):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="--data-dir"), preflight.sole_user(tmp_path / "file" / "run"):
            pass


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def test_memory(subtests, checkpoint, monkeypatch):
    with subtests.test("a family of unknown size is not judged"):
        ranks = [preflight.rank_config("p", ["--worker=p", f"--model={checkpoint}"])]
        assert preflight.check_memory(checkpoint, ranks, 1, 1) is None
    for flags, free_gib, said in [
        ((), 50, ""),
        (
            (),
            40,
            r"3 ranks take 47\.5 GiB, 44\.9 GiB of it weights, and 40\.0 GiB .*: take a smaller model",
        ),
        (("--dtype=float32",), 50, "take 92.7 GiB, 89.7 GiB of it weights"),
        (("--kv-pages=300",), 50, r"take 54\.2 GiB, .* are free: --kv-pages=122 would fit"),
        (("--kv-tier=memory:20GiB",), 50, r"--kv-tier: \d+ bytes of memory do not fit into"),
        (("--device=cuda",), 1, ""),
        (("--device=cuda", "--kv-tier=memory:20GiB"), 50, r"--kv-tier: \d+ bytes of memory do not fit"),
        (("--engine=fake",), 1, ""),
        ((), None, ""),
    ]:
        with subtests.test("what does not fit is told", flags=flags, free_gib=free_gib, said=said):
            (checkpoint / "config.json").write_text(json.dumps(LARGE))
            ranks = [preflight.rank_config("p", ["--worker=p", f"--model={checkpoint}", *flags])]
            ranks += [
                preflight.rank_config("d", ["--worker=d", f"--model={checkpoint}", "--dp-size=2", *flags])
            ]
            free = free_gib and free_gib << 30
            if not said:
                preflight.check_memory(checkpoint, ranks, free, 64 << 30)
                continue
            with pytest.raises(Unavailable, match=said):  # another try may do
                preflight.check_memory(checkpoint, ranks, free, 128 << 30)
            with pytest.raises(ConfigError, match=said):
                preflight.check_memory(checkpoint, ranks, free, free)
    # Of three ranks, whose weights take 44.9 GiB.
    tiers = ("--kv-tier=memory:1GiB",)
    for flags, free_gib, pages in [
        *(((), 50, 61), (tiers, 53, 61), ((), 1000, 2048)),
        (("--kv-pages=9",), 50, None),
    ]:
        with (
            subtests.test(
                "a pool that nobody sizes has half of what is left",
                flags=flags,
                free_gib=free_gib,
                pages=pages,
            ),
            monkeypatch.context() as patch,
        ):
            (checkpoint / "config.json").write_text(json.dumps(LARGE))
            patch.setattr(local_cluster.memory, "available_bytes", lambda free=free_gib: free << 30)
            patch.setattr(local_cluster.memory, "total_bytes", lambda: 2000 << 30)
            local = LocalCluster(Shape(checkpoint, checkpoint, rank_flags=flags), lambda name, line: None)
            local.check()
            assert local.kv_pages == pages
            told = [flag for _, module, own in local._plan() for flag in own if flag.startswith("--kv-pages")]
            assert told == (["--kv-pages=9"] * 2 if pages is None else [f"--kv-pages={pages}"] * 2)


def test_routers_are_told_how_long_prefills_chunks_are(checkpoint, subtests):
    for flags, tokens in [((), 512), (("--chunk-size=96",), 96), (("--device=cuda",), 2048)]:
        with subtests.test(flags=flags):
            local = LocalCluster(Shape(checkpoint, checkpoint, rank_flags=flags), lambda name, line: None)
            local.check()
            [own] = [flags for _, module, flags in local._plan() if module == "services.router"]
            assert f"--chunk-size={tokens}" in own


def test_an_etcd_that_is_not_there_is_told(monkeypatch, tmp_path):
    preflight.check_etcd(("e:1",))
    preflight.check_etcd(())
    monkeypatch.setattr(preflight, "etcd_binary", lambda: tmp_path / "etcd")
    with pytest.raises(ConfigError, match="cannot be run: install"):
        preflight.check_etcd(())
    preflight.check_etcd(("e:1",))
