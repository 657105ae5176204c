// The server's protocol: OpenAI's, with the extensions in docs/serving.md.

export class Problem extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

const KEY = "tinyforge-key";
export const apiKey = {
  get() { try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; } },
  set(value) { try { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } catch { /* kept by nobody */ } },
};

async function send(path, body, signal) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let answer;
  try {
    answer = await fetch(path, { method: body === undefined ? "GET" : "POST", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer. Is it still running?");
  }
  if (!answer.ok) {
    const found = (await answer.json().catch(() => null))?.error;
    throw new Problem(found?.message || `The server answered with status ${answer.status}.`,
      { status: answer.status, code: found?.code, retryAfter: Number(answer.headers.get("Retry-After")) || null });
  }
  return answer;
}

export const models = async () => (await (await send("/v1/models")).json()).data;
export const attention = async (request, signal) => (await send("/v1/attention", request, signal)).json();

/* The tokens of the last message, a reply that is there, each with what the model expected in its place. */
export const score = async (request, signal) => (await (await send("/v1/chat/completions", request, signal)).json()).choices[0].tinyforge.tokens;

/* The chunks of a streamed reply. Throws a Problem for an error, also in the middle, and if the end is missing. */
export async function* chat(request, signal) {
  const answer = await send("/v1/chat/completions", { ...request, stream: true }, signal);
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return;
    let chunk;
    try { chunk = JSON.parse(data); } catch { throw new Problem("The server sent something that is not JSON."); }
    if (chunk.error) throw new Problem(chunk.error.message || "The server stopped with an error.", { code: chunk.error.code });
    yield chunk;
  }
  throw new Problem("The connection broke before the reply was complete.", { code: "broken" });
}

/* The data of server-sent events, however the bytes were cut. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try { part = await reader.read(); } catch (error) {
        if (error.name === "AbortError") throw error;
        return;  // broken: the caller sees that the end is missing
      }
      if (part.done) return;
      rest += part.value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, ""));
        if (data.length) yield data.join("\n");
      }
    }
  } finally { reader.cancel().catch(() => {}); }
}
