"""An AnswerContext is what a router makes all its answers with."""

from collections.abc import Callable
from dataclasses import dataclass

from services.router.cluster import Cluster
from services.router.request.client_request import ClientRequest
from services.router.request.parsers import Parsers
from services.router.request.telemetry.router_metrics import RouterMetrics
from services.router.text.chats.conversations import ConversationMemory
from services.router.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """`allowed_wait_s` says how long a request may wait for its turn, of the seconds that it has left.
    Deadlines are on `clock`."""

    cluster: Cluster
    tokenizer: Tokenizer
    memory: ConversationMemory
    metrics: RouterMetrics
    parsers: Parsers
    max_attempts: int
    allowed_wait_s: Callable[[ClientRequest, float], float]
    clock: Callable[[], float]
