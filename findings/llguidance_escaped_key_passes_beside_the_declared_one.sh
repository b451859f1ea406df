#!/usr/bin/env bash
# JSON allows to write the key "a" as "\u0061". llguidance compares keys as they are spelt: such a key passes as an
# additional one beside the declared "a", so an answer can hold the same key twice, the second time with a value that
# its schema forbids. A second "a" that is spelt like the first is refused, and so is the escaped one where
# additionalProperties is false.
#
# Seen on 2026-11-27:
#   llguidance 1.9.1
#   {"a":1,"\u0061":"x"} is accepted, and Python reads {'a': 'x'}
#   {"a":1,"a":"x"} is refused
#   {"a":1,"\u0061":"x"} with additionalProperties false is refused
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
schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
closed = {**schema, "additionalProperties": False}
escaped, plain = r'{"a":1,"\u0061":"x"}', '{"a":1,"a":"x"}'


def accepts(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return matcher.try_consume_tokens(tokenizer.tokenize_str(text)) == len(text) and matcher.is_accepting()


def word(accepted):
    return "accepted" if accepted else "refused"


print("llguidance", llguidance.__version__)
seen = accepts(schema, escaped), accepts(schema, plain), accepts(closed, escaped)
print(f"{escaped} is {word(seen[0])}, and Python reads {json.loads(escaped)}")
print(f"{plain} is {word(seen[1])}")
print(f"{escaped} with additionalProperties false is {word(seen[2])}")
sys.exit(seen != (True, False, False))
PY
