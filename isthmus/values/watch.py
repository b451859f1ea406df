"""These are a router's live reports. generation.proto documents the fields."""

from dataclasses import dataclass

from isthmus.values.cluster import Candidate, RankStatus
from isthmus.values.usage import Placement, RankId, Stages, Totals, Usage


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """`decode` is None while it waits for a rank."""

    request_id: str
    conversation_id: str
    model: str
    age_s: float
    prompt_tokens: int
    completion_tokens: int
    decode: RankId | None
    prefill: RankId | None
    tenant: str
    answers: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of an answer; its fields are those of Answer."""

    reason: str
    matched_stop: str
    usage: Usage
    placement: Placement | None
    stages: Stages
    placements: tuple[Placement, ...]
    totals: Totals
    answer_id: str
    left_out: Totals | None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """`outcome` is ok, aborted, or the name of the status with which it failed. `ended_at_s` is Unix time;
    `finish` is None if it failed earlier.
    """

    request_id: str
    conversation_id: str
    model: str
    outcome: str
    ended_at_s: float
    duration_s: float
    finish: Finish | None
    candidates: tuple[Candidate, ...]
    tool_calls: int
    constraint: str
    tenant: str
    answers: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class ClusterNews:
    """The first report has all `ranks`, later ones those that changed; `gone` ranks are not known any more.
    `running` has the requests that run now, at most 1,000 of `num_running`; `finished` those since the report
    before. `dropped` counts all that were left out.
    """

    ranks: tuple[RankStatus, ...]
    gone: tuple[RankId, ...]
    running: tuple[RunningRequest, ...]
    finished: tuple[FinishedRequest, ...]
    dropped: int
    staleness_s: float
    degraded: str
    num_running: int
