import { html, useEffect, useState } from "../vendor/htm-preact-3.1.1.module.js";
import { Chat } from "./chat/chat.js";
import { Cluster } from "./cluster/cluster.js";
import { Header } from "./header.js";
import { KeyForm } from "./key_form.js";

// Both panes side by side, or one of them at a time where the window is narrow (page.css).
export const Page = ({ session }) => {
  const [state, setState] = useState(session.state);
  const [pane, setPane] = useState("chat");
  const [shownId, setShownId] = useState("");
  useEffect(() => session.listen(setState), []);
  const show = (requestId) => {
    setPane("cluster");
    setShownId(requestId);
    // Drawn by then, whichever pane was shown before.
    requestAnimationFrame(() => document.getElementById(`turn-${requestId}`)?.scrollIntoView({ block: "nearest" }));
  };
  return html`
    <${Header} session=${session} state=${state} />
    <nav class="tabs" aria-label="Panes">
      <${Tab} name="chat" pane=${pane} setPane=${setPane}>Chat<//>
      <${Tab} name="cluster" pane=${pane} setPane=${setPane}>Cluster<//>
    </nav>
    <main class="panes" data-pane=${pane}>
      <${Chat} session=${session} state=${state} show=${show} />
      <${Cluster} session=${session} state=${state} shownId=${shownId} setShownId=${setShownId} />
    </main>
    ${state.keyProblem !== null && html`<${KeyForm} session=${session} problem=${state.keyProblem} />`}
  `;
};

const Tab = ({ name, pane, setPane, children }) => html`
  <button type="button" aria-current=${String(pane === name)} aria-controls=${name} onClick=${() => setPane(name)}>
    ${children}
  </button>
`;
