import { DEFAULTS, EXAMPLE_TOOLS, problemsOf } from "../../core/settings.js";
import { html, useState } from "../../vendor/htm-preact-3.1.1.module.js";

// What cannot be used is told at its field, and the settings stay as they were.
export const Settings = ({ session, settings }) => {
  const [typed, setTyped] = useState(settings);
  const problems = problemsOf(typed);
  const set = (name, value) => {
    const next = { ...typed, [name]: value };
    setTyped(next);
    if (!Object.keys(problemsOf(next)).length) session.setSettings(next);
  };
  const field = (name) => ({ name, typed, set, problem: problems[name] });
  return html`
    <div class="settings" role="group" aria-label="Settings">
      <${Field} label="System prompt" ...${field("system")}>
        <textarea rows="2" value=${typed.system} onInput=${(event) => set("system", event.target.value)}></textarea>
      <//>
      <div class="row">
        <${Field} label="Temperature" ...${field("temperature")}>
          <input
            inputmode="decimal"
            placeholder="the model's"
            value=${typed.temperature}
            onInput=${(event) => set("temperature", event.target.value.trim())}
          />
        <//>
        <${Field} label="Max tokens" ...${field("maxTokens")}>
          <input
            type="number"
            min="1"
            value=${typed.maxTokens}
            onInput=${(event) => set("maxTokens", event.target.valueAsNumber)}
          />
        <//>
        <${Field} label="Tenant" ...${field("tenant")}>
          <input placeholder="none" value=${typed.tenant} onChange=${(event) => set("tenant", event.target.value.trim())} />
        <//>
      </div>
      <label class="check">
        <input type="checkbox" checked=${typed.thinks} onChange=${(event) => set("thinks", event.target.checked)} />
        Let it think, if it is a model that does
      </label>
      <${Field} label="Tools (JSON)" ...${field("tools")}>
        <textarea rows="3" class="mono" spellcheck=${false} value=${typed.tools} onInput=${(event) => set("tools", event.target.value)}></textarea>
      <//>
      <div class="row end">
        <label class="inline">
          Calls
          <select value=${typed.toolChoice} onChange=${(event) => set("toolChoice", event.target.value)}>
            <option value="auto">auto</option>
            <option value="required">required</option>
            <option value="none">none</option>
          </select>
        </label>
        <button class="quiet" type="button" onClick=${() => set("tools", EXAMPLE_TOOLS)}>Example tool</button>
        <button class="quiet" type="button" onClick=${() => (setTyped(DEFAULTS), session.setSettings(DEFAULTS))}>Reset</button>
      </div>
    </div>
  `;
};

const Field = ({ label, problem, children }) => html`
  <label class="field">
    ${label}
    ${children}
    ${problem && html`<span class="problem">${problem}</span>`}
  </label>
`;
