import { ago, count, seconds } from "../../core/format.js";
import { html, useState } from "../../vendor/htm-preact-3.1.1.module.js";
import { PromptBar } from "../prompt_bar.js";
import { Turn } from "./turns.js";

const SHOWN = 20;

// Requests that were not made here: of the same tenant, or of everybody with an operator's key. Their prompts are not told.
export const Requests = ({ session, state, running, finished }) => {
  const [openId, setOpenId] = useState("");
  return html`
    <section aria-label="Other requests">
      <div class="section-head">
        <h2>Other requests</h2>
        <label class="check">
          <input type="checkbox" checked=${state.everybody} onChange=${(event) => session.setEverybody(event.target.checked)} />
          everybody's
        </label>
      </div>
      ${state.everybodyProblem && html`<p class="problem" role="alert">${state.everybodyProblem}</p>`}
      ${running.length + finished.length === 0 && html`<p class="empty">None since this page was opened.</p>`}
      <ul class="requests">
        ${running.slice(0, SHOWN).map((request) => html`<${Running} key=${request.id} request=${request} />`)}
        ${finished
          .slice(0, SHOWN)
          .map((request) =>
            openId === request.id
              ? html`<li key=${request.id}><${Opened} request=${request} close=${() => setOpenId("")} /></li>`
              : html`<${Finished} key=${request.id} request=${request} open=${() => setOpenId(request.id)} />`,
          )}
      </ul>
      ${finished.length > SHOWN && html`<p class="empty">and ${count(finished.length - SHOWN)} before these</p>`}
    </section>
  `;
};

const Running = ({ request }) => html`
  <li>
    <span class="request" data-outcome="running">
      <span class="request-id" title=${request.id}>${request.id}</span>
      <span class="way">${[request.prefill, request.decode].filter(Boolean).join(" → ")}</span>
      <span class="request-bar"></span>
      <span class="number">${count(request.completion)} tokens</span>
      <span class="when">${seconds(request.age_s)}</span>
    </span>
  </li>
`;

const Finished = ({ request, open }) => {
  const { placed } = request;
  return html`
    <li>
      <button class="request" type="button" data-outcome=${request.outcome} onClick=${open} aria-label=${`Request ${request.id}, ${request.outcome}`}>
        <span class="request-id" title=${request.id}>${request.id}</span>
        <span class="way">${placed ? [placed.prefill, placed.decode].filter(Boolean).join(" → ") : request.outcome}</span>
        <span class="request-bar">${placed && placed.usage.prompt_tokens > 0 && html`<${PromptBar} placed=${placed} size="mini" />`}</span>
        <span class="number">${placed ? seconds(placed.first_token_s) : "–"}</span>
        <span class="when">${ago(Math.max(0, Date.now() / 1000 - request.endedAt))}</span>
      </button>
    </li>
  `;
};

const Opened = ({ request, close }) => html`
  <${Turn}
    title=${request.id}
    id=${request.id}
    state=${request.outcome === "ok" ? "done" : "failed"}
    placed=${request.placed}
    prices=${request.prices}
    isOpen=${true}
    setIsOpen=${close}
  />
`;
