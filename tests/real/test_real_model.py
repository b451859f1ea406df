"""Conversations of real text with a real model: every token is the one that transformers would choose.

SmolLM2-135M-Instruct in float32, greedily, as `isthmus fetch-model smollm2` makes it; where no package source
has it these tests are skipped, and say so. What transformers would choose is told by teacher forcing
(exactness/reference.py); where an answer is bound by a grammar it is the best of what the grammar allows.
"""

import asyncio
import json
import signal
from dataclasses import dataclass, field

import pytest
import torch

from cluster.harness import FakeCluster
from engine.paged.draft_ranks import every_draft_pays
from exactness.reference import NEAR_TIE, forced_logits, reference_model
from processes.harness import ProcessCluster, until
from router.templates.formats import FORMATS
from services.cli.local import demo
from services.cli.model.fetch_model import ensure_cached
from services.grammar.grammars import Grammars
from services.grammar.matcher import MaskMaker, MaskRequest
from services.settings.named_models import KNOWN
from services.values.errors import Unavailable
from services.wire.isthmus.v1 import common_pb2, generation_pb2
from services.wire.isthmus.v1.generation_pb2 import Chat, ChatMessage, Tool, ToolCall, ToolChoice

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures(every_draft_pays.__name__),
]

PAGE, ANSWER = 16, 28
CODE = '''def area(radius):
    """The area of a circle."""
    return 3.14159 * radius ** 2

for r in (1, 2, 12):
    print(f"{r:>4} {area(r):10.2f}")'''
TALKS = {
    "text": demo._ON_A_TEXT.questions[:3],
    "code": (
        f"Here is a program:\n\n```python\n{CODE}\n```\n\nRepeat the program word for word.",
        "Now rename `area` to `circle_area`, and repeat it again.",
        "Thank you! 12 + 30 = ? And  7 * 8?",
    ),
    "languages": (
        "Übersetze ins Englische: „Die Straße über die Brücke ist heute gesperrt.“ 🙂🚧",
        "日本語で「ありがとう」と言ってください。",
        "1. apples\n2. pears\n3. plums\n\nGo on with the list up to 8.",
    ),
}


@pytest.fixture(scope="session")
def smollm2():
    try:
        ensure_cached("smollm2", print)
    except Unavailable as error:
        pytest.skip(str(error))
    return KNOWN["smollm2"].cached


@dataclass
class Said:
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    calls: list = field(default_factory=list)
    finish: generation_pb2.Finish | None = None

    @property
    def usage(self):
        return self.finish.usage


async def ask(stub, chat, max_tokens=ANSWER, constraint=None, said=None, **fields):
    """`said` grows meanwhile, if one is given."""
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, constraint=constraint)
    request = generation_pb2.GenerateRequest(chat=chat, sampling=sampling, **fields)
    tokenized = await stub.Tokenize(generation_pb2.TokenizeRequest(request=request))
    said = Said([]) if said is None else said
    said.prompt_ids = list(tokenized.token_ids)
    async for response in stub.Generate(request, timeout=200):
        said.token_ids += response.token_ids
        said.text += response.text
        said.calls += response.tool_calls
        if response.HasField("finish"):
            said.finish = response.finish
    return said


def near_ties(directory, said, matcher=None):
    """Return how many tokens are not transformers' choice, but within a near tie of it. Raises
    AssertionError."""
    assert said.token_ids
    logits, ties = forced_logits(directory, said.prompt_ids, said.token_ids), 0
    for at, (got, row) in enumerate(zip(said.token_ids, logits, strict=True)):
        if matcher is not None:
            row = row.masked_fill(~allowed(matcher, len(row)), -torch.inf)
        best = int(row.argmax())
        gap = float((row[best] - row[got]) / logits[at].std())
        assert got == best or 0 <= gap < NEAR_TIE, (
            f"token {at} of {said.text!r}: {got}, not {best}, {gap:.1e}"
        )
        ties += got != best
        if matcher is not None and got not in matcher.ends.token_ids:
            matcher.advance([got])
    return ties


