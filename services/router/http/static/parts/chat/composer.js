import { html, useEffect, useLayoutEffect, useRef, useState } from "../../vendor/htm-preact-3.1.1.module.js";

// Enter sends, Shift and Enter is a new line, Escape stops an answer. `call`: whose result is asked for, or null.
export const Composer = ({ session, call, isAsking }) => {
  const [text, setText] = useState("");
  const area = useRef(null);
  useEffect(() => area.current.focus({ preventScroll: true }), []);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight + 2}px`; // with its border
  }, [text]);
  const send = () => {
    if (isAsking || !text.trim()) return;
    session.say(text);
    setText("");
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else if (event.key === "Escape" && isAsking) {
      session.stop();
    }
  };
  const label = call === null ? "Your message" : `What ${call.name} came to`;
  return html`
    <form class="composer" onSubmit=${(event) => (event.preventDefault(), send())}>
      <textarea
        ref=${area}
        rows="1"
        value=${text}
        aria-label=${label}
        placeholder=${call === null ? "Ask something" : `${label}: its result goes back to the model`}
        onInput=${(event) => setText(event.target.value)}
        onKeyDown=${typed}
      ></textarea>
      ${isAsking
        ? html`<button class="main" type="button" key="stop" onClick=${() => session.stop()}>Stop</button>`
        : html`<button class="main" type="submit" key="send" disabled=${!text.trim()}>Send</button>`}
    </form>
  `;
};
