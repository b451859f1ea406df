#!/usr/bin/env bash
# transformers reads a GGUF's tokenizer, and leaves out how its model split digits.
#
# A GGUF has the name of the splitting that comes before the merges (tokenizer.ggml.pre). Of "smollm" llama.cpp
# isolates each digit first (src/llama-vocab.cpp: "\p{N}", then GPT-2's expression), as the model learned it.
# transformers knows some of these names and takes plain byte-level splitting for the others, without a word:
# where the blank and a digit have been merged, " 12" becomes other tokens than the model was trained on.
#
# Seen: transformers 5.19.0 tokenizes " 12" as ['Ġ1', '2'] with pre=smollm, where ['Ġ', '1', '2'] is right.
# Exits with 1 when that has changed. It installs torch, without which transformers reads no GGUF.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.19.0 gguf==0.17.1 torch==2.13.0
mkdir "$folder/model"
cat > "$folder/try.py" <<'PYTHON'
import sys

import gguf
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

tokens = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ1"]
merges = ["Ġ 1"]
writer = gguf.GGUFWriter(f"{sys.argv[1]}/tiny.gguf", "llama")
writer.add_block_count(1)
writer.add_context_length(64)
writer.add_embedding_length(32)
writer.add_feed_forward_length(32)
writer.add_head_count(2)
writer.add_head_count_kv(2)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(tokens)
writer.add_token_types([3] + [1] * (len(tokens) - 1))
writer.add_token_merges(merges)
writer.add_bos_token_id(0)
writer.add_eos_token_id(0)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

right = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("Ġ", "1")]))
right.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
read = transformers.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file="tiny.gguf")
print("transformers", transformers.__version__, read.tokenize(" 12"), "digits apart:", right.encode(" 12").tokens)
sys.exit(read.tokenize(" 12") != ["Ġ1", "2"])
PYTHON
"$folder/venv/bin/python" "$folder/try.py" "$folder/model"
