import { codeApart, count, seconds } from "../../core/format.js";
import { foundAtDecode } from "../../core/placed.js";
import { html } from "../../vendor/htm-preact-3.1.1.module.js";
import { PromptBar } from "../prompt_bar.js";

const ENDS = { length: "ended by max tokens", content_filter: "filtered" };

// What the model says is text, and never markup.
export const Answer = ({ answer, placed, show, again }) => html`
  <div class="said model" data-state=${answer.state} aria-busy=${String(["waiting", "streaming"].includes(answer.state))}>
    ${answer.reasoning && html`<${Thinking} answer=${answer} />`}
    ${answer.content && codeApart(answer.content).map((piece) => (piece.isCode ? html`<pre class="text code"><code>${piece.text}</code></pre>` : html`<p class="text">${piece.text}</p>`))}
    ${answer.state === "waiting" && !answer.reasoning && html`<p class="text dim"><span class="caret" aria-label="waiting"></span></p>`}
    ${answer.calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${answer.state === "failed" && html`<${Failed} answer=${answer} again=${again} />`}
    <${Caption} answer=${answer} placed=${placed} show=${show} />
  </div>
`;

const Thinking = ({ answer }) => html`
  <details class="fold">
    <summary>${answer.state === "streaming" && !answer.content ? "Thinking…" : "Thinking"}</summary>
    <p class="text dim">${answer.reasoning}</p>
  </details>
`;

const Call = ({ call }) => html`
  <details class="fold">
    <summary>Calls <code>${call.name}</code>${call.result === null ? "" : ", answered"}</summary>
    <pre class="text">${shown(call.args)}</pre>
    ${call.result !== null && html`<p class="dim">Result</p><pre class="text">${call.result}</pre>`}
  </details>
`;

const shown = (args) => {
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args; // still being written, or broken
  }
};

const Failed = ({ answer, again }) => html`
  <p class="problem" role="alert">
    ${answer.error}
    ${again && html`<button class="quiet" type="button" onClick=${again}>Try again</button>`}
  </p>
`;

// One line of what the right side tells in full; there from the beginning, so that nothing moves when it is known.
const Caption = ({ answer, placed, show }) => html`
  <div class="caption">
    ${placed && placed.usage.prompt_tokens > 0
      ? html`
          <button class="caption-button" type="button" onClick=${() => show(answer.requestId)} title="Show what the cluster did">
            <${PromptBar} placed=${placed} size="mini" />
            <span>
              ${count(foundAtDecode(placed))} of ${count(placed.usage.prompt_tokens)} found, first token after
              ${" "}${seconds(placed.first_token_s)}${ends(answer)}
            </span>
          </button>
        `
      : html`<span>${answer.state === "stopped" ? "stopped" : ""}</span>`}
  </div>
`;

const ends = (answer) => (answer.state === "stopped" ? ", stopped" : ENDS[answer.ended] ? `, ${ENDS[answer.ended]}` : "");
