"""What the ranks do: memory, batches, transfers."""

from grafana_foundation_sdk.models.dashboard import Dashboard
from panels import BY_RANK, NAME, RANK, Query, board, graph, highest, quantile, rate

_PROCESS = "{{role}} {{worker}} {{rank}}"  # routers have no rank


_STATES = {
    "free": "#8e8e8e",
    "cached": "#73bf69",
    "private": "#3274d9",
    "locked": "#fade2a",
    "quarantined": "#f2495c",
}


def _rate(metric: str, by: str = BY_RANK) -> str:
    return rate(metric, by, RANK)


def _now(metric: str) -> str:
    return f"sum by ({BY_RANK}) ({metric}{{{RANK}}})"


def _quantile(share: float, metric: str, more: str = "") -> str:
    return quantile(share, metric, BY_RANK, RANK + more)


def engines() -> Dashboard:
    pages = f"isthmus_kv_pages{{{RANK}}}"
    return board(
        "isthmus-engines",
        "Isthmus / Engines",
        "Memory, batches and transfers of the ranks.",
        {
            "Memory": [
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
                    colors=_STATES,
                    maximum=1,
                ),
                graph(
                    "KV pool utilization by rank",
                    "percentunit",
                    "Share of the rank's pages that running requests hold or that are in quarantine. Near "
                    "100 % newcomers wait.",
                    highest(
                        f'sum by ({BY_RANK}) (isthmus_kv_pages{{{RANK}, state=~"locked|private|'
                        f'quarantined"}}) / sum by ({BY_RANK}) ({pages})',
                        NAME,
                    ),
                    maximum=1,
                ),
                graph(
                    "Retractions by rank",
                    "ops",
                    "Running requests per second that gave their pages to others for a while. Runbook: "
                    "IsthmusRetractionStorm.",
                    highest(_rate("isthmus_retractions_total"), NAME),
                ),
                graph(
                    "Quarantined pages by rank",
                    "short",
                    "Pages set aside because a prefill rank may still write them. Runbook: "
                    "IsthmusQuarantineNotDraining.",
                    highest(f'sum by ({BY_RANK}) (isthmus_kv_pages{{{RANK}, state="quarantined"}})', NAME),
                ),
            ],
            "Batches": [
                graph(
                    "Running requests by rank",
                    "short",
                    "Requests that hold pages, by rank.",
                    highest(_now("isthmus_running_requests"), NAME),
                ),
                graph(
                    "Queued requests by rank",
                    "short",
                    "Requests that wait for pages or a place in the batch, by rank.",
                    highest(_now("isthmus_waiting_requests"), NAME),
                ),
                graph(
                    "Estimated queue wait by rank",
                    "s",
                    "Until a request that comes now has pages, as others get them now, by rank. Routers "
                    "refuse what would wait too long.",
                    highest(_now("isthmus_queue_wait_seconds"), NAME),
                ),
                graph(
                    "Mean step time by rank",
                    "s",
                    "Moving average. On decode ranks without speculation it is the pause between tokens; it grows "
                    "with the batch.",
                    highest(_now("isthmus_step_seconds"), NAME),
                ),
                graph(
                    "Decode step time p95 by rank",
                    "s",
                    "95 of 100 steps of single tokens took no longer than this. Far above the mean, a few "
                    "steps are long, which users see as pauses.",
                    highest(_quantile(0.95, "isthmus_engine_step_seconds", ', kind="decode"'), NAME),
                ),
                graph(
                    "Token throughput by rank",
                    "short",
                    "Per second: prompt tokens that prefill ranks computed, tokens that decode ranks "
                    "generated.",
                    highest(_rate("isthmus_prefill_computed_tokens_total"), NAME),
                    highest(_rate("isthmus_decode_generated_tokens_total"), NAME),
                ),
                graph(
                    "Queue time p95 by rank",
                    "s",
                    "95 of 100 requests waited no longer than this: on decode ranks for pages, on prefill "
                    "ranks for their turn.",
                    highest(_quantile(0.95, "isthmus_decode_queue_seconds"), NAME),
                    highest(_quantile(0.95, "isthmus_prefill_queue_seconds"), NAME),
                ),
                graph(
                    "Pending prompt tokens by rank",
                    "short",
                    "What a newcomer waits behind, by rank.",
                    highest(_now("isthmus_pending_tokens"), NAME),
                ),
            ],
            "Speculation": [
                graph(
                    "Draft acceptance rate by source",
                    "percentunit",
                    "Of the tokens that were drafted and verified, those that were right: lookup is the "
                    "request's own text, tree and ngrams are others of its cache salt, draft is a small model.",
                    Query(
                        f"{_rate('isthmus_accepted_draft_tokens_total', 'source')} / "
                        f"{_rate('isthmus_drafted_tokens_total', 'source')}",
                        "{{source}}",
                    ),
                    maximum=1,
                ),
                graph(
                    "Drafted tokens by source",
                    "short",
                    "Verified per second. Fewer where drafts are seldom right: a request then tries one now "
                    "and then.",
                    Query(_rate("isthmus_drafted_tokens_total", "source"), "{{source}}"),
                ),
                graph(
                    "Tokens per step by rank",
                    "short",
                    "That a decoding request gets; 1 without speculation.",
                    highest(_now("isthmus_tokens_per_step"), NAME),
                ),
            ],
            "Structured output": [
                graph(
                    "Masked tokens by rank",
                    "short",
                    "Chosen under a constraint, per second; drafts that were verified are among them.",
                    highest(_rate("isthmus_masked_tokens_total"), NAME),
                ),
                graph(
                    "Mask time",
                    "s",
                    "Of a token, made while the model computes: a step waits for what lasts longer than that.",
                    highest(
                        f"{_rate('isthmus_mask_seconds_total')} / {_rate('isthmus_masked_tokens_total')}",
                        NAME,
                    ),
                ),
                graph(
                    "Compile time",
                    "s",
                    "Of a constraint that a rank did not know yet, off the event loop.",
                    highest(
                        f"{_rate('isthmus_constraint_compile_seconds_total')} / "
                        f"{_rate('isthmus_compiled_constraints_total')}",
                        NAME,
                    ),
                ),
            ],
            "Transfers": [
                graph(
                    "KV transfer throughput",
                    "Bps",
                    "Bytes per second written into each decode rank, and sent by each prefill rank. Of what "
                    "comes in, windows' tails and states are carried, whatever decode holds of a prompt.",
                    highest(_rate("isthmus_decode_received_bytes_total"), f"into {NAME}"),
                    highest(_rate("isthmus_decode_carried_bytes_total"), f"carried into {NAME}"),
                    highest(_rate("isthmus_prefill_sent_bytes_total"), f"from {NAME}"),
                ),
                graph(
                    "KV transfer latency p50, p99",
                    "s",
                    "What a transfer adds to the time to first token, by decode rank: 50 and 99 of 100 "
                    "took no longer.",
                    highest(_quantile(0.5, "isthmus_decode_transfer_seconds"), f"p50 {NAME}"),
                    highest(_quantile(0.99, "isthmus_decode_transfer_seconds"), f"p99 {NAME}"),
                ),
                graph(
                    "KV transfer failures",
                    "ops",
                    "Requests per second that ended because the rank at the other end failed. Runbook: "
                    "IsthmusTransferFailures.",
                    highest(_rate("isthmus_transfer_failures_total"), NAME),
                ),
                graph(
                    "KV digest mismatches",
                    "ops",
                    "Transfers per second that were given up because pages differed from what was sent, of "
                    "those that are checked. Must be 0. Runbook: IsthmusKvCorrupted.",
                    highest(_rate("isthmus_kv_digest_mismatches_total"), NAME),
                ),
                graph(
                    "Pages checked by digest",
                    "short",
                    "Received pages per second that were compared with what was sent; the share is "
                    "--kv-digest-share.",
                    highest(_rate("isthmus_kv_digested_pages_total"), NAME),
                ),
                graph(
                    "Ranks down, by name",
                    "short",
                    "0 while a router can use the rank, 1 while none can. Runbook: IsthmusRankDown.",
                    highest(f"1 - max by ({BY_RANK}) (isthmus_rank_up{{{RANK}}})", NAME),
                ),
            ],
            "Processes": [
                graph(
                    "CPU by process",
                    "short",
                    "Cores that each rank's process uses.",
                    highest(_rate("process_cpu_seconds_total"), _PROCESS),
                ),
                graph(
                    "Memory by process",
                    "bytes",
                    "Resident memory, the KV pool included when it lies in the host's memory.",
                    highest(_now("process_resident_memory_bytes"), _PROCESS),
                ),
            ],
        },
    )
