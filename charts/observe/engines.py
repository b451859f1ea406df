"""What the ranks do: memory, batches, transfers."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import RANK, Query, board, graph

_RATE = "[$__rate_interval]"
_NAME = "{{role}} {{worker}}/{{rank}}"
_PROCESS = "{{role}} {{worker}} {{rank}}"  # routers have no rank
_BY_RANK = "role, worker, rank"


def _rate(metric: str, by: str = _BY_RANK) -> str:
    return f"sum by ({by}) (rate({metric}{{{RANK}}}{_RATE}))"


def _now(metric: str) -> str:
    return f"sum by ({_BY_RANK}) ({metric}{{{RANK}}})"


def _quantile(share: float, metric: str, by: str) -> str:
    return f"histogram_quantile({share}, {_rate(f'{metric}_bucket', f'le, {by}')})"


def _quantile_of_steps(share: float) -> str:
    steps = f'isthmus_engine_step_seconds_bucket{{{RANK}, kind="decode"}}'
    return f"histogram_quantile({share}, sum by (le, {_BY_RANK}) (rate({steps}{_RATE})))"


def engines() -> Dashboard:
    pages = f"isthmus_kv_pages{{{RANK}}}"
    return board(
        "isthmus-engines",
        "Isthmus / Engines",
        "Memory, batches and transfers of the ranks.",
        [
            (
                "Memory",
                [
                    graph(
                        "KV pages by state",
                        "percentunit",
                        "Shares of all pools of the chosen ranks. cached can be evicted at any time; private and "
                        "locked are in use; quarantined must drain within seconds.",
                        Query(
                            f"sum by (state) ({pages}) / on () group_left () sum({pages})",
                            "{{state}}",
                        ),
                        stacked=True,
                        maximum=1,
                    ),
                    graph(
                        "Pool in use by rank",
                        "percentunit",
                        "Share of the rank's pages that running requests hold or that are in quarantine. Near "
                        "100 % newcomers wait.",
                        Query(
                            f'sum by ({_BY_RANK}) (isthmus_kv_pages{{{RANK}, state=~"locked|private|'
                            f'quarantined"}}) / sum by ({_BY_RANK}) ({pages})',
                            _NAME,
                        ),
                        maximum=1,
                    ),
                    graph(
                        "Sent back to the queue",
                        "ops",
                        "Running requests per second that gave their pages to others for a while. Runbook: "
                        "IsthmusRetractionStorm.",
                        Query(_rate("isthmus_retractions_total"), _NAME),
                    ),
                    graph(
                        "Pages in quarantine",
                        "short",
                        "Pages set aside because a prefill rank may still write them. Runbook: "
                        "IsthmusQuarantineNotDraining.",
                        Query(
                            f'sum by ({_BY_RANK}) (isthmus_kv_pages{{{RANK}, state="quarantined"}})', _NAME
                        ),
                    ),
                ],
            ),
            (
                "Batches",
                [
                    graph(
                        "Requests running",
                        "short",
                        "Requests that hold pages, by rank.",
                        Query(_now("isthmus_running_requests"), _NAME),
                    ),
                    graph(
                        "Requests waiting",
                        "short",
                        "Requests that wait for pages or a place in the batch, by rank.",
                        Query(_now("isthmus_waiting_requests"), _NAME),
                    ),
                    graph(
                        "Wait of the next request",
                        "s",
                        "Until a request that comes now has pages, as others get them now, by rank. Routers "
                        "refuse what would wait too long.",
                        Query(_now("isthmus_queue_wait_seconds"), _NAME),
                    ),
                    graph(
                        "Time of one engine step",
                        "s",
                        "Moving average. On decode ranks it is the pause between tokens; it grows with the "
                        "batch.",
                        Query(_now("isthmus_step_seconds"), _NAME),
                    ),
                    graph(
                        "Slow engine steps",
                        "s",
                        "95 of 100 steps of single tokens took no longer than this. Far above the mean, a few "
                        "steps are long, which users see as pauses.",
                        Query(_quantile_of_steps(0.95), _NAME),
                    ),
                    graph(
                        "Tokens computed by ranks",
                        "short",
                        "Per second: prompt tokens that prefill ranks computed, tokens that decode ranks "
                        "generated.",
                        Query(_rate("isthmus_prefill_computed_tokens_total"), _NAME),
                        Query(_rate("isthmus_decode_generated_tokens_total"), _NAME),
                    ),
                    graph(
                        "Waiting for the engine",
                        "s",
                        "95 of 100 requests waited no longer than this: on decode ranks for pages, on prefill "
                        "ranks for their turn.",
                        Query(_quantile(0.95, "isthmus_decode_queue_seconds", _BY_RANK), _NAME),
                        Query(_quantile(0.95, "isthmus_prefill_queue_seconds", _BY_RANK), _NAME),
                    ),
                    graph(
                        "Prompt tokens still to compute",
                        "short",
                        "What a newcomer waits behind, by rank.",
                        Query(_now("isthmus_pending_tokens"), _NAME),
                    ),
                ],
            ),
            (
                "Transfers",
                [
                    graph(
                        "KV transfer rate",
                        "Bps",
                        "Bytes per second written into each decode rank, and sent by each prefill rank.",
                        Query(_rate("isthmus_decode_received_bytes_total"), f"into {_NAME}"),
                        Query(_rate("isthmus_prefill_sent_bytes_total"), f"from {_NAME}"),
                    ),
                    graph(
                        "Time of transfers",
                        "s",
                        "What a transfer adds to the time to first token, by decode rank: half and 99 of 100 "
                        "took no longer.",
                        Query(_quantile(0.5, "isthmus_decode_transfer_seconds", _BY_RANK), f"half, {_NAME}"),
                        Query(_quantile(0.99, "isthmus_decode_transfer_seconds", _BY_RANK), f"99 %, {_NAME}"),
                    ),
                    graph(
                        "Transfers that failed",
                        "ops",
                        "Requests per second that ended because the rank at the other end failed. Runbook: "
                        "IsthmusTransferFailures.",
                        Query(_rate("isthmus_transfer_failures_total"), _NAME),
                    ),
                    graph(
                        "Transfers that came changed",
                        "ops",
                        "Transfers per second that were given up because pages differed from what prefill wrote, of "
                        "those that are checked. Must be 0. Runbook: IsthmusKvCorrupted.",
                        Query(_rate("isthmus_kv_digest_mismatches_total"), _NAME),
                    ),
                    graph(
                        "Pages checked on arrival",
                        "short",
                        "Received pages per second that were compared with what prefill wrote; the share is "
                        "--kv-digest-share.",
                        Query(_rate("isthmus_kv_digested_pages_total"), _NAME),
                    ),
                    graph(
                        "Ranks that are up",
                        "short",
                        "1 while a router can use the rank, 0 while none can. Runbook: IsthmusRankDown.",
                        Query(f"max by ({_BY_RANK}) (isthmus_rank_up{{{RANK}}})", _NAME),
                    ),
                ],
            ),
            (
                "Processes",
                [
                    graph(
                        "CPU of the process",
                        "short",
                        "Cores that each rank's process uses.",
                        Query(_rate("process_cpu_seconds_total"), _PROCESS),
                    ),
                    graph(
                        "Memory of the process",
                        "bytes",
                        "Resident memory, the KV pool included when it lies in the host's memory.",
                        Query(_now("process_resident_memory_bytes"), _PROCESS),
                    ),
                ],
            ),
        ],
    )
