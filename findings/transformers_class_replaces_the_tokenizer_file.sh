#!/usr/bin/env bash
# AutoTokenizer does not do what tokenizer.json says where config.json has "model_type": "qwen2": it takes the vocabulary
# from the file and splits text as Qwen 2 does, digit by digit, whatever pre-tokenizer the file has and whatever
# tokenizer_config.json says. Nothing is said of it. Earlier releases (5.18 and 5.19) do the like to a byte-level file
# under LlamaTokenizer, whose decoder then leaves the characters that stand for spaces in the text; 5.24.0 takes the
# file there, and says so.
#
# Seen on 2026-11-27:
#   transformers 5.24.0
#   qwen2 PreTrainedTokenizerFast: the file has ["123"], Qwen2Tokenizer has ["1", "2", "3"]
#   llama LlamaTokenizer: the file has ["123"], TokenizersBackend has ["123"]
#   llama PreTrainedTokenizerFast: the file has ["123"], TokenizersBackend has ["123"]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.24.0 tokenizers==0.23.3 jinja2==3.1.6 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import json
import sys
from pathlib import Path

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

print("transformers", transformers.__version__)
tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123"]
file = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("1", "2"), ("12", "3")]))
file.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
file.decoder = decoders.ByteLevel()
as_before = True
for model_type, tokenizer_class, expected in (
    ("qwen2", "PreTrainedTokenizerFast", ["1", "2", "3"]),
    ("llama", "LlamaTokenizer", ["123"]),
    ("llama", "PreTrainedTokenizerFast", ["123"]),
):
    folder = Path(model_type + tokenizer_class)
    folder.mkdir()
    file.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    loaded = AutoTokenizer.from_pretrained(str(folder))
    seen = loaded.tokenize("123")
    print(
        f"{model_type} {tokenizer_class}: the file has {json.dumps(file.encode('123').tokens)}, "
        f"{type(loaded).__name__} has {json.dumps(seen)}"
    )
    as_before = as_before and seen == expected
sys.exit(not as_before)
PY
