#!/usr/bin/env bash
# A sentencepiece vocabulary whose tokenizer.json puts a space before every text, as that of Llama 2 does, loses a
# space at the beginning of a text under LlamaTokenizer: the class has a pre-tokenizer of its own, which adds the space
# only where there is none. So " hi" gets the ids of "hi", and comes back without its space.
#
# Seen on 2026-11-27 (5.17.0 and 5.18.0 do the same):
#   transformers 5.24.0
#   "hi": the file has ["▁hi"], LlamaTokenizer has ["▁hi"] and reads "hi"
#   " hi": the file has ["▁▁", "hi"], LlamaTokenizer has ["▁hi"] and reads "hi"
#   "  hi": the file has ["▁▁", "▁hi"], LlamaTokenizer has ["▁▁", "hi"] and reads " hi"
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
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer

print("transformers", transformers.__version__)
pieces = ["<unk>", "<s>", "</s>", "▁", "▁▁", "▁hi", "h", "i", "hi"]
merges = [("▁", "▁"), ("h", "i"), ("▁", "hi")]
vocabulary = {piece: i for i, piece in enumerate(pieces)}
file = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
file.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
file.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
file.save("tokenizer.json")
Path("config.json").write_text(json.dumps({"model_type": "llama"}))
Path("tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
loaded = AutoTokenizer.from_pretrained(".")
seen = {}
for text in ("hi", " hi", "  hi"):
    ids = loaded.encode(text, add_special_tokens=False)
    seen[text] = loaded.convert_ids_to_tokens(ids), loaded.decode(ids)
    assert file.decode(file.encode(text).ids) == text
    of_file, of_class = (json.dumps(t, ensure_ascii=False) for t in (file.encode(text).tokens, seen[text][0]))
    print(f'"{text}": the file has {of_file}, {type(loaded).__name__} has {of_class} and reads "{seen[text][1]}"')
sys.exit(seen != {"hi": (["▁hi"], "hi"), " hi": (["▁hi"], "hi"), "  hi": (["▁▁", "hi"], " hi")})
PY
