import { promptLanes } from "../core/bars.js";
import { bytes, count } from "../core/format.js";
import { foundAtDecode } from "../core/placed.js";
import { html } from "../vendor/htm-preact-3.1.1.module.js";
import { Bar } from "./bar.js";

// The prompt as one bar in two lanes: how decode came by its KV, and what was computed for that.
export const PromptBar = ({ placed, size }) => {
  const lanes = promptLanes(placed);
  const label = labelOf(placed);
  return html`
    <div class=${`prompt-bar ${size ?? ""}`}>
      <${Bar} segments=${lanes.came} whole=${lanes.whole} label=${label} />
      <${Bar} segments=${lanes.computed} whole=${lanes.whole} label="computed, of the same prompt" size="thin" />
    </div>
  `;
};

export const PromptNumbers = ({ placed }) => {
  const { plan, source, usage } = placed;
  return html`
    <p class="numbers">
      <span><b>${count(usage.prompt_tokens)}</b> prompt tokens</span>
      <span data-kind="found"><b>${count(foundAtDecode(placed))}</b> found</span>
      ${usage.pulled_tokens > 0 &&
      html`<span data-kind="pulled"><b>${count(usage.pulled_tokens)}</b> pulled from ${source}</span>`}
      ${plan === "remote" &&
      html`<span data-kind="moved"><b>${count(usage.delta_tokens)}</b> moved, ${bytes(usage.kv_bytes_moved)}</span>`}
      <span data-kind="computed"><b>${count(usage.computed_tokens)}</b> computed</span>
      ${usage.kv_bytes_saved > 0 && html`<span><b>${bytes(usage.kv_bytes_saved)}</b> saved</span>`}
    </p>
  `;
};

const labelOf = (placed) => {
  const { plan, decode, source, usage } = placed;
  const found = `Of ${usage.prompt_tokens} prompt tokens ${foundAtDecode(placed)} were found on ${decode}`;
  const pulled = usage.pulled_tokens > 0 ? `, ${usage.pulled_tokens} pulled from ${source}` : "";
  const moved = plan === "remote" ? `, ${usage.delta_tokens} moved` : "";
  return `${found}${pulled}${moved}, ${usage.computed_tokens} were computed`;
};
