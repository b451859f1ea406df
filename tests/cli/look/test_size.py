"""`isthmus size` against the pool that an engine really makes, and its sentences."""

import json

import pytest

from exactness.adapters import adapter_of
from exactness.checkpoints import tiny_checkpoint
from exactness.model_configs import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_3_1_8B, QWEN3_5_35B_A3B
from services.cli.look.size import SizeConfig, report, run
from services.cli.model.make_model import ARCHITECTURES
from services.cli.table import format_bytes
from services.engine.torch.runner import TorchRunner
from services.model.layer_groups import layer_groups
from services.model.model_config import Pool, kv_dtype
from services.values.errors import ConfigError


@pytest.mark.exact
def test_a_page_is_as_large_as_the_engine_makes_it(subtests):
    for architecture in ARCHITECTURES:
        with subtests.test(architecture=architecture):
            directory = tiny_checkpoint(architecture)
            runner = TorchRunner(directory, device="cpu", num_pages=4, page_size=16, self_check=False)
            config = json.loads((directory / "config.json").read_text())
            pool = Pool(layer_groups(config).full.token_bytes(kv_dtype(config)), 16, 100)
            assert pool.page_bytes == runner.layout.page_bytes


@pytest.fixture
def llama_8b(tmp_path):
    config = {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def lines_of(capsys, model, *flags):
    assert run([f"--model={model}", *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_pages_and_bytes(subtests, llama_8b, capsys, tmp_path_factory):
    with subtests.test("pages and bytes"):
        lines = lines_of(
            capsys, llama_8b, "--context-tokens=8000", "--conversations=100", "--ranks=8", "--pool-gib=40"
        )
        assert lines == [
            "KV per token       128.0 KiB: 32 layers, 8 KV heads of 128, bfloat16",
            "a page             64 tokens, 8.0 MiB",
            "a conversation     8000 tokens, 125 pages, 1000.0 MiB",
            "100 conversations  --kv-pages=1625 on each decode rank: 12.7 GiB",
            "40 GiB a rank      --kv-pages=5120: 320 conversations on 8 ranks",
        ]
    with subtests.test("a page holds the drafts kv too"):
        config = json.loads((llama_8b / "config.json").read_text()) | {"num_hidden_layers": 4}
        draft = tmp_path_factory.mktemp("draft")
        (draft / "config.json").write_text(json.dumps(config))
        lines = lines_of(capsys, llama_8b, f"--draft-model={draft}", "--context-tokens=8000", "--pool-gib=45")
        assert lines[:3] == [
            "KV per token       128.0 KiB: 32 layers, 8 KV heads of 128, bfloat16",
            "of its draft model 16.0 KiB a token more",
            "a page             64 tokens, 9.0 MiB",
        ]
        assert lines[-1] == "45 GiB a rank      --kv-pages=5120: 40 conversations on 1 ranks"
    with subtests.test("what does not fit is told"):
        flags = ("--context-tokens=10000", "--pool-gib=2", "--concurrency=4")
        *_, held, remark = lines_of(capsys, llama_8b / "config.json", *flags)
        assert held.endswith(
            "1 conversations on 1 ranks; too few for 4 at once: sequences would be retracted"
        )
        assert remark == "the model's context ends at 8192 tokens"
    for flag in ["--ranks=0", "--concurrency=65", "--pool-gib=0"]:
        with subtests.test("nonsense is refused", flag=flag):
            with pytest.raises(SystemExit):
                run([f"--model={llama_8b}", flag])
            assert "--" in capsys.readouterr().err
    with subtests.test("gpus that share a rank are named"):
        config = SizeConfig(model=llama_8b, tp_size=4)
        checkpoint = json.loads((llama_8b / "config.json").read_text())
        assert report(config, checkpoint)[0].startswith("KV per token       32.0 KiB on each of 4 GPUs")
        assert report(config, checkpoint)[3].endswith(" per GPU")
    with subtests.test("a context that is stretched is known"):
        config = json.loads((llama_8b / "config.json").read_text())
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
        (llama_8b / "config.json").write_text(json.dumps({**config, "rope_scaling": yarn}))
        assert not any(
            "context ends" in line for line in lines_of(capsys, llama_8b, "--context-tokens=32768")
        )
        *_, remark = lines_of(capsys, llama_8b, "--context-tokens=32769")
        assert remark == "the model's context ends at 32768 tokens"


def test_whether_all_fits_is_told_and_is_the_exit_code(subtests, tmp_path_factory, capsys):
    # The example of operations.md.
    with subtests.test("whether all fits is told and is the exit code"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
        flags = [f"--model={tmp_path}", "--dp-attention-size=8", "--kv-pages=5120", "--reserve-gib=24"]
        assert run([*flags, "--gpu-gib=140.4"]) == 0
        assert capsys.readouterr().out.splitlines()[-4:] == [
            "weights            90.7 GiB",
            "pool               5120 pages, 21.4 GiB",
            "set aside          24.0 GiB",
            "of 140.4 GiB       4.3 GiB left",
        ]
        assert run([*flags, "--gpu-gib=120"]) == 1
        assert capsys.readouterr().out.splitlines()[-1] == (
            "of 120.0 GiB       16.1 GiB missing: --kv-pages=1275 would fit"
        )
        assert run([*flags, "--gpu-gib=80"]) == 1
        assert capsys.readouterr().out.splitlines()[-1].endswith("missing: the weights alone are too much")
        assert run([*flags, "--gpu-gib=80", "--weights-gib=20"]) == 0
    with subtests.test("what engine torch holds at the start is a verdict of its own"):
        tmp_path = tmp_path_factory.mktemp("case")
        quantization = {"quant_method": "awq", "bits": 4, "group_size": 128}
        (tmp_path / "config.json").write_text(
            json.dumps({**LLAMA_3_1_8B, "quantization_config": quantization})
        )
        flags = [f"--model={tmp_path}", "--conversations=1", "--gpu-gib=12"]
        capsys.readouterr()
        assert run(flags) == 1
        lines = capsys.readouterr().out.splitlines()
        at_start = next(line for line in lines if line.startswith("at start"))
        assert at_start.split(": ")[0].endswith("engine torch holds dequantized weights of 15.0 GiB")
        assert at_start.endswith("4.2 GiB missing")
        assert "of 12.0 GiB" in "".join(lines) and not any("would fit" in line for line in lines)
        assert run([*flags, "--engine=sglang"]) == run([*flags[:-1], "--gpu-gib=24"]) == 0
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
        stated = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(stated))
        assert run(flags) == 1  # That, too, is quantized.
        assert "engine torch holds dequantized weights" in capsys.readouterr().out
    with subtests.test("the drafts weights take memory too"):
        capsys.readouterr()
        model, sizes = tiny_checkpoint(), []
        for flags in ((), (f"--draft-model={model}",)):
            run([f"--model={model}", "--gpu-gib=1", "--kv-pages=10", *flags])
            sizes += [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights")]
        assert [size.split()[1:] for size in sizes] == [["545.2", "KiB"], ["1.1", "MiB"]]
    with subtests.test("a checkpoint that is not there"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="cannot be read"):
            run([f"--model={tmp_path}"])
        (tmp_path / "config.json").write_text("[]")
        with pytest.raises(ConfigError, match="not a JSON object"):
            run([f"--model={tmp_path}"])
    with subtests.test("adapters count, in float32"):
        base = tiny_checkpoint()
        adapter = adapter_of(base, "size", ("q_proj", "o_proj"), rank=4)
        flags = [f"--model={base}", "--conversations=1", "--context-tokens=64", "--gpu-gib=1"]
        assert run([*flags, f"--lora={adapter}", f"--lora={adapter}"]) == 0
        each = 2 * 2 * 4 * (64 + 64) * 4  # layers, linears, rank, inputs and outputs, bytes
        assert f"adapters           {format_bytes(2 * each)}" in capsys.readouterr().out.splitlines()
        with pytest.raises(ConfigError, match="No such file"):
            run([*flags, f"--lora={base}"])


def test_what_is_beside_the_pages(subtests, tmp_path_factory, capsys):
    # A slot for each of 4 sequences that run on a rank, and for each checkpoint.
    with subtests.test("states are reckoned beside the pages"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_35B_A3B))
        flags = ("--conversations=64", "--concurrency=8", "--ranks=2", "--checkpoints=20", "--pool-gib=4")
        lines = lines_of(capsys, tmp_path, *flags)
        assert lines[0] == "KV per token       20.0 KiB: 10 layers, 2 KV heads of 256, bfloat16"
        assert lines[3:6] == [
            "a state            61.9 MiB: 30 recurrent layers",
            "its pool           --state-slots=24 on each decode rank: 1.5 GiB (4 running, 20 checkpoints)",
            "64 conversations   --kv-pages=2048 on each decode rank: 2.5 GiB",
        ]
        pages = (4 * 2**30 - 24 * 30 * (8192 * 4 * 2 + 2**21)) // (64 * 20 * 1024)
        assert lines[6].startswith(f"4 GiB a rank       --kv-pages={pages}: ")
    # A tail of 127 tokens lies on three pages of 64 at most; a chunk of 512 tokens takes eight more.
    with subtests.test("windows are reckoned beside the pages"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_120B))
        lines = lines_of(capsys, tmp_path, "--resume-points=10")
        assert lines[3:5] == [
            "a tail             up to 6.8 MiB: 18 layers, 8 KV heads of 64, the last 128 tokens",
            "its pool           --window-pages=41 on each decode rank: 92.2 MiB (1 running, 10 checkpoints)",
        ]
        assert lines[-1] == "SGLang keeps windows whole unless told otherwise: 72.0 KiB a token, and no tails"
    with subtests.test("what is beside the pages must fit too"):
        tmp_path = tmp_path_factory.mktemp("case")
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_5_35B_A3B))
        flags = [f"--model={tmp_path}", "--weights-gib=10", "--kv-pages=1", "--reserve-gib=0"]
        assert run([*flags, "--checkpoints=99", "--gpu-gib=16.1"]) == 0  # 100 slots are 6.04 GiB
        assert "beside the pages   6.0 GiB" in capsys.readouterr().out.splitlines()
        assert run([*flags, "--resume-points=99", "--gpu-gib=16"]) == 1
        assert capsys.readouterr().out.splitlines()[-1].endswith("what is beside the pages is too much")