def allowed(matcher, vocab_size):
    """Where bytes must follow, the mask has but the tokens that the tokenizer would write them in."""
    return torch.from_numpy(MaskMaker(vocab_size).make([MaskRequest(matcher)]).expanded()[0].copy())


def cluster_of(etcd, name, directory, plan, **settings):
    ranks = {"engine": "torch", "model": str(directory), "num_threads": 1, "self_check": "off", **settings}
    sizes = {"page_size": PAGE, "index_block": PAGE, "kv_pages": 256, "chunk_size": 512}
    return FakeCluster(etcd, directory, name, plans=(plan,), **sizes, **ranks)


async def converse(cluster, name, tenant):
    """All turns of one; what was said. The decode rank finds the turn before, less a page."""
    messages, turns = [], []
    for question in TALKS[name]:
        messages.append(ChatMessage(role="user", content=question))
        chat = Chat(messages=messages, raw_answer=True)
        said = await ask(cluster.stubs[0], chat, tenant=tenant, conversation_id=f"{tenant}-{name}")
        messages.append(ChatMessage(role="assistant", content=said.text, token_ids=said.token_ids))
        if turns:
            held = len(turns[-1].prompt_ids) + len(turns[-1].token_ids)
            assert held - PAGE - 1 <= said.usage.decode_prefix_len < len(said.prompt_ids)
        assert said.usage.prompt_tokens == len(said.prompt_ids)
        turns.append(said)
    return turns


def test_the_model_knows_english(smollm2):
    """Rows of Q and K that lie wrongly, or another tokenizer, would cost it most of what it knows."""
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer(demo._TEXT).input_ids
    with torch.inference_mode():
        logits = reference_model(smollm2)(torch.tensor([ids])).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item()
    print(f"{loss:.2f} nats a token")
    assert loss < 3.2


@pytest.mark.parametrize("plan,speculation", [("remote", "off"), ("local", "lookup"), ("remote", "tree")])
async def test_conversations(smollm2, etcd_endpoint, cluster_name, plan, speculation):
    cluster = cluster_of(
        etcd_endpoint,
        cluster_name,
        smollm2,
        plan,
        decode=(1,),  # of two the other may be cheaper for a turn, where the machine is busy
        speculation=speculation,
    )
    async with cluster:
        talks = await asyncio.gather(*(converse(cluster, name, "one") for name in TALKS))
        if speculation == "tree":  # what another of the tenant's was answered is known by now
            talks.append(await converse(cluster, "text", "one"))
        await cluster.assert_nothing_held()
    turns = [said for talk in talks for said in talk]
    ties = sum(near_ties(smollm2, said) for said in turns)
    drafted = sum(said.usage.accepted_draft_tokens for said in turns)
    tokens = sum(len(said.token_ids) for said in turns)
    print(
        f"{plan}, {speculation}: {ties} near ties in {tokens} tokens of {len(turns)} turns, {drafted} drafted"
    )
    assert (drafted > 0) == (speculation != "off")
    moved = [said.usage.kv_bytes_moved > 0 for said in turns]
    assert all(moved) if plan == "remote" else not any(moved)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "country": {"enum": ["Greece", "Egypt", "Panama"]},
        "kilometres": {"type": "number"},
        "boats": {"type": "boolean"},
    },
    "required": ["name", "country", "kilometres", "boats"],
    "additionalProperties": False,
}


@pytest.fixture
def matchers(monkeypatch):
    """Those that a rank has made, each as it was then: the last one is of the last request."""
    made, matcher_of = [], Grammars.matcher

    def matcher(grammars, constraint, output_ids=(), ending_ids=()):
        made.append(matcher_of(grammars, constraint, output_ids, ending_ids).copy())
        return matcher_of(grammars, constraint, output_ids, ending_ids)

    monkeypatch.setattr(Grammars, "matcher", matcher)
    return made


