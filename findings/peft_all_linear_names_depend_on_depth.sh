#!/usr/bin/env bash
# PEFT 0.21.2 saves target_modules="all-linear" in adapter_config.json under two kinds of names. Where fewer than 20
# layers matched, each is named by its full path (model.layers.0.self_attn.q_proj); from 20 on they become the few
# last parts that they have in common (q_proj). So the adapter of a Llama of two layers, which a test makes, has other
# target_modules than that of a real one, and a reader that compares them with q_proj, k_proj and so on finds none.
#
# Seen on Python 3.11 with transformers 5.19.0, a Llama with seven linear layers in each decoder layer:
#   2 layers: 14 names, model.layers.0.mlp.down_proj and so on
#   3 layers: 7 names, down_proj gate_proj k_proj o_proj q_proj up_proj v_proj
#   2 layers, target_modules=["q_proj", "v_proj"]: q_proj v_proj
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat >"$folder/names.py" <<'PYTHON'
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def names_of(num_layers, targets):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets))
    with tempfile.TemporaryDirectory() as written:
        adapted.save_pretrained(written)
        return sorted(json.loads((Path(written) / "adapter_config.json").read_text())["target_modules"])


two, three = names_of(2, "all-linear"), names_of(3, "all-linear")
named = names_of(2, ["q_proj", "v_proj"])
print("peft", version("peft"), "transformers", version("transformers"))
print("2 layers:", len(two), "names,", two[0], "and so on")
print("3 layers:", len(three), "names,", *three)
print("2 layers, named:", *named)
holds = len(two) == 14 and all(name.startswith("model.layers.") for name in two)
holds &= three == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
sys.exit(not (holds and named == ["q_proj", "v_proj"]))
PYTHON
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
"$folder/venv/bin/pip" install --quiet peft==0.21.2 transformers==5.19.0 accelerate==1.15.0
"$folder/venv/bin/python" "$folder/names.py"
