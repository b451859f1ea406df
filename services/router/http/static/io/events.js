// Server-sent events of a response (WHATWG HTML, 9.2). EventSource cannot send a key, so fetch does.

// The data of each event, until the stream ends. Comments are left aside, and so are names; `heard` is told of all that
// comes.
export async function* eventsOf(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n\n");
      rest = lines.pop();
      for (const lump of lines) {
        const data = lump
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    await reader.cancel().catch(() => {}); // it may have failed already, and has said so to whoever reads
  }
}
