import { count, seconds } from "../../core/format.js";
import { html } from "../../vendor/htm-preact-3.1.1.module.js";
import { PromptBar, PromptNumbers } from "../prompt_bar.js";
import { StageBar } from "../stage_bar.js";
import { Prices } from "./prices.js";

// The conversation's requests, the newest first.
export const Turns = ({ answers, cluster, shownId, setShownId }) => html`
  <section aria-label="This conversation">
    <div class="section-head">
      <h2>This conversation</h2>
      <${Legend} />
    </div>
    ${answers.length === 0 && html`<p class="empty">Its turns come here: where each ran, what it found and what moved.</p>`}
    ${answers
      .map((answer, index) => {
        const request = cluster.placed[answer.requestId];
        return html`<${Turn}
          key=${answer.requestId}
          title=${`Turn ${index + 1}`}
          id=${answer.requestId}
          state=${answer.state}
          placed=${request?.placed ?? answer.placed}
          prices=${request?.prices ?? []}
          running=${cluster.running.find(({ id }) => id === answer.requestId)}
          isOpen=${shownId === answer.requestId}
          setIsOpen=${(isOpen) => setShownId(isOpen ? answer.requestId : "")}
        />`;
      })
      .reverse()}
  </section>
`;

export const Legend = () => html`
  <p class="legend">
    <span data-kind="found">found on decode</span>
    <span data-kind="moved">moved to decode</span>
    <span data-kind="pulled">pulled from another rank</span>
    <span data-kind="computed">computed</span>
  </p>
`;

// A request: its ranks, its prompt as a bar, the way to its first token, and on a click what its place was chosen by.
export const Turn = ({ title, id, state, placed, prices, running, isOpen, setIsOpen }) => html`
  <details class="turn" id=${`turn-${id}`} open=${isOpen} data-request=${id} onToggle=${(event) => event.target.open !== isOpen && setIsOpen(event.target.open)}>
    <summary>
      <span class="turn-head">
        <b>${title}</b>
        <span class="way">${placed ? wayOf(placed) : wayOfRunning(running)}</span>
        ${placed?.plan && html`<span class="plan" title=${PLANS[placed.plan]}>${placed.plan}</span>`}
        <span class="more">${placed ? "prices" : doing(state, running)}</span>
      </span>
      ${placed && placed.usage.prompt_tokens > 0 ? html`<${Told} placed=${placed} />` : html`<${Untold} state=${state} running=${running} />`}
    </summary>
    <${Prices} placed=${placed} prices=${prices} />
  </details>
`;

const PLANS = {
  remote: "a prefill rank computes the prompt, and what decode lacks of it crosses",
  local: "the decode rank computes what it lacks: nothing crosses",
};

const wayOf = ({ prefill, decode, route }) => {
  const places = route.length > 1 ? route : [decode];
  return [prefill, ...places].filter(Boolean).join(" → ");
};

const wayOfRunning = (running) => [running?.prefill, running?.decode].filter(Boolean).join(" → ");

const doing = (state, running) => {
  if (state === "failed" || state === "stopped") return state;
  return running ? `${running.completion} tokens, ${seconds(running.age_s)}` : "waiting";
};

const Told = ({ placed }) => html`
  <span class="told">
    <${PromptBar} placed=${placed} />
    <${PromptNumbers} placed=${placed} />
    <${StageBar} placed=${placed} />
  </span>
`;

const untoldText = (state, running) => {
  if (state === "failed") return "It failed before anything was placed.";
  return running?.prompt ? html`<span><b>${count(running.prompt)}</b> prompt tokens</span>` : "";
};

// As high as what comes in its place.
const Untold = ({ state, running }) => html`
  <span class=${`told untold ${state}`}>
    <span class="bar"></span>
    <span class="numbers">${untoldText(state, running)}</span>
    <span class="bar"></span>
    <span class="numbers"></span>
  </span>
`;