async def test_constraints_and_tools(smollm2, etcd_endpoint, cluster_name, matchers, tmp_path):
    """SmolLM2's own template shows no tools: this one is Qwen's, and the weights are the same."""
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((smollm2 / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": FORMATS["qwen3"].template})
    )
    async with cluster_of(
        etcd_endpoint, cluster_name, tmp_path, "remote", decode=(1,), speculation="lookup"
    ) as cluster:
        await bound_to_a_schema(cluster, smollm2, matchers)
        await calling_a_tool(cluster, smollm2, matchers)
        await cluster.assert_nothing_held()


async def bound_to_a_schema(cluster, directory, matchers):
    question = TALKS["text"][0].replace("Where is the canal?", "Write what it says of the canal as JSON.")
    chat = Chat(messages=[ChatMessage(role="user", content=question)])
    constraint = common_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    said = await ask(cluster.stubs[0], chat, 80, constraint)
    print(said.text)
    assert said.finish.reason == common_pb2.FINISH_REASON_STOP
    assert list(json.loads(said.text)) == list(SCHEMA["properties"])
    assert near_ties(directory, said, matchers[-1]) == 0
    unbound = forced_logits(directory, said.prompt_ids, said.token_ids).argmax(-1).tolist()
    assert unbound != said.token_ids  # else the schema would have bound nothing


async def calling_a_tool(cluster, directory, matchers):
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    tool = Tool(name="weather", description="The weather of a city", parameters=json.dumps(parameters))
    messages = [ChatMessage(role="user", content="How warm is it in Athens today?")]
    how = {"tools": [tool], "parallel_tool_calls": False}
    must = Chat(messages=messages, tool_choice=ToolChoice(name="weather"), **how)
    called = await ask(cluster.stubs[0], must, 80, conversation_id="tools")
    (call,) = called.calls
    arguments = json.loads(call.arguments)
    print(call.name, arguments)
    assert call.name == "weather" and set(arguments) == {"city", "unit"}
    assert called.finish.reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert near_ties(directory, called, matchers[-1]) == 0
    answered = ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    messages += [
        ChatMessage(role="assistant", tool_calls=[answered], token_ids=called.token_ids),
        ChatMessage(role="tool", tool_call_id=call.id, content='{"degrees": 31, "unit": "C"}'),
    ]
    told = await ask(cluster.stubs[0], Chat(messages=messages, **how), conversation_id="tools")
    print(told.text)
    held = len(called.prompt_ids) + len(called.token_ids)
    assert told.usage.decode_prefix_len >= held - PAGE - 1
    assert near_ties(directory, told) == 0


async def test_a_killed_rank(smollm2, tmp_path):
    """Processes, and SIGKILL in the middle of an answer: another rank goes on with it."""
    sizes = (f"--page-size={PAGE}", f"--index-block={PAGE}", "--chunk-size=512")
    ranks = ("--engine=torch", "--self-check=off", *sizes)
    cluster = ProcessCluster(
        tmp_path, smollm2, kv_pages=128, rank_flags=ranks, router_flags=(*sizes[1:], f"--model={smollm2}")
    )
    chat = Chat(messages=[ChatMessage(role="user", content=TALKS["text"][0])], raw_answer=True)
    async with cluster:
        said = Said([])
        asked = asyncio.create_task(ask(cluster.stubs[0], chat, 60, said=said))
        await until(lambda: len(said.token_ids) >= 8, "it has begun")
        (running,) = await cluster.running(["decode/0", "decode/1"])
        cluster.signal_rank(running, signal.SIGKILL)
        await asked
    first, second = (f"decode/{placement.decode.rank}" for placement in said.finish.placements)
    assert first == running != second
    assert near_ties(smollm2, said) == 0
