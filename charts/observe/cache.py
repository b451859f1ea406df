"""Whether requests meet the KV that is there, and whether the index tells routers the truth."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import BY_RANK, CLUSTER, NAME, RANK, Query, board, graph, highest, lowest, quantile, rate


def _share(metric: str, by: str) -> str:
    """Of the prompt tokens sent to ranks."""
    return f"{rate(metric, by, RANK)} / {rate('isthmus_placed_prompt_tokens_total', by, RANK)}"


def _increase(metric: str) -> str:
    return rate(metric, function="increase")


def cache() -> Dashboard:
    placed = rate("isthmus_placed_prompt_tokens_total", BY_RANK, RANK)
    # A rank that nothing was ever sent to has no series of its own.
    ranks = f"count by (role) (max by ({BY_RANK}) (isthmus_rank_up{{{RANK}}}) == 1)"
    return board(
        "isthmus-cache",
        "Isthmus / Cache and routing",
        "Whether requests go where their prefix is, what that saves, and whether the index is to be trusted.",
        {
            "Cache hits": [
                graph(
                    "Cache hit rate by rank",
                    "percentunit",
                    "Share of the prompt tokens sent to the rank that it had already. Decode ranks under plan "
                    "remote: KV that need not move; ranks that compute: tokens that they need not.",
                    lowest(_share("isthmus_delivered_hit_tokens_total", BY_RANK), NAME),
                    maximum=1,
                ),
                graph(
                    "Hit rate: predicted, delivered, available",
                    "percentunit",
                    "Predicted: what the routers believed of the chosen ranks. Delivered: what they held. "
                    "Available: what the best rank was believed to hold. held: what need not move; resumable: what "
                    "need not be computed. Far apart: runbook IsthmusHitRateFell.",
                    *(
                        Query(
                            _share(f"isthmus_{which}_hit_tokens_total", "role, kind"),
                            f"{{{{role}}}} {{{{kind}}}} {which}",
                        )
                        for which in ("predicted", "delivered", "available")
                    ),
                    maximum=1,
                ),
                graph(
                    "Hit prediction accuracy by rank",
                    "percentunit",
                    "Of the tokens that the index said the rank held, the share that it had. Below 100 %: "
                    "it evicts faster than the index hears, or its publisher lags. resumable: of the tokens "
                    "from whose end it was to go on computing.",
                    lowest(
                        f"min by ({BY_RANK}, kind) (isthmus_rank_trust{{{RANK}}})",
                        f"{NAME} {{{{kind}}}}",
                    ),
                    maximum=1,
                ),
                graph(
                    "KV bytes moved and saved",
                    "Bps",
                    "Moved from prefill to decode ranks, and not moved because the decode rank held them.",
                    Query(rate("isthmus_kv_moved_bytes_total"), "moved"),
                    Query(rate("isthmus_kv_saved_bytes_total"), "saved"),
                    stacked=True,
                ),
                graph(
                    "Pulls by result",
                    "reqps",
                    "Placements that named another rank to pull KV from, by what came of it: pulled; not_needed, for "
                    "the rank had it by then; or why it computed instead. evicted: the index is behind. busy: the "
                    "source lends as much as it may. late, failed: its link or its load.",
                    Query(rate("isthmus_pulls_total", "result"), "{{result}}"),
                    stacked=True,
                ),
                graph(
                    "Token drift",
                    "percentunit",
                    "Tokens of past turns that came back other than they were generated, as a share of "
                    "prompt tokens: hits lost because clients send text instead of token_ids.",
                    Query(
                        f"{rate('isthmus_drift_tokens_total')} / {rate('isthmus_prompt_tokens_total')}",
                        "drifted",
                    ),
                ),
                graph(
                    "Past answers",
                    "ops",
                    "Past answers in chats, by what became of them: given (as token_ids), found (remembered, put in "
                    "as they were), changed (the template writes them otherwise), unknown (encoded anew: another "
                    "router gave them, or they are forgotten).",
                    Query(rate("isthmus_past_answers_total", by="outcome"), "{{outcome}}"),
                    stacked=True,
                ),
            ],
            "Placement": [
                graph(
                    "Placements by plan and reason",
                    "reqps",
                    "Decisions by plan and reason. pinned and longest_prefix keep a conversation at home; "
                    "cheapest means that home was too busy or there was none; share, that of several "
                    "routers this one prefers that rank; same_prompt, that it is a further answer.",
                    Query(rate("isthmus_placements_total", "plan, reason"), "{{plan}}: {{reason}}"),
                    stacked=True,
                ),
                graph(
                    "Load imbalance by role",
                    "short",
                    "Prompt tokens of the busiest rank against the mean of those of its role that are up: 1 is even, "
                    "the number of ranks means that one takes everything.",
                    Query(f"max by (role) ({placed}) / (sum by (role) ({placed}) / {ranks})", "{{role}}"),
                ),
                graph(
                    "Pinned conversations",
                    "short",
                    "Conversations that routers remember a home for.",
                    Query(f"max(isthmus_index_pins{{{CLUSTER}}})", "pinned"),
                ),
                graph(
                    "Pin writes by outcome",
                    "short",
                    "Pins per minute: written to etcd, dropped because too many waited, or lost to another "
                    "router that was first.",
                    Query(f"60 * {rate('isthmus_pins_total', 'outcome')}", "{{outcome}}"),
                ),
            ],
            "Index": [
                graph(
                    "Index staleness",
                    "s",
                    "How far each router's index is behind the ranks, and the age of 99 of 100 updates "
                    "when they arrived. Runbook: IsthmusIndexStale.",
                    Query(
                        f"max by (worker) (isthmus_index_staleness_seconds{{{CLUSTER}}})",
                        "{{worker}} now",
                    ),
                    Query(quantile(0.99, "isthmus_index_update_staleness_seconds"), "p99 of updates"),
                ),
                graph(
                    "Index staleness by rank",
                    "s",
                    "How far the routers' knowledge of each rank's cache is behind it, where it is farthest. "
                    "One rank above the others: its CPU or network. Runbook: IsthmusIndexStale.",
                    highest(f"max by ({BY_RANK}) (isthmus_index_rank_staleness_seconds{{{RANK}}})", NAME),
                ),
                graph(
                    "Index blocks by rank",
                    "short",
                    "Index blocks by rank, as the routers know them.",
                    highest(f"max by ({BY_RANK}) (isthmus_index_rank_blocks{{{RANK}}})", NAME),
                ),
                graph(
                    "Resumable blocks by rank",
                    "short",
                    "Index blocks at whose end the rank kept tails and states, as the routers know them. Empty "
                    "for models that carry none: their ranks go on wherever they hold.",
                    highest(f"max by ({BY_RANK}) (isthmus_index_rank_resumable_blocks{{{RANK}}})", NAME),
                ),
                graph(
                    "Index gaps and resyncs",
                    "short",
                    "Records of ranks that routers missed, ranks they read again, listings of the whole "
                    "index, and values they could not read. All rare; a listing at each start is normal.",
                    Query(_increase("isthmus_index_gaps_total"), "gaps"),
                    Query(_increase("isthmus_index_resyncs_total"), "ranks read again"),
                    Query(_increase("isthmus_index_listings_total"), "listings"),
                    Query(_increase("isthmus_index_torn_values_total"), "unreadable values"),
                ),
                graph(
                    "Degraded routers",
                    "short",
                    "Routers that cannot follow etcd, by reason; they place by what they remember and by "
                    "load. Runbook: IsthmusRouterDegraded.",
                    Query(f"sum by (reason) (isthmus_router_degraded{{{CLUSTER}}})", "{{reason}}"),
                    stacked=True,
                ),
            ],
            "etcd": [
                graph(
                    "etcd latency p95",
                    "s",
                    "95 of 100 calls were answered within this time, by kind of call. No request waits for "
                    "them.",
                    Query(quantile(0.95, "isthmus_etcd_round_trip_seconds", "method"), "{{method}}"),
                ),
                graph(
                    "etcd failures",
                    "short",
                    "Calls that failed, writes that had to be tried again, and leases that were lost, each "
                    "over the last interval. Runbook: IsthmusEtcdLeaseLosses.",
                    Query(f"{_increase('isthmus_etcd_failures_total')} or vector(0)", "failed calls"),
                    Query(_increase("isthmus_publisher_failures_total"), "failed writes"),
                    Query(_increase("isthmus_lease_losses_total"), "leases lost"),
                ),
            ],
        },
    )
