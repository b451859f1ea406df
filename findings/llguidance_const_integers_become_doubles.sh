#!/usr/bin/env bash
# A JSON schema with "const": 9007199254740993 (2^53 + 1) lets a model write 9007199254740992 alone: llguidance keeps
# integers of const and enum as doubles, so the one right answer is refused and its rounded neighbour is accepted.
#
# Seen on 2026-11-27:
#   llguidance 1.9.1
#   const 9007199254740993: 9007199254740993 is refused, 9007199254740992 is accepted
#   enum [1234567890123456789]: 1234567890123456789 is refused, 1234567890123456768 is accepted
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import json
import sys

import llguidance
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()


print("llguidance", llguidance.__version__)
as_before = True
for schema, right, rounded in (
    ({"const": 9007199254740993}, "9007199254740993", "9007199254740992"),
    ({"enum": [1234567890123456789]}, "1234567890123456789", "1234567890123456768"),
):
    seen = {text: accepts(schema, text) for text in (right, rounded)}
    name, value = next(iter(schema.items()))
    print(f"{name} {value}:", ", ".join(f"{t} is {'accepted' if ok else 'refused'}" for t, ok in seen.items()))
    as_before = as_before and seen == {right: False, rounded: True}
sys.exit(not as_before)
PY
