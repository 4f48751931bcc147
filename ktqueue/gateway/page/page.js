// The web page of the gateway: a chat, and a view of workers, queues and jobs.
// It talks to the same API as every other client. All that it remembers is in sessionStorage of this tab.

const KEY = "ktqueue.key";
const CHAT = "ktqueue.chat";
const POLL_MS = 2000;
const KEPT_SAMPLES = 300; // ten minutes of a plot
const MAX_ATTACHED = 256 * 1024; // bytes of one file
const RECONNECTS = 8; // attempts to take up a broken stream

const element = (id) => document.getElementById(id);

// ---- requests

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.status === 401) askForKey();
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not one of our errors, for example of a proxy
  }
  const error = new Error(message);
  error.status = response.status;
  return error;
}

function notice(text) {
  element("notice").textContent = text;
  element("notice").hidden = !text;
}

function askForKey() {
  const dialog = element("key-dialog");
  if (!dialog.open) dialog.showModal();
}

// ---- the conversation

const fresh = () => ({ id: crypto.randomUUID(), messages: [], waiting: false });
let chat = fresh();
let stopping = false;

function remember() {
  try {
    sessionStorage.setItem(CHAT, JSON.stringify(chat));
  } catch {
    notice("This conversation is too long to survive a reload of the page.");
  }
}

function recall() {
  try {
    chat = JSON.parse(sessionStorage.getItem(CHAT)) || fresh();
  } catch {
    chat = fresh();
  }
}

function requestBody() {
  const body = { messages: chat.messages.filter((message) => !message.failed).map(plainMessage), stream: true };
  const system = element("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  if (element("model").value) body.model = element("model").value;
  if (element("temperature").value !== "") body.temperature = Number(element("temperature").value);
  body.max_tokens = Number(element("max-tokens").value) || 512;
  const format = element("format").value;
  if (format === "json_object") body.response_format = { type: format };
  if (format === "json_schema") {
    body.response_format = { type: format, json_schema: { name: "answer", schema: parsed("schema", "JSON schema") } };
  }
  if (element("tools").value.trim()) body.tools = parsed("tools", "list of tools");
  return body;
}

function parsed(id, what) {
  try {
    return JSON.parse(element(id).value);
  } catch (error) {
    throw new Error(`The ${what} is not JSON: ${error.message}`);
  }
}

function plainMessage(message) {
  const plain = { role: message.role, content: message.content };
  if (message.tool_calls?.length) plain.tool_calls = message.tool_calls;
  if (message.tool_call_id) plain.tool_call_id = message.tool_call_id;
  return plain;
}

async function send() {
  let body;
  try {
    body = requestBody();
  } catch (error) {
    notice(error.message);
    return;
  }
  await answer((headers) =>
    call("v1/chat/completions", {
      method: "POST",
      headers: { ...headers, "Content-Type": "application/json", "X-Conversation-Id": chat.id },
      body: JSON.stringify(body),
    }),
  );
}

// Take up the answer that was being written when the page was left. The stream is read again from its beginning.
async function resume() {
  await answer(follow);
}

const follow = (headers) => call(`v1/stream?conv_id=${encodeURIComponent(chat.id)}`, { headers });

async function answer(open) {
  notice("");
  stopping = false;
  const mine = chat;
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [] };
  if (mine.messages.at(-1)?.role === "assistant" && mine.waiting) mine.messages.pop();
  mine.messages.push(message);
  mine.waiting = true;
  remember();
  draw();
  let last = "";
  try {
    for (let attempt = 0; ; attempt++) {
      try {
        const headers = last ? { "Last-Event-ID": last } : {};
        const response = await (attempt === 0 ? open(headers) : follow(headers));
        for await (const event of events(response.body)) {
          if (event.id) last = event.id;
          if (event.data === "[DONE]") return;
          take(message, JSON.parse(event.data));
          if (chat === mine) redrawLast();
        }
        if (stopping) return;
        throw new TypeError("the stream ended early");
      } catch (error) {
        // Only a broken connection is worth another attempt: the server's own errors are final.
        if (!(error instanceof TypeError) || attempt >= RECONNECTS) throw error;
        await new Promise((done) => setTimeout(done, Math.min(5000, 200 * 2 ** attempt)));
      }
    }
  } catch (error) {
    if (!stopping) {
      notice(error.message);
      message.failed = !message.content && !message.reasoning && !message.tool_calls.length;
      if (message.failed) mine.messages.pop();
    }
  } finally {
    mine.waiting = false;
    if (chat === mine) {
      remember();
      draw();
    }
  }
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      const event = { id: "", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("id: ")) event.id = line.slice(4);
        if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      if (event.data) yield event;
    }
  }
}

