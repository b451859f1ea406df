"""Are we fine? The first row answers in five seconds, what follows says where to look."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import CLUSTER, RANK, Limits, Query, board, graph, quantile, quantiles, rate, tile

_HITS = f"{rate('isthmus_reused_tokens_total')} / {rate('isthmus_prompt_tokens_total')}"
# Our failures: not what clients ask wrongly, or give up.
_FAILED = ', outcome!~"finished|cancelled|Aborted|InvalidRequest|NotFound|AlreadyRunning|Forbidden"'
_ERRORS = f"({rate('isthmus_requests_total', selector=CLUSTER + _FAILED)} or vector(0)) / {rate('isthmus_requests_total')}"


# In the order of a request, each in a colour of its own.
_STAGES = {
    "router_queue": "#8e8e8e",
    "tokenize": "#fade2a",
    "route": "#73bf69",
    "decode_queue": "#f2495c",
    "prefill_queue": "#ff9830",
    "pull": "#c0d8ff",
    "prefill_compute": "#3274d9",
    "transfer": "#b877d9",
    "first_decode_step": "#37c8c3",
    "relay": "#9c5f2f",
}


def overview() -> Dashboard:
    return board(
        "isthmus-overview",
        "Isthmus / Overview",
        "Whether users are served well, and what it costs. Start here.",
        {
            "At a glance": [
                tile(
                    "Cache hit rate",
                    "percentunit",
                    "Share of prompt tokens that no rank had to compute. Higher is cheaper and faster; what "
                    "is usual depends on the traffic. Runbook: IsthmusHitRateFell.",
                    _HITS,
                    Limits(amber=0.3, red=0.1, low=True),
                ),
                tile(
                    "TTFT p95",
                    "s",
                    "95 of 100 requests got their first token within this time. The chart's goal is 2.5 s, unless it was given another. Runbook: "
                    "IsthmusTtftBudgetBurnsFast.",
                    quantile(0.95, "isthmus_ttft_seconds"),
                    Limits(amber=1.5, red=2.5),
                ),
                tile(
                    "ITL p95",
                    "s",
                    "95 of 100 tokens came within this time after the one before.",
                    quantile(0.95, "isthmus_itl_seconds"),
                    Limits(amber=0.1, red=0.25),
                ),
                tile(
                    "Error rate",
                    "percentunit",
                    "Share of requests that ended with an error of ours, refusals for want of room included. "
                    "What clients ask wrongly or cancel does not count. Runbook: IsthmusRequestsFail.",
                    _ERRORS,
                    Limits(amber=0.01, red=0.05),
                ),
                tile(
                    "Output tokens/s",
                    "short",
                    "Output of all streams of the cluster together.",
                    rate("isthmus_completion_tokens_total"),
                ),
                tile(
                    "Ranks down",
                    "short",
                    "Ranks that no router can use. Runbook: IsthmusRankDown.",
                    f"count(max by (cluster, isthmus_cluster, role, worker, rank) (isthmus_rank_up{{{RANK}}}) == 0)"
                    " or vector(0)",
                    Limits(amber=1, red=2),
                ),
            ],
            "Latency": [
                graph(
                    "TTFT p50, p95, p99",
                    "s",
                    "From a request's arrival at the router to its first token: 50, 95 and 99 of 100 "
                    "requests were faster than this.",
                    *quantiles("isthmus_ttft_seconds", 50, 95, 99),
                    exemplars=True,
                ),
                graph(
                    "TTFT by stage",
                    "s",
                    "The mean request, stage by stage; together they are its wait for the first token. The "
                    "runbook IsthmusTtftBudgetBurnsFast says what to do about each stage.",
                    Query(
                        f"{rate('isthmus_ttft_stage_seconds_sum', by='stage')} / on () group_left () "
                        f"{rate('isthmus_ttft_seconds_count')}",
                        "{{stage}}",
                    ),
                    stacked=True,
                    colors=_STAGES,
                ),
                graph(
                    "ITL p50, p95, p99",
                    "s",
                    "Between two tokens of a stream: 50, 95 and 99 of 100 pauses were shorter than this.",
                    *quantiles("isthmus_itl_seconds", 50, 95, 99),
                ),
                graph(
                    "Request latency p50, p95",
                    "s",
                    "From a request's arrival to its last token; long answers take long.",
                    *quantiles("isthmus_request_seconds", 50, 95),
                    exemplars=True,
                ),
            ],
            "Load": [
                graph(
                    "Requests by outcome",
                    "reqps",
                    "Requests that ended, by how: finished, cancelled by the client, or the error's name.",
                    Query(rate("isthmus_requests_total", by="outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                graph(
                    "Requests in flight",
                    "short",
                    "Requests that routers hold open, and requests that wait for pages on ranks.",
                    Query(f"sum(isthmus_router_running_requests{{{CLUSTER}}})", "open on routers"),
                    Query(f"sum(isthmus_waiting_requests{{{CLUSTER}}})", "waiting on ranks"),
                ),
                graph(
                    "Prompt tokens, computed and cached",
                    "short",
                    "Prompt tokens per second: computed is what the hardware is paid for, the rest came "
                    "from a cache.",
                    Query(rate("isthmus_computed_tokens_total"), "computed"),
                    Query(rate("isthmus_reused_tokens_total"), "from a cache"),
                    stacked=True,
                ),
                graph(
                    "Output token throughput",
                    "short",
                    "Output tokens per second over all streams.",
                    Query(rate("isthmus_completion_tokens_total"), "generated"),
                ),
                graph(
                    "Prompt length",
                    "short",
                    "Prompt tokens: 50, 95 and 99 of 100 requests had no more. Longer prompts cost prefill "
                    "time and KV pages.",
                    *quantiles("isthmus_request_prompt_tokens", 50, 95, 99),
                ),
                graph(
                    "Output length",
                    "short",
                    "Tokens generated for a request: 50, 95 and 99 of 100 had no more. Longer answers hold "
                    "places in decode batches for longer.",
                    *quantiles("isthmus_request_output_tokens", 50, 95, 99),
                ),
                graph(
                    "Retries and migrations",
                    "reqps",
                    "Requests that left a failed rank for another one: retries before their first token, "
                    "migrations after it. Users notice a pause, no error.",
                    Query(rate("isthmus_request_moves_total", by="kind"), "{{kind}}"),
                ),
                graph(
                    "Rejected requests",
                    "reqps",
                    "Requests that ended before any rank had taken them, by the error's name. "
                    "InvalidRequest, NotFound and Forbidden are the clients' mistakes.",
                    Query(rate("isthmus_rejections_total", by="reason"), "{{reason}}"),
                ),
            ],
            "Answers": [
                graph(
                    "Tool calls",
                    "ops",
                    "Calls of tools in answers: read, or broken, which the client got as text: the model writes "
                    "them in another way than --tool-parser reads, or was cut off.",
                    Query(rate("isthmus_tool_calls_total", by="outcome"), "{{outcome}}"),
                    stacked=True,
                ),
                graph(
                    "Thinking",
                    "percentunit",
                    "Of the generated tokens, those of thinking: they cost what others cost, and users wait for "
                    "the answer behind them.",
                    Query(
                        f"{rate('isthmus_reasoning_tokens_total')} / {rate('isthmus_completion_tokens_total')}",
                        "thinking",
                    ),
                    maximum=1,
                ),
                graph(
                    "Constrained requests",
                    "reqps",
                    "Requests whose answers were kept to a constraint, by its kind.",
                    Query(rate("isthmus_constrained_requests_total", by="kind"), "{{kind}}"),
                    stacked=True,
                ),
                graph(
                    "Watchers",
                    "short",
                    "Streams of WatchCluster and of pages, those refused for their number (--max-watchers) and "
                    "finished requests that slow ones were not told of, per second.",
                    Query(f"sum(isthmus_watchers{{{CLUSTER}}})", "watching"),
                    Query(rate("isthmus_watchers_refused_total"), "refused/s"),
                    Query(rate("isthmus_watch_dropped_total"), "not told/s"),
                ),
            ],
            "Tenants": [
                graph(
                    "Tokens by tenant",
                    "short",
                    "Prompt tokens that ranks computed and tokens that they generated, per second, of each tenant of "
                    "--tenants; other: of all that the file does not name.",
                    Query(
                        f"{rate('isthmus_tenant_computed_tokens_total', by='tenant')} + "
                        f"{rate('isthmus_tenant_completion_tokens_total', by='tenant')}",
                        "{{tenant}}",
                    ),
                    stacked=True,
                ),
                graph(
                    "Refused by limit",
                    "reqps",
                    "Requests refused because their tenant had reached a limit of --tenants, by tenant and limit.",
                    Query(rate("isthmus_tenant_refused_total", by="tenant, limit"), "{{tenant}} {{limit}}"),
                ),
                graph(
                    "KV held by tenant",
                    "short",
                    "Prompt and output tokens of each tenant's running requests, whose KV ranks hold.",
                    Query(f"sum by (tenant) (isthmus_tenant_held_tokens{{{CLUSTER}}})", "{{tenant}}"),
                    stacked=True,
                ),
                graph(
                    "Hits by tenant",
                    "percentunit",
                    "Share of each tenant's prompt tokens that no rank had to compute.",
                    Query(
                        f"{rate('isthmus_tenant_reused_tokens_total', by='tenant')} / "
                        f"{rate('isthmus_tenant_prompt_tokens_total', by='tenant')}",
                        "{{tenant}}",
                    ),
                    maximum=1,
                ),
            ],
            "Plans and aliases": [
                graph(
                    "Ranks, and those that a plan wants",
                    "short",
                    "Ranks that serve, and the least that meet the goals of --plan-ttft-s and --plan-itl-ms by the "
                    "replay of the last minutes. Without goals nothing is wanted.",
                    Query(
                        f"count by (role) (max by (role, worker, rank) (isthmus_rank_up{{{CLUSTER}}}) == 1)",
                        "{{role}}",
                    ),
                    Query(
                        f"max by (role, model) (isthmus_plan_wanted_ranks{{{CLUSTER}}})",
                        "{{role}} wanted {{model}}",
                    ),
                ),
                graph(
                    "Goodput that a plan predicts",
                    "percentunit",
                    "Share of requests within the goals, for the ranks that there are and for those that are wanted.",
                    Query(
                        f"min by (ranks, model) (isthmus_plan_goodput{{{CLUSTER}}})", "{{ranks}} {{model}}"
                    ),
                    maximum=1,
                ),
                graph(
                    "TTFT p99 that a plan predicts",
                    "s",
                    "For the ranks that there are and for those that are wanted. Measured values are in Latency.",
                    Query(
                        f"max by (ranks, model) (isthmus_plan_ttft_p99_seconds{{{CLUSTER}}})",
                        "{{ranks}} {{model}}",
                    ),
                ),
                graph(
                    "Calls of an alias by model",
                    "reqps",
                    "Calls that named an alias of --models, by the model that took them: a canary's share, and "
                    "calls that went to the other side because theirs had no rank.",
                    Query(
                        rate("isthmus_alias_calls_total", by="alias, model, side"),
                        "{{alias}}: {{model}} ({{side}})",
                    ),
                    stacked=True,
                ),
            ],
        },
    )
