"""A router's tenants are in a file: their limits, and their usage here.

    {
      "acme": {"weight": 4, "requests_per_minute": 600, "output_tokens_per_minute": 200000},
      "labs": {"concurrent_requests": 8, "max_priority": 1, "cache_salt": "shared"},
      "*":    {"requests_per_minute": 60}
    }

`*` stands for all tenants that the file does not name, together: one that chooses a new name gets no more.
What is left out is not limited, and the salt of the caches is then the tenant's name. Every router enforces
an equal share of the rates and of the concurrent requests.

The file is read again when it changes. While it cannot be read the router keeps what it read last.
"""

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.observe import log_lines
from services.router.followed_file import FollowedFile
from services.router.quotas import LIMITS, Quota, Refusal, TenantLimits
from services.router.tenant_lru import TenantLru
from services.values.errors import ConfigError, InvalidRequest, IsthmusError, OverLimit
from services.values.request import MAX_ID_CHARS, Admitted, TenantShare, is_id
from services.wire.isthmus.v1 import generation_pb2

log = logging.getLogger(__name__)

OTHERS = "*"
OTHERS_LABEL = "other"
_SESSIONS = 100_000
_LEAST_WEIGHT, _MOST_WEIGHT = 0.01, 1000.0
_MOST_PRIORITY = 2**31 - 1
_MOST_LIMIT = 10**15
_CONFIGURED = "\x1e"  # It begins each configured salt, and no name of a tenant, which others may take.


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    weight: float = 1.0
    limits: TenantLimits = field(default_factory=TenantLimits)
    max_priority: int | None = None  # None stands for --max-priority.
    cache_salt: str | None = None  # None stands for the tenant's name.

    @property
    def label(self) -> str:
        return OTHERS_LABEL if self.name == OTHERS else self.name


def read_tenants(text: str) -> Mapping[str, Tenant]:
    """Return the tenants by name, always with OTHERS. Raises ConfigError, which names the member."""
    try:
        read = json.loads(text, object_pairs_hook=without_repetitions)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"must be JSON: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError("must be an object with a member for each tenant")
    return {OTHERS: Tenant(OTHERS)} | {name: _tenant(name, about) for name, about in read.items()}


def without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of JSON's members. Raises ConfigError where a name is there twice."""
    names = Counter(name for name, _ in pairs)
    if repeated := [name for name, number in names.items() if number > 1]:
        raise ConfigError(f"{repeated[0]!r} is there twice")
    return dict(pairs)


def _tenant(name: str, about: object) -> Tenant:
    if not (name and is_id(name)) or name == OTHERS_LABEL:
        raise ConfigError(
            f"{name!r}: a tenant's name has 1 to {MAX_ID_CHARS} printable characters, "
            f"and is not {OTHERS_LABEL!r}"
        )
    if not isinstance(about, dict):
        raise ConfigError(f"{name}: must be an object")
    known = ("weight", *LIMITS, "max_priority", "cache_salt")
    if unknown := about.keys() - known:
        raise ConfigError(f"{name}.{min(unknown)}: is not known; {', '.join(known)} are")
    salt = about.get("cache_salt")
    if salt is not None and (name == OTHERS or not isinstance(salt, str) or not (salt and is_id(salt))):
        raise ConfigError(
            f"{name}.cache_salt: must be a string of 1 to {MAX_ID_CHARS} printable characters, "
            f"and {OTHERS} has none"
        )
    limits = {limit: _number(name, about, limit, 1, _MOST_LIMIT, int) for limit in LIMITS if limit in about}
    return Tenant(
        name,
        float(_number(name, about, "weight", _LEAST_WEIGHT, _MOST_WEIGHT, int | float, 1.0)),
        TenantLimits(**limits),
        _number(name, about, "max_priority", 0, _MOST_PRIORITY, int, None),
        None if salt is None else _CONFIGURED + salt,
    )


def _number(
    name: str,
    about: Mapping[str, Any],
    member: str,
    low: float,
    high: float,
    kind: Any,
    default: float | None = None,
) -> Any:
    if member not in about:
        return default
    value = about[member]
    if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
        of = "an integer" if kind is int else "a number"
        raise ConfigError(f"{name}.{member}: must be {of} from {low:g} to {high:g}, got {value!r:.40}")
    return value


