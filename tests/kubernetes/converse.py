"""This script runs in a pod beside a release: `python -c "$(cat converse.py)" ROUTER`.

It converses over gRPC and HTTP until /tmp/stop exists, then prints how many answers it got, and what a
client would have noticed: errors, streams that were cut, and other tokens than the same question had before.
"""

import http.client
import json
import sys
import threading
import time
from pathlib import Path

from isthmus import Client

router = sys.argv[1]
STOP, FIRST = Path("/tmp/stop"), Path("/tmp/first")
answers: dict[tuple, object] = {}
noticed: list[str] = []
count = 0
lock = threading.Lock()


def took(question: tuple, answer: object) -> None:
    global count
    with lock:
        count += 1
        if answers.setdefault(question, answer) != answer:
            noticed.append(f"another answer to {question}")
    FIRST.touch()


def over_grpc(number: int, turn: int) -> None:
    with Client(f"{router}:7777", timeout=120) as client:
        for start in range(4):
            chat = client.conversation(f"You are {number}, {start}.", max_tokens=150, temperature=0)
            for say in ("word " * 60, "and " * 30):
                took((number, start, say), chat.say(say).token_ids)


def over_http(number: int, turn: int) -> None:
    body = {"messages": [{"role": "user", "content": f"{number} asks {turn % 4}: " + "thing " * 40}]}
    connection = http.client.HTTPConnection(router, 8000, timeout=120)
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps({**body, "max_tokens": 150, "temperature": 0, "stream": True}),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    lines = [line.removeprefix("data: ") for line in response.read().decode().split("\n\n") if line]
    connection.close()
    if response.status != 200 or lines[-1] != "[DONE]":
        raise OSError(f"{response.status} {lines[-1]}")
    parts = [choice["delta"].get("content") or "" for x in lines[:-1] for choice in json.loads(x)["choices"]]
    took(("http", number, turn % 4), "".join(parts))


def until_stopped(number: int) -> None:
    for turn in range(1 << 30):
        if STOP.exists():
            return
        try:
            (over_http, over_grpc)[number % 2](number, turn)
        except Exception as error:
            noticed.append(f"{time.strftime('%X')} {type(error).__name__}: {error}"[:400])
            time.sleep(1)


threads = [threading.Thread(target=until_stopped, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps({"answers": count, "noticed": noticed}))
