"""A turn of a model may come in many pieces: it takes its length, not the square of that."""

import subprocess
import sys

PIECES, PIECE = 4_000, "x" * 400
SCRIPT = f"""
import resource
from services.router.dialects.messages_call import read_messages_call
from services.router.dialects.responses_call import read_responses_call

def responses(kind):
    pieces = {{
        "message": {{"role": "assistant", "content": {PIECE!r}}},
        "reasoning": {{"type": "reasoning", "content": [{{"type": "reasoning_text", "text": {PIECE!r}}}]}},
    }}
    return {{"input": [pieces[kind]] * {PIECES}}}

blocks = [{{"type": "thinking", "thinking": {PIECE!r}, "signature": ""}}] * {PIECES}
thinking = {{"max_tokens": 1, "messages": [{{"role": "assistant", "content": blocks}}]}}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 29),) * 2)  # the square would be 3.2 GB
for read, body in (
    (read_responses_call, responses("reasoning")),
    (read_responses_call, responses("message")),
    (read_messages_call, thinking),
):
    [turn] = read(body, {{}}).request.chat.messages
    print(len(turn.content), len(turn.reasoning))
"""


def test_a_turn_takes_its_length() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr[-2000:]
    length = PIECES * len(PIECE)
    told = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert told == [(0, length), (length, 0), (0, length)]
