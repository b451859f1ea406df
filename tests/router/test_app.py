import logging
import shutil
from pathlib import Path

from router.http.backend import FakeBackend, client
from services.net.bytes_in_flight import BytesInFlight
from services.router.app import MessageBound, _page
from services.router.dialects.sampling import OPENAI, SamplingDefaults
from services.router.router_config import RouterConfig
from services.router.served_model import _log_ends, _sampling_defaults
from services.router.text.answer_ends import EndOfSequence
from services.router.text.tokenizer import Tokenizer


def test_how_a_model_is_sampled_by_default(character_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(character_model, tmp_path / "model")
    (model / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    tokenizer = Tokenizer(str(model))
    of_model = RouterConfig(model=str(model))
    assert _sampling_defaults(of_model, tokenizer) == SamplingDefaults(temperature=0.5, top_k=7)
    of_openai = RouterConfig(model=str(model), sampling_defaults="openai")
    assert _sampling_defaults(of_openai, tokenizer) == OPENAI


def test_the_log_tells_which_ends_a_sequence_has_and_who_says_so(caplog) -> None:
    caplog.set_level(logging.INFO)
    _log_ends(EndOfSequence("generation_config.json", (7, 8), 9))
    assert caplog.messages == ["end_of_sequence source=generation_config.json stated=7,8 tokenizer=9"]


async def test_bodies_may_be_as_large_as_a_model_that_comes_later_needs(caplog) -> None:
    in_flight = BytesInFlight(1000, 100)
    bound = MessageBound(0)
    bound.note("first", 80)
    bound.note("small", 50)
    bound.follow(in_flight)
    async with client(FakeBackend(), max_body_bytes=lambda: bound.bytes, in_flight=in_flight) as http:
        body = {"prompt": "a" * 200}
        assert (await http.post("/v1/completions", json=body)).status_code == 413
        bound.note("later", 300)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    told = "message_bound_raised model=later needed_bytes=300 http_bytes=300 grpc_bytes=80"
    assert caplog.messages == [told]
    bound.note("huge", 900)
    assert bound.bytes == 500, "two of the largest must fit"
    stated = MessageBound(70)
    stated.note("first", 80)
    assert stated.bytes == 70


def test_the_page_can_be_left_out() -> None:
    assert _page(RouterConfig(model="m")) is not None
    assert _page(RouterConfig(model="m", page="off")) is None
