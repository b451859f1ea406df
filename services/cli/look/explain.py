"""`isthmus explain` shows where a prompt would be placed, and each candidate's price, term by term."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from services.cli import screen
from services.cli.router_client import MAX_TOKENS_BOUNDS, MODEL_NAME_HELP, ClientConfig, ask, given_prompt
from services.cli.table import fold, format_bytes, format_rank, format_table
from services.settings.flags import check_bounds, load, setting
from services.wire import convert
from services.wire.isthmus.v1 import common_pb2, generation_pb2

# The first lines have the costs to the request, in the order of its stages; the last has the costs to others.
_ORDER = (
    *("wait_prefill", "wait_decode", "wait_room", "pull", "bring", "compute"),
    *("last_chunk", "carried", "overhead"),
    *("occupy", "overtake", "evict_prefill", "evict_decode", "itl", "lend", "outgrow"),
)
_LEAD = ("", "decode", "prefill", "plan", "total ms")  # These stay columns if the terms do not fit.
_REASONS = {
    "pinned": "the conversation is pinned there, and its price is within the slack of the lowest",
    "longest_prefix": "it alone holds most of the prompt, and its price is within the slack of the lowest",
    "share": "of several routers this one prefers that rank, and its price is within the slack of the lowest",
    "cheapest": "its price is the lowest",
    "tie": "several are equally cheap and have as few requests, and chance chose among them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainConfig(ClientConfig):
    """Show where a prompt (TEXT, or standard input) would go and why; nothing is generated."""

    prompt: str = setting("", "the prompt; default: standard input", bare="TEXT")
    model: str = setting("", MODEL_NAME_HELP)
    conversation: str = setting("", "conversation id")
    tenant: str = setting("", "tenant; prefixes are not shared between tenants")
    max_tokens: int | None = setting(
        None, "tokens to generate at most; default: nobody says", bounds=MAX_TOKENS_BOUNDS
    )

    def __post_init__(self) -> None:
        check_bounds(self)


def run(argv: list[str]) -> int:
    config = load(ExplainConfig, argv, prog="isthmus explain")
    return asyncio.run(_explain(config, given_prompt(config.prompt)))


async def _explain(config: ExplainConfig, prompt: str) -> int:
    request = generation_pb2.GenerateRequest(
        text=prompt,
        model=config.model,
        conversation_id=config.conversation,
        tenant=config.tenant,
        sampling=common_pb2.SamplingParams(max_tokens=config.max_tokens),
    )
    answer = await ask(config, "Explain", generation_pb2.ExplainRequest(request=request))
    print(format_explanation(answer, screen.width()))
    return 0 if any(candidate.chosen for candidate in answer.candidates) else 1


def format_explanation(answer: generation_pb2.ExplainResponse, width: int | None = None) -> str:
    carried = f"; tails and states are {format_bytes(answer.carried_bytes)}" if answer.carried_bytes else ""
    lines = [f"{answer.prompt_tokens} prompt tokens{carried}", *_choice(answer)]
    if answer.HasField("pinned"):
        lines.append(f"pinned to {format_rank(answer.pinned)}")
    if answer.constraint:
        lines.append(f"the answer is kept to a constraint: {answer.constraint}")
    if answer.past_answers:
        known = ", ".join(f"{count} {what}" for what, count in sorted(answer.past_answers.items()))
        lines.append(f"past answers: {known}")
    if answer.degraded:
        lines.append(f"degraded, from memory: {answer.degraded}")
    choice = [fold(line, width, indent=2) for line in lines]
    return "\n".join([*choice, "", _held(answer, width), "", format_candidates(answer, width)])


def format_candidates(answer: generation_pb2.ExplainResponse, width: int | None = None) -> str:
    terms = [term for candidate in answer.candidates for term in candidate.terms]
    counting = {term.name for term in terms if term.seconds}
    present = {term.name: None for term in terms}
    names = [name for name in (*_ORDER, *(present.keys() - {*_ORDER})) if name in counting]
    headings = ["", "decode", "prefill", "plan", *names, "total ms", "note"]
    table = format_table(headings, [_row(candidate, names) for candidate in answer.candidates], width, _LEAD)
    nothing = ", ".join(name for name in present if name not in counting)
    return table + (f"\n{fold(f'nothing anywhere: {nothing}', width, indent=2)}" if nothing else "")


def _choice(answer: generation_pb2.ExplainResponse) -> list[str]:
    for candidate in answer.candidates:
        if candidate.chosen:
            by = f", computed by {format_rank(candidate.prefill)}" if candidate.HasField("prefill") else ""
            pulled = f", pulled from {format_rank(candidate.source)}" if candidate.HasField("source") else ""
            where = f"{format_rank(candidate.decode)}{by}, plan {_plan(candidate)}{pulled}"
            return [f"chosen: {where}", f"reason: {answer.reason}: {_REASONS.get(answer.reason, '')}"]
    return [f"no choice: {answer.reason}"]


_HELD = {"in the index": "indexed", "counted as": "hit"}
_RESUMED = {"resumable": "indexed_resume", "resumed at": "resume"}
_POOL = {"holds at most": "context"}


def _held(answer: generation_pb2.ExplainResponse, width: int | None) -> str:
    ranks: dict[str, tuple[str, generation_pb2.Candidate]] = {}
    for candidate in answer.candidates:
        for role in ("decode", "prefill"):
            if candidate.HasField(role):
                ranks.setdefault(format_rank(getattr(candidate, role)), (role, candidate))
    reports = any(candidate.HasField(f"{role}_resume_tokens") for role, candidate in ranks.values())
    pools = {(role, getattr(candidate, f"{role}_context_tokens")) for role, candidate in ranks.values()}
    differ = len(pools) > len({role for role, _ in pools})
    columns = _HELD | (_RESUMED if reports else {}) | (_POOL if differ else {})
    rows = [
        (name, role, *(_tokens(candidate, f"{role}_{what}_tokens") for what in columns.values()))
        for name, (role, candidate) in sorted(ranks.items())
    ]
    return format_table(("rank", "role", *columns), rows, width)


def _tokens(candidate: generation_pb2.Candidate, field: str) -> object:
    """Return the tokens. A rank that reports no resume tokens can continue wherever it holds KV."""
    is_unreported = field.endswith("_resume_tokens") and not candidate.HasField(field)
    return "all" if is_unreported else getattr(candidate, field)


def _notes(candidate: generation_pb2.Candidate) -> Iterator[str]:
    if candidate.pinned:
        yield "pinned"
    if candidate.HasField("source"):
        yield f"pulls {candidate.source_tokens} from {format_rank(candidate.source)}"
    if candidate.brought_tokens:
        yield f"brings up {candidate.brought_tokens} from its tiers"
    if candidate.decode_tokens_per_step > 1:
        yield f"{candidate.decode_tokens_per_step:.1f} tokens a step"


def _row(candidate: generation_pb2.Candidate, names: list[str]) -> list[object]:
    terms = {term.name: f"{1e3 * term.seconds:.2f}" for term in candidate.terms}
    note = candidate.excluded or ", ".join(_notes(candidate))
    # If no candidate can be chosen, none has a price.
    is_priced = candidate.plan != common_pb2.PLAN_UNSPECIFIED
    return [
        "*" if candidate.chosen else "",
        format_rank(candidate.decode) if candidate.HasField("decode") else "-",
        format_rank(candidate.prefill) if candidate.HasField("prefill") else "-",
        _plan(candidate) if is_priced else "",
        *(terms.get(name, "") for name in names),
        f"{1e3 * candidate.total_s:.2f}" if is_priced else "",
        note,
    ]


def _plan(candidate: generation_pb2.Candidate) -> str:
    return convert.plan_from_proto(candidate.plan).value