class Account:
    """An Account has a tenant's quota, and its usage since the router's start."""

    def __init__(
        self,
        tenant: Tenant,
        clock: Callable[[], float],
        share: Callable[[], float],
        sessions: "TenantLru[str, int]",
    ) -> None:
        self.tenant = tenant
        self._sessions = sessions
        self.quota = Quota(tenant.limits)
        self._looks = Quota(TenantLimits())
        self.requests = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.reused_tokens = 0
        self.completion_tokens = 0
        self.kv_bytes_moved = 0
        self.refused = Counter[str](dict.fromkeys(LIMITS, 0))
        self._clock = clock
        self._share = share

    def enter(self) -> None:
        """Count a request that begins. Raises OverLimit."""
        self._check(self.quota.enter(self._clock(), self._share()))
        self.requests += 1

    def leave(self) -> None:
        self.quota.leave()

    def look(self) -> None:
        """Count a call that generates nothing. The tenant may make as many of them a minute as requests, and
        beside these. Raises OverLimit."""
        self._looks.limits = TenantLimits(self.tenant.limits.requests_per_minute)
        refusal = self._looks.enter(self._clock(), self._share())
        self._check(refusal, " with calls that generate nothing")
        self._looks.leave()

    def give_back(self, prompt_tokens: int, requests: int) -> None:
        """Give back what a request has taken that was sent to no rank. One that was invalid stays counted:
        whoever repeats it costs the router its text each time."""
        self.quota.give_back(prompt_tokens, requests, self._clock(), self._share())

    def check_together(self, requests: int) -> None:
        """Raise InvalidRequest where so many requests of one call can never run at the same time."""
        most = max(1.0, self.tenant.limits.concurrent_requests * self._share())
        if requests > most:
            problem = f"has {requests} prompts, but this tenant may run {most:.0f} at once"
            raise InvalidRequest("prompt", problem)

    def usage(self, held_tokens: int) -> generation_pb2.TenantUsage:
        limits = {name: getattr(self.tenant.limits, name) for name in LIMITS}
        return generation_pb2.TenantUsage(
            tenant=self.tenant.name,
            weight=self.tenant.weight,
            running_requests=self.quota.running,
            held_tokens=held_tokens,
            refused=self.refused,
            limits={name: limit for name, limit in limits.items() if limit < math.inf},
            **{name: getattr(self, name) for name in _USAGE},
        )

    def take_prompt(self, tokens: int) -> None:
        """Count the prompt's tokens. Raises OverLimit."""
        self._check(self.quota.take_prompt(tokens, self._clock(), self._share()))

    def generated(self, tokens: int) -> None:
        self.completion_tokens += tokens
        self.quota.take_output(tokens, self._clock(), self._share())

    def admitted(self, admitted: Admitted, *, is_further: bool) -> None:
        """Count a placement. Of a further one, or a further answer, only what its rank computed is new."""
        computed = admitted.computed_tokens
        self.prompt_tokens += computed if is_further else admitted.prompt_tokens
        self.reused_tokens += 0 if is_further else admitted.reused_tokens
        self.computed_tokens += computed
        pulled_bytes = admitted.pulled.bytes if admitted.pulled is not None else 0
        self.kv_bytes_moved += admitted.kv_bytes_moved + pulled_bytes

    def share_of(self, tenant: str, conversation_id: str) -> TenantShare:
        """Return what ranks are told of a request. `tenant` is who asks, one of the account's."""
        had = (
            self._sessions.get(self.tenant.name, f"{tenant}\0{conversation_id}") if conversation_id else None
        )
        return TenantShare(self.tenant.name, self.tenant.weight, had or 0)

    def served(self, tenant: str, conversation_id: str, tokens: int) -> None:
        """Remember how many tokens a session has had. It is forgotten once many others came."""
        if not conversation_id or not tokens:
            return
        name, key = self.tenant.name, f"{tenant}\0{conversation_id}"
        self._sessions.put(name, key, (self._sessions.peek(name, key) or 0) + tokens, 1)

    def _check(self, refusal: Refusal | None, what: str = "") -> None:
        if refusal is None:
            return
        self.refused[refusal.limit] += 1
        whole, wait_s = getattr(self.tenant.limits, refusal.limit), max(1.0, refusal.retry_after_s)
        share = "" if refusal.allowed == whole else f", of which this router has {refusal.allowed:g}"
        whose = (
            "tenants without limits of their own are"
            if self.tenant.name == OTHERS
            else (f"tenant {self.tenant.name!r} is")
        )
        over = f"{whose} over {refusal.limit}{what}: {whole:g} allowed{share}"
        raise OverLimit(f"{over}; try again in {wait_s:.0f} s", wait_s)