function take(message, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const delta = choice.delta || {};
  message.content += delta.content || "";
  message.reasoning += delta.reasoning_content || "";
  for (const piece of delta.tool_calls || []) {
    const known = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    known.id = piece.id || known.id;
    known.function.name += piece.function?.name || "";
    known.function.arguments += piece.function?.arguments || "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

async function stop() {
  stopping = true;
  try {
    await call(`v1/stream?conv_id=${encodeURIComponent(chat.id)}`, { method: "DELETE" });
  } catch (error) {
    notice(error.message);
  }
}

// ---- drawing messages

const NAMES = { user: "You", assistant: "Model", tool: "Tool result", system: "System" };

function draw() {
  element("messages").replaceChildren(...chat.messages.map(drawn));
  element("stop").hidden = !chat.waiting;
  element("send").disabled = chat.waiting;
  scrollDown();
}

function redrawLast() {
  const list = element("messages");
  const place = chat.messages.length - 1;
  const former = list.children[place];
  const opened = former?.querySelector(".reasoning")?.open;
  const next = drawn(chat.messages[place], place);
  if (opened && next.querySelector(".reasoning")) next.querySelector(".reasoning").open = true;
  if (former) former.replaceWith(next);
  else list.append(next);
  scrollDown();
}

function scrollDown() {
  const list = element("messages");
  list.scrollTop = list.scrollHeight;
}

function made(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function drawn(message, place) {
  const item = made("li", { className: message.role });
  const who = made("div", { className: "who" }, made("strong", { textContent: NAMES[message.role] || message.role }));
  const isLast = place === chat.messages.length - 1;
  if (!chat.waiting) {
    if (message.role === "user") who.append(action("Edit", () => edit(place)));
    if (message.role === "assistant" && isLast) who.append(action("Regenerate", () => regenerate(place)));
    if (message.content) who.append(action("Copy", () => navigator.clipboard?.writeText(message.content)));
  }
  item.append(who);
  if (message.reasoning) {
    item.append(
      made("details", { className: "reasoning" },
        made("summary", { textContent: "Reasoning" }),
        made("div", { className: "text", textContent: message.reasoning })),
    );
  }
  item.append(...written(message.content));
  (message.tool_calls || []).forEach((each) => {
    if (each) item.append(drawnCall(each));
  });
  if (isLast && !chat.waiting && message.tool_calls?.length) item.append(resultForm(message));
  if (chat.waiting && isLast && !message.content && !message.reasoning && !message.tool_calls?.length) {
    item.append(made("div", { className: "text", textContent: "…" }));
  }
  return item;
}

function action(name, run) {
  const button = made("button", { type: "button", textContent: name });
  button.addEventListener("click", run);
  return button;
}

// Text with its fenced blocks of code. Whole JSON is indented. Nothing is ever read as HTML.
function written(content) {
  const pretty = indented(content);
  if (pretty !== null) return [made("pre", { textContent: pretty })];
  return content.split(/```[^\n]*\n([\s\S]*?)(?:```|$)/).map((part, place) =>
    place % 2 ? made("pre", { textContent: part }) : made("div", { className: "text", textContent: part }),
  );
}

function indented(text) {
  if (!/^\s*[{[]/.test(text)) return null;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return null;
  }
}

function drawnCall(each) {
  const shown = indented(each.function.arguments) ?? each.function.arguments;
  return made("details", { className: "call", open: true },
    made("summary", { textContent: `Calls ${each.function.name}` }),
    made("pre", { textContent: shown }));
}

function resultForm(message) {
  const form = made("form", { className: "results" });
  const boxes = message.tool_calls.filter(Boolean).map((each) => {
    const box = made("textarea", { rows: 2 });
    form.append(made("label", {}, `Result of ${each.function.name} `, box));
    return [each, box];
  });
  form.append(made("button", { type: "submit", textContent: "Send results" }));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    for (const [each, box] of boxes) chat.messages.push({ role: "tool", tool_call_id: each.id, content: box.value });
    send();
  });
  return form;
}

function edit(place) {
  element("question").value = chat.messages[place].content;
  chat.messages.length = place;
  remember();
  draw();
  element("question").focus();
}

function regenerate(place) {
  chat.messages.length = place;
  send();
}

async function attach(files) {
  const question = element("question");
  for (const file of files) {
    if (file.size > MAX_ATTACHED) {
      notice(`${file.name} has ${file.size} bytes; a file may have at most ${MAX_ATTACHED}.`);
      continue;
    }
    const text = await file.text();
    question.value += `${question.value ? "\n" : ""}${file.name}:\n\`\`\`\n${text.trimEnd()}\n\`\`\`\n`;
  }
  question.focus();
}

// ---- workers, queues, batches, jobs

const samples = { throughput: [], "first-token": [], waiting: [] };
let firstTokens = null; // sum of seconds and number of requests at the last look
let looking = 0;
let seesStatus = true;

// The plots are fed while the chat is shown, too. A tenant's key may see its jobs, but not the status of all.
async function look() {
  clearTimeout(looking);
  const shown = !element("queue").hidden;
  try {
    if (seesStatus) showStatus(await (await call("v1/status")).json());
    if (shown) showBatches((await (await call("v1/batches")).json()).data);
    if (shown) fill("jobs", (await (await call("v1/jobs?limit=30")).json()).data.map(jobRow));
    if (shown) notice("");
  } catch (error) {
    if (error.status === 403) seesStatus = false;
    else if (shown) notice(error.message);
  }
  for (const section of document.querySelectorAll("#queue .everybody")) section.hidden = !seesStatus;
  looking = setTimeout(look, document.hidden ? 5 * POLL_MS : POLL_MS);
}

const seconds = (value) => (value == null ? "–" : value < 10 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`);

function showStatus(status) {
  const waiting = status.queues.reduce((sum, queue) => sum + queue.waiting, 0);
  plot("throughput", status.tokens_per_second, status.tokens_per_second.toFixed(1));
  plot("waiting", waiting, String(waiting));
  const { seconds: sum, count } = status.first_token;
  const before = firstTokens || { sum: 0, count: 0 };
  const mean = count > before.count ? (sum - before.sum) / (count - before.count) : samples["first-token"].at(-1) ?? null;
  firstTokens = { sum, count };
  plot("first-token", mean, seconds(mean));
  fill("workers", status.workers.map((worker) => [
    worker.id, worker.model, worker.jobs, `${worker.stats.running ?? 0} of ${worker.max_num_seqs}`,
    (worker.stats.generation_tokens_per_second ?? 0).toFixed(1),
    worker.stats.total_pages ? `${Math.round(100 * (1 - worker.stats.free_pages / worker.stats.total_pages))} %` : "–",
  ]));
  fill("queues", status.queues.map((queue) => [queue.model, queue.job_class, queue.waiting, seconds(queue.oldest_wait)]));
}

const left = (value) => {
  const [size, unit] = value >= 7200 ? [3600, "h"] : value >= 120 ? [60, "min"] : [1, "s"];
  return value == null ? "–" : `${Math.round(value / size)} ${unit}`;
};

function showBatches(batches) {
  element("batches-part").hidden = !batches.length;
  fill("batches", batches.map(batchRow));
}

function batchRow(batch) {
  const { total, completed, failed } = batch.request_counts;
  const done = completed + failed;
  const bar = made("progress", { max: total || 1, value: done });
  bar.setAttribute("aria-label", `Lines of ${batch.id}`);
  const cell = made("span", { className: "actions" });
  const path = `v1/batches/${encodeURIComponent(batch.id)}/cancel`;
  if (batch.status === "validating" || batch.status === "in_progress") cell.append(cancelling(batch.id, path, "POST"));
  for (const [name, file] of [["Output", batch.output_file_id], ["Errors", batch.error_file_id]]) {
    if (!file) continue;
    const button = action(name, () => download(file, `${batch.id}.${name.toLowerCase()}.jsonl`));
    button.setAttribute("aria-label", `${name} of ${batch.id}`);
    cell.append(button);
  }
  const counted = `${done.toLocaleString("en")} of ${total.toLocaleString("en")}${failed ? `, ${failed.toLocaleString("en")} failed` : ""}`;
  const fault = batch.errors?.data[0];
  const lines = fault
    ? made("span", { className: "fault", textContent: `${fault.line ? `line ${fault.line}: ` : ""}${fault.message}` })
    : made("span", { className: "lines" }, bar, counted);
  return [batch.id, batch.status.replace("_", " "), lines, batch.model ?? "–", left(batch.progress?.seconds_left), cell];
}

// Without a key the browser itself stores the file while it arrives.
async function download(file, name) {
  const path = `v1/files/${encodeURIComponent(file)}/content`;
  try {
    const href = sessionStorage.getItem(KEY) ? URL.createObjectURL(await (await call(path)).blob()) : path;
    made("a", { href, download: name }).click();
    if (href !== path) setTimeout(() => URL.revokeObjectURL(href), 60_000);
  } catch (error) {
    notice(error.message);
  }
}

function cancelling(id, path, method) {
  const button = action("Cancel", async () => {
    button.disabled = true;
    await call(path, { method }).catch((error) => notice(error.message));
    look();
  });
  button.setAttribute("aria-label", `Cancel ${id}`);
  return button;
}

function jobRow(job) {
  const cell = made("span");
  if (job.state === "queued" || job.state === "running") {
    cell.append(cancelling(job.id, `v1/jobs/${encodeURIComponent(job.id)}`, "DELETE"));
  }
  return [job.id, job.state, job.model, job.job_class, job.usage?.completion_tokens ?? "–", cell];
}

function fill(table, rows) {
  element(table).tBodies[0].replaceChildren(
    ...rows.map((row) => made("tr", {}, ...row.map((value) => made("td", {}, value instanceof Node ? value : String(value))))),
  );
}

function plot(name, value, shown) {
  const kept = samples[name];
  if (value != null) kept.push(value);
  if (kept.length > KEPT_SAMPLES) kept.shift();
  const top = Math.max(...kept, 1e-9);
  const points = kept.map((sample, place) => `${300 - (300 * (kept.length - 1 - place)) / (KEPT_SAMPLES - 1)},${78 - (74 * sample) / top}`);
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  line.setAttribute("points", points.join(" "));
  element(name).replaceChildren(line);
  element(`${name}-now`).textContent = shown;
}

// ---- start

async function listModels() {
  try {
    const { data } = await (await call("v1/models")).json();
    const select = element("model");
    const former = select.value;
    select.replaceChildren(...data.map((model) => made("option", { value: model.id, textContent: model.id })));
    if (data.some((model) => model.id === former)) select.value = former;
    notice(data.length ? "" : "No worker serves a model yet.");
  } catch (error) {
    notice(error.message);
  }
}

function show(view) {
  for (const name of ["chat", "queue"]) {
    element(name).hidden = name !== view;
    if (name === view) element(`show-${name}`).setAttribute("aria-current", "page");
    else element(`show-${name}`).removeAttribute("aria-current");
  }
  look();
  if (view === "chat") element("question").focus();
}

element("show-chat").addEventListener("click", () => show("chat"));
element("show-queue").addEventListener("click", () => show("queue"));
element("change-key").addEventListener("click", askForKey);
element("key-dialog").addEventListener("close", () => {
  if (element("key-dialog").returnValue === "save") {
    sessionStorage.setItem(KEY, element("key").value);
    element("key").value = "";
    seesStatus = true;
    listModels();
    look();
  }
});
element("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("question").value.trim();
  if (!text || chat.waiting) return;
  element("question").value = "";
  chat.messages.push({ role: "user", content: text });
  send();
});
element("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && chat.waiting && !element("key-dialog").open) stop();
});
element("stop").addEventListener("click", stop);
element("new-chat").addEventListener("click", () => {
  if (chat.waiting) stop();
  chat = fresh();
  remember();
  draw();
  element("question").focus();
});
element("attach").addEventListener("change", (event) => {
  attach([...event.target.files]);
  event.target.value = "";
});

recall();
draw();
await listModels();
if (chat.waiting) resume();
look();
element("question").focus();