def test_what_tiers_hold(subtests, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_1_8B))
    flags = ("--context-tokens=8000", "--conversations=20", "--ranks=2")
    tiers = ("--kv-tier=memory:20GiB", "--kv-tier=/nvme/isthmus:1TiB")
    with subtests.test("tokens and conversations, and the memory of a rank"):
        *_, memory, read, file, needed = lines_of(capsys, tmp_path, *flags, *tiers)
        slots = (20 * 2**30 - 8192) // (64 * 128 * 1024 + 64)
        assert memory.split(": ") == [
            f"memory:20GiB       {slots * 64} tokens on each rank",
            f"{slots // 125 * 2} conversations on 2 ranks",
        ]
        assert read == "read               49152 tokens a second"
        assert file.startswith("/nvme/isthmus:1TiB 8388")
        assert needed == (
            "memory of a rank   45.7 GiB: weights 15.0 GiB, --kv-pages=1250, tiers 20.0 GiB, and 1.0 GiB"
        )
    with subtests.test("a tier that is slower than computing is of no use"):
        rates = ("--compute-tokens-per-s=20000", "--disk-gib-per-s=2")
        *_, read, _, slow, _ = lines_of(capsys, tmp_path, *flags, *tiers, *rates)
        assert read.endswith("2.5 times as fast as computing")
        assert slow.endswith(" 0.8 times as fast as computing: a rank would leave it alone")
    with subtests.test("its memory counts for what fits"):
        fitting = ("--gpu-gib=46", "--reserve-gib=1")
        assert run([f"--model={tmp_path}", *flags, *tiers, *fitting]) == 0
        assert "tiers in memory    20.0 GiB" in capsys.readouterr().out.splitlines()
        assert run([f"--model={tmp_path}", *flags, "--kv-tier=memory:21GiB", *fitting]) == 1
        capsys.readouterr()
    with subtests.test("beside a GPU it is the host's, and nobody has measured how fast it is"):
        assert run([f"--model={tmp_path}", *flags, *tiers, "--device=cuda", "--gpu-gib=28"]) == 0
        told = capsys.readouterr().out.splitlines()
        assert "host memory        20.0 GiB more than without tiers, on each rank" in told
        assert not [line for line in told if line.startswith(("read ", "tiers in memory", "memory of a"))]
    (tmp_path / "hybrid.json").write_text(json.dumps(QWEN3_5_35B_A3B))
    with subtests.test("a hybrid's two checkpoints a conversation count, as slots of whole blocks"):
        hybrid = (f"--model={tmp_path / 'hybrid.json'}", "--context-tokens=6400", "--kv-tier=memory:10GiB")
        assert run([*hybrid, "--ranks=1"]) == 0
        *_, tier, read, needed = capsys.readouterr().out.splitlines()
        # Of the 8,191 slots of 1.25 MiB a conversation has 100 blocks, and two states of 61.9 MiB.
        assert tier.endswith(" 262080 tokens on each rank: 40 conversations on 1 ranks")
        assert read.endswith(" 209715 tokens a second")
        assert "beside them 2.0 GiB, tiers 10.0 GiB" in needed
    for refused, why in [
        (("--kv-tier=memory:1MiB",), "have no room for a block"),
        (("--kv-tier=/tiers:1GiB", "--kv-tier=/tiers/:2GiB"), "two tiers are in one place"),
        (("--kv-tier=memory:1GiB", "--engine=sglang"), "not for --engine=sglang"),
        (("--kv-tier=memory:1GiB", "--tp-size=2"), "one GPU each"),
        (("--kv-tier=memory:100MiB", f"--model={tmp_path / 'hybrid.json'}"), "room for two checkpoints"),
    ]:
        refusing = pytest.raises(ConfigError, match=why)
        with subtests.test("what the ranks refuse is refused", refused=refused), refusing:
            run([f"--model={tmp_path}", *refused])
