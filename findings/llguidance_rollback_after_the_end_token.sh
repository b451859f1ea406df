#!/usr/bin/env bash
# Whether llguidance counts the end token among the tokens that a rollback takes back follows from how it was handed
# in. At the end of a closed object the matcher stops by itself; an end token in a call of its own is accepted, and not
# recorded, so rollback(1) takes back the brace. In one call with the text it is recorded, and rollback(1) takes back
# the end token alone.
#
# Seen on 2026-11-27:
#   llguidance 1.9.1
#   end token in the same call: stopped by EndOfSentence; after rollback(1) 1 token is allowed, the text is whole: True
#   end token in its own call: stopped by NoExtension; after rollback(1) 5 tokens are allowed, the text is whole: False
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
SCHEMA = {"type": "object", "properties": {}, "additionalProperties": False}


def after_rollback(tokens, end=None):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    assert matcher.consume_tokens(tokens)
    assert end is None or matcher.consume_token(end)
    reason = matcher.stop_reason()
    assert matcher.is_stopped() and matcher.rollback(1)
    allowed = int.from_bytes(matcher.compute_bitmask(), "little").bit_count()
    return reason, allowed, matcher.is_accepting()


print("llguidance", llguidance.__version__)
text, end = tokenizer.tokenize_str("{}"), tokenizer.eos_token
seen = {"the same": after_rollback([*text, end]), "its own": after_rollback(text, end)}
for call, (reason, allowed, is_whole) in seen.items():
    tokens = "token is" if allowed == 1 else "tokens are"
    print(
        f"end token in {call} call: stopped by {reason}; "
        f"after rollback(1) {allowed} {tokens} allowed, the text is whole: {is_whole}"
    )
sys.exit(list(seen.values()) != [("EndOfSentence", 1, True), ("NoExtension", 5, False)])
PY
