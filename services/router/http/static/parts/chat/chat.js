import { openCall } from "../../core/conversation.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact-3.1.1.module.js";
import { Answer } from "./answer.js";
import { Composer } from "./composer.js";
import { Settings } from "./settings.js";

const NEAR_END = 60; // pixels: who reads there follows the answer

export const Chat = ({ session, state, show }) => {
  const [isSetting, setIsSetting] = useState(false);
  const { turns } = state;
  const log = useFollowing(turns);
  const isAsking = ["waiting", "streaming"].includes(turns.at(-1)?.state);
  return html`
    <section class="pane chat" id="chat" aria-label="Chat">
      <div class="pane-head">
        <h2>Chat</h2>
        <button class="quiet" type="button" aria-expanded=${String(isSetting)} onClick=${() => setIsSetting(!isSetting)}>
          Settings
        </button>
        <button class="quiet" type="button" disabled=${!turns.length} onClick=${() => session.startOver()}>New chat</button>
      </div>
      ${isSetting && html`<${Settings} session=${session} settings=${state.settings} />`}
      <div class="log" ref=${log} role="log" aria-live="polite" tabindex="0" aria-label="Conversation">
        ${turns.length === 0 && html`<${Welcome} session=${session} model=${state.model} />`}
        ${turns.map((turn, index) =>
          turn.role === "user"
            ? html`<div key=${index} class="said user"><p class="text">${turn.content}</p></div>`
            : html`<${Answer}
                key=${index}
                answer=${turn}
                placed=${state.cluster.placed[turn.requestId]?.placed ?? turn.placed}
                show=${show}
                again=${index === turns.length - 1 ? () => session.again() : null}
              />`,
        )}
      </div>
      <${Composer} session=${session} call=${openCall(turns)} isAsking=${isAsking} />
    </section>
  `;
};

// Scrolls with what comes, as long as the reader is at the end.
const useFollowing = (turns) => {
  const log = useRef(null);
  const follows = useRef(true);
  useEffect(() => {
    const noted = () => {
      const { scrollHeight, scrollTop, clientHeight } = log.current;
      follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
    };
    log.current.addEventListener("scroll", noted, { passive: true });
  }, []);
  useLayoutEffect(() => {
    if (follows.current) log.current.scrollTop = log.current.scrollHeight;
  }, [turns]);
  return log;
};

const EXAMPLES = [
  "What is an isthmus? Answer as if I had never seen a map, and tell me of two that ships' captains know.",
  "Why would anybody dig a canal through an isthmus? Give three reasons, each in a sentence.",
];

const Welcome = ({ session, model }) => html`
  <div class="welcome">
    <h3>Talk to ${model || "the model"}</h3>
    <p class="dim">
      Ask twice. The second turn finds on its decode rank what the first one left there, and only the rest, the delta, is
      computed and moved. The right side shows it.
    </p>
    ${EXAMPLES.map((text) => html`<button key=${text} class="example" type="button" onClick=${() => session.say(text)}>${text}</button>`)}
  </div>
`;
