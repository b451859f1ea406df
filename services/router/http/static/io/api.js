// Calls to the router that served this page. Paths are relative: it may be served below another one.

import { eventsOf } from "./events.js";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // of HTTP; 0: nobody answered
  }
}

// `key`: the API key, or empty. It goes into a header, and into no address.
const headersOf = (key, more) => ({ ...(key ? { authorization: `Bearer ${key}` } : {}), ...more });

const asked = async (path, options) => {
  let response;
  try {
    response = await fetch(path, { ...options, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the router does not answer");
  }
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
};

const messageOf = async (response) => {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.slice(0, 200) || `HTTP ${response.status}`;
  }
};

// The names of the models that are served.
export const modelNames = async (key, signal) => {
  const response = await asked("v1/models", { headers: headersOf(key), signal });
  return (await response.json()).data.map((model) => model.id);
};

// Chunks of a chat's answer.
export async function* chatChunks(key, body, { requestId, tenant, signal }) {
  const more = { "content-type": "application/json", "x-request-id": requestId };
  const headers = headersOf(key, tenant ? { ...more, "x-isthmus-tenant": tenant } : more);
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await asked("v1/chat/completions", options);
  yield { request_id: response.headers.get("x-request-id") ?? requestId };
  for await (const data of eventsOf(response)) {
    if (data !== "[DONE]") yield JSON.parse(data);
  }
}

// Events of the cluster's watch.
export async function* watchEvents(key, { tenant, everybody, intervalS, signal, heard }) {
  const query = new URLSearchParams({ interval_s: String(intervalS) });
  if (tenant) query.set("tenant", tenant);
  if (everybody) query.set("all_tenants", "true");
  const response = await asked(`v1/cluster/watch?${query}`, { headers: headersOf(key), signal });
  for await (const data of eventsOf(response, heard)) yield JSON.parse(data);
}
