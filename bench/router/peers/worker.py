"""A worker that only answers: SGLang's /generate, one token a step, and whatever else its router asks.

python -m bench.router.peers.worker STEP_S PORT
"""

import asyncio
import json
import sys

_ABOUT = json.dumps({"model_path": "bench", "model_id": "bench", "status": "ready", "dp_size": 1}).encode()
_TOKEN = b'data: {"text":"word ","output_ids":[17],"meta_info":{"id":"r","finish_reason":null}}\n\n'
_LAST = b'data: {"text":"","output_ids":[],"meta_info":{"id":"r","finish_reason":{"type":"length"}}}\n\n'
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def main(step_s: float, port: int) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _answer(reader, writer, step_s):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # it has left
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", port, backlog=2048) as server:
        await server.serve_forever()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, step_s: float) -> bool:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    length = next((int(each[15:]) for each in lines if each.lower().startswith("content-length:")), 0)
    body = await reader.readexactly(length)
    if not lines[0].startswith("POST /generate"):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(_ABOUT), _ABOUT))
        return True
    writer.write(_HEAD)
    for _ in range(json.loads(body)["sampling_params"]["max_new_tokens"]):
        await asyncio.sleep(step_s)
        writer.write(_chunk(_TOKEN))
    writer.write(_chunk(_LAST) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()
    return True


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]), int(sys.argv[2])))
