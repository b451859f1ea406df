#!/usr/bin/env bash
# A tool's result is text. Under the formats v2 and v3 (Mistral 7B v0.3, Mixtral 8x22B, Nemo) mistral-common, which has
# the reference tokenizers of these models, reads each result as JSON and writes the value that came out: the abbreviated
# commit 12e4567 reaches the model as Infinity, an id loses its last digits, and of a key that comes twice one is gone.
# From v7 on the text stays as it is. So two servers of one model, one with mistral-common and one with the chat template
# of the model's repository, make different tokens of such a chat.
#
# Seen on 2026-11-28:
#   mistral-common 1.13.1
#   v2: 12e4567 becomes Infinity, 12345678901234567890.5 becomes 1.2345678901234567e+19, {"a":1,"a":2} becomes {"a": 2}
#   v3: 12e4567 becomes Infinity, 12345678901234567890.5 becomes 1.2345678901234567e+19, {"a":1,"a":2} becomes {"a": 2}
#   v7: 12e4567 stays, 12345678901234567890.5 stays, {"a":1,"a":2} stays
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3.11}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check mistral-common==1.13.1 sentencepiece==0.2.3 2>/dev/null
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import sys

import mistral_common
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

RESULTS = {
    "12e4567": "Infinity",
    "12345678901234567890.5": "1.2345678901234567e+19",
    '{"a":1,"a":2}': '{"a": 2}',
}
ID = "abcdefghi"


def shown(tokenizer, result):
    call = ToolCall(id=ID, function=FunctionCall(name="f", arguments="{}"))
    messages = [
        UserMessage(content="Which commit?"),
        AssistantMessage(content=None, tool_calls=[call]),
        ToolMessage(content=result, tool_call_id=ID, name="f"),
    ]
    request = ChatCompletionRequest(messages=messages)
    text = tokenizer.encode_chat_completion(request).text.replace("▁", " ")
    return text.partition("[TOOL_RESULTS]")[2].partition("[/TOOL_RESULTS]")[0]


print("mistral-common", mistral_common.__version__)
as_before = True
for version in ("v2", "v3", "v7"):
    tokenizer, told = getattr(MistralTokenizer, version)(), []
    for result, value in RESULTS.items():
        text = shown(tokenizer, result)
        changed, kept = f'"content": {value}' in text, result in text
        told.append(f"{result} becomes {value}" if changed else f"{result} {'stays' if kept else text}")
        as_before = as_before and (changed, kept) == (version != "v7", version == "v7")
    print(f"{version}: {', '.join(told)}")
sys.exit(not as_before)
PY
