"""The page's pictures for docs/: wide in light and dark, and narrow. PAGE_MODEL: a checkpoint to answer."""

import concurrent.futures
import json
import os
import threading
import urllib.request
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import expect

from page.up import running
from page.visitor import LONG_MS, Visitor

PICTURES = Path(os.environ.get("PAGE_PICTURES", ".cache/page"))
MODEL = os.environ.get("PAGE_MODEL") or None
QUESTIONS = ("What is the Panama Canal?", "Why is it important for ships?", "Which oceans does it connect?")
_LARGEST = 150_000  # bytes
_COLOURS = 128
_DEADLINE_S = 600  # a checkpoint of any size has to be loaded


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with running(tmp_path_factory.mktemp("pictures"), MODEL, "--rank-flag=kv-pages=96") as up:
        yield up.url


@pytest.mark.timeout(_DEADLINE_S)
def test_pictures(chromium, url):
    PICTURES.mkdir(parents=True, exist_ok=True)
    person = Visitor(chromium, url, "bare-key", viewport={"width": 1360, "height": 940})
    try:
        with concurrent.futures.ThreadPoolExecutor() as others:
            converse(person, url)
            enough = threading.Event()
            asking = others.submit(ask_on, url, enough)
            busy = person.page.locator('.rank:has([data-label="tokens/s"]:not(:text-is("0"), :text-is("–")))')
            try:
                expect(busy).not_to_have_count(0, timeout=LONG_MS)
                take(person, "page-light")
            finally:
                enough.set()
            asking.result()
        person.page.emulate_media(color_scheme="dark")
        person.turns.first.locator("summary").click()
        take(person, "page-dark")
        person.page.set_viewport_size({"width": 390, "height": 800})
        person.page.emulate_media(color_scheme="light")
        take(person, "page-narrow-chat")
        person.answers.last.locator(".caption-button").click()
        take(person, "page-narrow-cluster")
        beside(("page-narrow-chat", "page-narrow-cluster"), "page-narrow")
    finally:
        person.context.close()
    assert not person.complaints
    for picture in PICTURES.glob("*.png"):
        assert picture.stat().st_size < _LARGEST, picture


def converse(person, url):
    """Three turns, and others' requests beside them."""
    person.set_up(temperature="0", max_tokens=80)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for number, question in enumerate(QUESTIONS):
            other = pool.submit(ask_aside, url, f"In a sentence: what is the number {number + 2} good for?")
            person.ask(question)
            other.result()
    turn = person.turns.first
    turn.locator("summary").click()
    expect(turn.locator(".prices li").first).to_be_visible(timeout=LONG_MS)
    person.page.mouse.move(0, 0)
    person.page.wait_for_timeout(1500)  # what is live has settled


def ask_aside(url, question, max_tokens=24):
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    headers = {"authorization": "Bearer bare-key", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as answer:
        assert answer.status == 200


def ask_on(url, enough):
    """A small model has answered before a picture is taken."""
    while not enough.is_set():
        ask_aside(url, "Count from one to a hundred.", 64)


def take(person, name):
    person.script("document.activeElement.blur()")
    person.page.wait_for_timeout(400)  # bars have their widths
    path = PICTURES / f"{name}.png"
    person.page.screenshot(path=path)
    shrink(Image.open(path)).save(path, optimize=True)


def shrink(picture):
    """A palette of its own makes it a third of the size."""
    return picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)


def beside(names, name):
    pictures = [Image.open(PICTURES / f"{each}.png").convert("RGB") for each in names]
    whole = Image.new("RGB", (sum(each.width + 20 for each in pictures) - 20, pictures[0].height), "#808080")
    left = 0
    for each in pictures:
        whole.paste(each, (left, 0))
        left += each.width + 20
    shrink(whole).save(PICTURES / f"{name}.png", optimize=True)
    for each in names:
        (PICTURES / f"{each}.png").unlink()
