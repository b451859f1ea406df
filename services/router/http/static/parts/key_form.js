import { html, useEffect, useRef, useState } from "../vendor/htm-preact-3.1.1.module.js";

// `problem`: why the last key was refused; empty: none was tried.
export const KeyForm = ({ session, problem }) => {
  const [key, setKey] = useState("");
  const [isTrying, setIsTrying] = useState(false);
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const submit = async (event) => {
    event.preventDefault();
    setIsTrying(true);
    await session.showKey(key.trim());
    setIsTrying(false);
  };
  return html`
    <dialog ref=${dialog} aria-labelledby="key-title" onCancel=${() => session.dismissKey()}>
      <form onSubmit=${submit}>
        <h2 id="key-title">This router asks for an API key</h2>
        <p class="dim">It is kept in this tab until that is closed, and sent to this router alone.</p>
        <label>
          API key
          <input
            type="password"
            autocomplete="off"
            spellcheck=${false}
            value=${key}
            aria-invalid=${String(Boolean(problem))}
            aria-describedby="key-problem"
            onInput=${(event) => setKey(event.target.value)}
          />
        </label>
        <p id="key-problem" class="problem" role="alert">${problem}</p>
        <div class="row end">
          <button class="quiet" type="button" onClick=${() => session.dismissKey()}>Not now</button>
          <button class="main" type="submit" disabled=${isTrying || !key.trim()}>Use it</button>
        </div>
      </form>
    </dialog>
  `;
};
