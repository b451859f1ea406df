"""A worker whose SGLang is an HTTP server of the test's: what it answers, and how it breaks off."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web

from engine.sglang.settings import sglang_settings
from services.engine.sglang.reports import Active, TicketSent
from services.engine.sglang.service.http_client import SglangHttp
from services.engine.sglang.service.worker import SglangWorker
from services.values.rank import Generation, RankId

OWN = RankId("w", 0, Generation(1))
PAGE = 16
PAGE_BYTES = 4096


def active(**changes):
    fields = dict(
        role="decode",
        dp_rank=0,
        tp_rank=0,
        cp_rank=0,
        pp_rank=0,
        tp_size=1,
        pid=1,
        endpoint="",
        page_size=PAGE,
        page_bytes=PAGE_BYTES,
        num_pages=512,
        dtype="float32",
        num_layers=2,
        state_kinds=[],
        carried=[],
        draft=None,
        keys_are_pairs=False,
        topology={},
    )
    return Active(**{**fields, **changes})


class RunningProcess:
    """In place of SglangProcess: it runs until the test says otherwise."""

    def __init__(self):
        self.ended = asyncio.Event()


def tell(worker, *reports):
    """As SGLang's processes do, through the worker's socket."""
    for report in reports:
        worker._take(report)


def chunk(finish_reason=None, ids=(5,), **meta_info):
    meta_info = {"finish_reason": finish_reason, "cached_tokens": 0, **meta_info}
    return f"data: {json.dumps({'output_ids': list(ids), 'meta_info': meta_info})}\n\n".encode()


@asynccontextmanager
async def worker_on(generate, model, **settings):
    """`generate(worker, request, response)` writes what SGLang would; None: nothing listens."""
    worker = SglangWorker(sglang_settings(model, **settings), {0: OWN})
    worker._process = RunningProcess()
    tell(worker, active())

    async def answer(request):
        body = await request.json()
        tell(worker, TicketSent(body["bootstrap_room"], 0, 1))
        response = web.StreamResponse()
        await response.prepare(request)
        await generate(worker, request, response)
        return response

    app = web.Application()
    app.router.add_post("/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    if generate is None:
        await runner.cleanup()
    worker._http = SglangHttp(port)
    try:
        yield worker
    finally:
        await worker._http.close()
        await runner.cleanup()
