"""What is wrong is told before anything is started."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.local import cluster, preflight
from services.cli.local.cluster import LocalCluster, Shape
from services.values.errors import ConfigError, Unavailable


@pytest.fixture
def checkpoint(tmp_path):
    """All files that a look from outside looks for."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def check(checkpoint, **shape):
    LocalCluster(Shape(checkpoint, checkpoint, **shape), lambda name, line: None).check()


def test_what_can_work_passes_and_starts_nothing(checkpoint):
    before = sorted(checkpoint.iterdir())
    check(checkpoint)
    assert sorted(checkpoint.iterdir()) == before


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", '{"quantization_config": {"quant_method": "fp8"}}', "is quantized"),
        (
            "config.json",
            '{"architectures": ["LlamaForCausalLM"], "model_type": "qwen2"}',
            "contradicts itself",
        ),
        ("model.safetensors", None, "no weights"),
        ("tokenizer.json", None, "no tokenizer"),
    ],
)
def test_a_checkpoint_that_cannot_work_is_refused(checkpoint, name, content, said):
    (checkpoint / name).unlink()
    if content is not None:
        (checkpoint / name).write_text(content)
    with pytest.raises(ConfigError, match=r"--model: .*") as refusal:
        check(checkpoint)
    assert said in str(refusal.value)


def test_no_directory_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"--model: there is no directory .*nowhere"):
        check(tmp_path / "nowhere")


def test_other_engines_bring_their_own_demands(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "config.json").unlink()
    check(checkpoint, rank_flags=("--engine=fake",))
    with pytest.raises(ConfigError, match=r"config\.json"):
        check(checkpoint, rank_flags=("--engine=sglang",))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"rank_flags": ("--kv-pages=-5",)}, "isthmus, decode: --kv-pages"),
        ({"router_flags": ("--plans=both",)}, "isthmus, router: --plans"),
        ({"common_flags": ("--no-such=1",)}, "there is no flag --no-such"),
    ],
)
def test_flags_that_a_service_would_refuse_are(checkpoint, flags, said, capsys):
    with pytest.raises(SystemExit) as refusal:
        check(checkpoint, **flags)
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err


def test_keys_and_certificates_that_are_not_there_are_told(checkpoint):
    with pytest.raises(ConfigError, match="--api-key-file"):
        check(checkpoint, router_flags=("--api-key-file=/nowhere",))


@pytest.mark.parametrize(("flag", "name"), [("port", "--port"), ("http_port", "--http-port")])
def test_a_port_that_somebody_listens_on_is_told(checkpoint, flag, name):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{name}: cannot listen on port {port}"):
            check(checkpoint, **{flag: port})
        with pytest.raises(ConfigError, match=f"{name}: cannot listen on port {port}"):
            check(checkpoint, routers=2, **{flag: port - 1})  # of the second router


def test_a_folder_has_one_cluster(tmp_path):
    """Whoever holds it is named; it is free as soon as that process is gone, however it went."""
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


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
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


@pytest.mark.parametrize(
    "flags,free_gib,said",
    [
        ((), 50, ""),
        (
            (),
            40,
            r"3 ranks take 47\.5 GiB, 44\.9 GiB of it weights, and 40\.0 GiB .*: take a smaller model",
        ),
        (("--dtype=float32",), 50, "take 92.7 GiB, 89.7 GiB of it weights"),
        (("--kv-pages=300",), 50, r"take 54\.2 GiB, .* are free: --kv-pages=122 would fit"),
        (("--device=cuda",), 1, ""),
        (("--engine=fake",), 1, ""),
        ((), None, ""),
    ],
)
def test_what_does_not_fit_is_told(checkpoint, flags, free_gib, said):
    (checkpoint / "config.json").write_text(json.dumps(LARGE))
    ranks = [preflight.rank_config("p", ["--worker=p", f"--model={checkpoint}", *flags])]
    ranks += [preflight.rank_config("d", ["--worker=d", f"--model={checkpoint}", "--dp-size=2", *flags])]
    free = free_gib and free_gib << 30
    if not said:
        preflight.check_memory(checkpoint, ranks, free, 64 << 30)
        return
    with pytest.raises(Unavailable, match=said):  # another try may do
        preflight.check_memory(checkpoint, ranks, free, 128 << 30)
    with pytest.raises(ConfigError, match=said):
        preflight.check_memory(checkpoint, ranks, free, free)


@pytest.mark.parametrize(
    ("flags", "free_gib", "pages"), [((), 50, 61), ((), 1000, 2048), (("--kv-pages=9",), 50, None)]
)
def test_a_pool_that_nobody_sizes_has_half_of_what_is_left(checkpoint, monkeypatch, flags, free_gib, pages):
    """Of three ranks, whose weights take 44.9 GiB."""
    (checkpoint / "config.json").write_text(json.dumps(LARGE))
    monkeypatch.setattr(cluster.memory, "available_bytes", lambda: free_gib << 30)
    monkeypatch.setattr(cluster.memory, "total_bytes", lambda: 2000 << 30)
    local = LocalCluster(Shape(checkpoint, checkpoint, rank_flags=flags), lambda name, line: None)
    local.check()
    assert local.kv_pages == pages
    told = [flag for _, module, own in local._plan() for flag in own if flag.startswith("--kv-pages")]
    assert told == (["--kv-pages=9"] * 2 if pages is None else [f"--kv-pages={pages}"] * 2)


def test_a_family_of_unknown_size_is_not_judged(checkpoint):
    ranks = [preflight.rank_config("p", ["--worker=p", f"--model={checkpoint}"])]
    assert preflight.check_memory(checkpoint, ranks, 1, 1) is None


def test_an_etcd_that_is_not_there_is_told(monkeypatch, tmp_path):
    preflight.check_etcd(("e:1",))
    preflight.check_etcd(())
    monkeypatch.setattr(preflight, "etcd_binary", lambda: tmp_path / "etcd")
    with pytest.raises(ConfigError, match="cannot be run: install"):
        preflight.check_etcd(())
    preflight.check_etcd(("e:1",))
