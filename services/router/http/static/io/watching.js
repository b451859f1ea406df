// Follows the cluster's watch for as long as the page is open: after an error again, later each time.

import { ApiError, watchEvents } from "./api.js";

const INTERVAL_S = 0.5;
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;
const SILENCE_MS = 45_000; // a comment comes in 15 s where nothing else does: this long, and the connection is dead

// `tell(event, isFirst)` hears each event, `changed(link, message)` how it stands: live, lost, refused (401) or forbidden (403),
// missing (404). Ends with `signal`, and after a refusal, for the same key would be refused again.
export const follow = async (key, which, signal, tell, changed) => {
  let waitMs = FIRST_WAIT_MS;
  while (!signal.aborted) {
    let isFirst = true;
    try {
      for await (const event of alive(key, which, signal)) {
        if (isFirst) changed("live", "");
        tell(event, isFirst);
        waitMs = FIRST_WAIT_MS;
        isFirst = false;
      }
      changed("lost", "the router ended the stream");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && REFUSALS[error.status]) {
        changed(REFUSALS[error.status], error.message);
        return;
      }
      changed("lost", error.message);
    }
    await sleep(waitMs, signal);
    waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
  }
};

const REFUSALS = { 401: "refused", 403: "forbidden", 404: "missing" };

async function* alive(key, which, signal) {
  const silence = new AbortController();
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => silence.abort(), SILENCE_MS);
  };
  heard();
  const either = AbortSignal.any([signal, silence.signal]);
  try {
    yield* watchEvents(key, { ...which, intervalS: INTERVAL_S, signal: either, heard });
  } catch (error) {
    if (silence.signal.aborted) throw new ApiError(0, "the router has gone silent");
    throw error;
  } finally {
    clearTimeout(timer);
  }
}

const sleep = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
