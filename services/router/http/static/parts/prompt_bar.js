import { promptLanes } from "../core/bars.js";
import { bytes, count } from "../core/format.js";
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
  const { plan, usage } = placed;
  return html`
    <p class="numbers">
      <span><b>${count(usage.prompt_tokens)}</b> prompt tokens</span>
      <span data-kind="found"><b>${count(usage.decode_prefix_len)}</b> found</span>
      ${plan === "remote" &&
      html`<span data-kind="moved"><b>${count(usage.delta_tokens)}</b> moved, ${bytes(usage.kv_bytes_moved)}</span>`}
      <span data-kind="computed"><b>${count(usage.computed_tokens)}</b> computed</span>
      ${usage.kv_bytes_saved > 0 && html`<span><b>${bytes(usage.kv_bytes_saved)}</b> saved</span>`}
    </p>
  `;
};

const labelOf = ({ plan, decode, usage }) => {
  const found = `Of ${usage.prompt_tokens} prompt tokens ${usage.decode_prefix_len} were found on ${decode}`;
  const moved = plan === "remote" ? `, ${usage.delta_tokens} moved` : "";
  return `${found}${moved}, ${usage.computed_tokens} were computed`;
};