@contextmanager
def entered(
    tenants: "Tenants | None", tenant: str, rejected: Callable[[IsthmusError], None]
) -> Iterator[Account | None]:
    """Count a request of the tenant as running, if tenants have limits. Raises OverLimit."""
    if tenants is None:
        yield None
        return
    account = tenants.account(tenant)
    try:
        account.enter()
    except OverLimit as error:
        rejected(error)
        raise
    try:
        yield account
    finally:
        account.leave()


class Tenants:
    """The constructor raises ConfigError where the file cannot be read. `num_routers` returns the number of
    routers that serve the model."""

    def __init__(
        self,
        path: Path,
        num_routers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._num_routers = num_routers
        self._file = FollowedFile("--tenants", path, read_tenants, unreadable="tenants_unreadable")
        self._tenants = self._file.content
        # An account stays when the file does not name its tenant any more, so its usage is not lost.
        self.accounts: dict[str, Account] = {}
        self._sessions: TenantLru[str, int] = TenantLru(_SESSIONS)
        self._open_accounts()

    def account(self, name: str) -> Account:
        self._follow()
        return self.accounts[name if name in self._tenants else OTHERS]

    def usage(self, held: Mapping[str, int], tenant: str | None) -> generation_pb2.ListTenantsResponse:
        """Return what the tenant has used, or with None what each of all has, which holds so many tokens.

        A tenant that the file does not name is told nothing, as all of those have one account.
        """
        self._follow()
        if tenant is None:
            accounts = [*self.accounts.values()]
        else:
            accounts = [self.accounts[tenant]] if tenant in self._tenants and tenant != OTHERS else []
        accounts.sort(key=lambda account: account.tenant.name)
        usages = [account.usage(held.get(account.tenant.name, 0)) for account in accounts]
        return generation_pb2.ListTenantsResponse(tenants=usages)

    def _share(self) -> float:
        return 1 / self._num_routers()

    def _open_accounts(self) -> None:
        for name, tenant in self._tenants.items():
            if name not in self.accounts:
                self.accounts[name] = Account(tenant, self._clock, self._share, self._sessions)
            account = self.accounts[name]
            account.tenant, account.quota.limits = tenant, tenant.limits

    def _follow(self) -> None:
        if not self._file.is_new():
            return
        self._tenants = self._file.content
        self._open_accounts()
        log_lines.event(log, "tenants_read", tenants=len(self._tenants) - 1)


class TenantCollector(Collector):
    """Its series are bounded: a tenant that the file does not name is a part of OTHERS_LABEL. `held` returns
    the tokens that each tenant's running requests hold, by its name in the file."""

    def __init__(self, accounts: Mapping[str, Account], held: Callable[[], Mapping[str, int]]) -> None:
        self._accounts = accounts
        self._held = held

    def collect(self) -> Iterator[Metric]:
        refused = CounterMetricFamily(
            "isthmus_tenant_refused",
            "Requests refused because their tenant had reached the limit.",
            labels=("tenant", "limit"),
        )
        used = {
            name: CounterMetricFamily(f"isthmus_tenant_{name}", meaning, labels=("tenant",))
            for name, meaning in _USAGE.items()
        }
        running, held = (
            GaugeMetricFamily(f"isthmus_tenant_{name}", meaning, labels=("tenant",))
            for name, meaning in _NOW.items()
        )
        held_now = self._held()
        for account in self._accounts.values():
            label = account.tenant.label
            for limit, number in account.refused.items():
                refused.add_metric((label, limit), number)
            for name, metric in used.items():
                metric.add_metric((label,), getattr(account, name))
            running.add_metric((label,), account.quota.running)
            held.add_metric((label,), held_now.get(account.tenant.name, 0))
        yield from (refused, *used.values(), running, held)


_USAGE = {
    "requests": "Requests of the tenant that began.",
    "prompt_tokens": "Prompt tokens of the tenant's requests that ranks admitted; other stands for all that "
    "--tenants does not name.",
    "computed_tokens": "Prompt tokens of the tenant that ranks computed, for all placements.",
    "reused_tokens": "Prompt tokens of the tenant that no rank had to compute.",
    "completion_tokens": "Tokens generated for the tenant.",
    "kv_bytes_moved": "KV bytes that were moved between ranks for the tenant, or pulled.",
}
_NOW = {
    "running_requests": "Requests of the tenant in flight.",
    "held_tokens": "Prompt and output tokens of the tenant's requests on ranks, which hold their KV.",
}
