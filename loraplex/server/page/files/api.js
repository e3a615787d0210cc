// Calls of the server that served this page, with the keys that the user typed.

const KEYS = "loraplex.keys";

export function keys() {
  try {
    return { api: "", admin: "", ...JSON.parse(sessionStorage.getItem(KEYS) ?? "{}") };
  } catch {
    return { api: "", admin: "" };
  }
}

export function keepKeys(api, admin) {
  sessionStorage.setItem(KEYS, JSON.stringify({ api, admin }));
}

/** An answer that is no success; `message` is the server's own, with the fix in it. */
export class ServerError extends Error {
  constructor(status, message, body) {
    super(message);
    this.status = status;
    this.body = body;
  }
}

/** Call a route; throws ServerError, or TypeError where no server answers. */
export async function call(path, { body, signal, asUser = false } = {}) {
  const { api, admin } = keys();
  const key = asUser ? api || admin : admin || api;
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw await errorOf(response);
  return response;
}

export const get = async (path, query = {}) => {
  const used = Object.entries(query).filter(([, value]) => value !== "" && value !== null);
  const text = new URLSearchParams(used).toString();
  return (await call(text ? `${path}?${text}` : path)).json();
};

async function errorOf(response) {
  const text = await response.text();
  let body = null;
  try {
    body = JSON.parse(text);
  } catch {
    // a proxy's own page, say
  }
  const message = body?.error?.message ?? `the server answered ${response.status}`;
  return new ServerError(response.status, message, body);
}

/** Yield the events of a completion; throws ServerError for one that is an error. */
export async function* stream(path, body, signal) {
  const response = await call(path, { body, signal, asUser: true });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ServerError(0, "the answer was cut off: the connection to the server ended");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ServerError(0, parsed.error.message, parsed);
      yield parsed;
    }
  }
}
