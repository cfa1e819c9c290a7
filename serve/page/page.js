"use strict";
// What the server is doing, once a second, and a chat with its model.

const POLL_MS = 1000;
const SHOWN = 120; // points of the line of live rounds
const byId = (id) => document.getElementById(id);
const page = { live: [], last: null, messages: [], running: null, known: "" };

function say(id, text) {
  byId(id).textContent = text;
}

function headers() {
  const key = byId("key").value;
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

async function ask(path) {
  const answer = await fetch(path, { headers: headers() });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error ? body.error.message : body.status);
  return body;
}

// Figures

const milliseconds = (value) => (value === null ? "no prediction" : value.toFixed(2) + " ms");

async function poll() {
  try {
    const load = await ask("load");
    show(load);
    // Only what has changed since: a model that was loading is there now.
    if (page.known !== load.state) {
      await describe(await ask("version"));
      page.known = load.state;
    }
  } catch (error) {
    page.known = "";
    say("state", error instanceof TypeError ? "no connection" : error.message);
    byId("state").className = "badge";
  }
  setTimeout(poll, POLL_MS);
}

function show(load) {
  say("state", load.state);
  byId("state").className = "badge " + load.state;
  meter("rows", load.running, load.slots);
  meter("queue", load.waiting, load.queue_size);
  say("usage", (100 * load.kv_cache_usage).toFixed(1) + " %");
  say("rounds", String(load.rounds));
  say("round", load.round_ms ? load.round_ms.toFixed(2) + " ms, measured" : "none yet");
  say("predicted", milliseconds(load.predicted_round_ms));
  follow(load.rounds);
  histogram(load.acceptance);
}

function meter(name, value, most) {
  byId(name + "-meter").max = Math.max(most, 1);
  byId(name + "-meter").value = value;
  say(name, value + " of " + most);
}

function follow(rounds) {
  const now = performance.now();
  if (page.last && rounds >= page.last.rounds) {
    page.live.push((1000 * (rounds - page.last.rounds)) / (now - page.last.time));
    page.live = page.live.slice(-SHOWN);
  }
  page.last = { rounds, time: now };
  const top = Math.max(1, ...page.live);
  const points = page.live.map((one, at) => 2 * (SHOWN - page.live.length + at) + "," + (46 - (44 * one) / top));
  byId("live").innerHTML = '<polyline points="' + points.join(" ") + '"></polyline>';
}

function histogram(counts) {
  const all = counts.reduce((sum, one) => sum + one, 0);
  const top = Math.max(1, ...counts);
  const rows = counts.map((count, accepted) => {
    const row = document.createElement("tr");
    const bar = document.createElement("i");
    bar.style.width = (100 * count) / top + "%";
    row.append(cell(String(accepted)), document.createElement("td"), cell(String(count)));
    row.children[1].append(bar);
    return row;
  });
  byId("acceptance").tBodies[0].replaceChildren(...rows);
  const accepted = counts.reduce((sum, count, at) => sum + at * count, 0);
  say("mean", all ? (accepted / all).toFixed(2) + " of " + (counts.length - 1) + " drafts accepted per round" : "no drafts yet");
}

function cell(text) {
  const found = document.createElement("td");
  found.className = "number";
  found.textContent = text;
  return found;
}

async function describe(version) {
  say("scheme", version.scheme || "–");
  say("backend", version.backend ? version.backend + " (" + version.kernel + ")" : "–");
  say("kernel", version.target ? "for " + version.target : "none");
  say("fingerprint", version.fingerprint || "–");
  say("what", version.description || "");
  const mib = (bytes) => (bytes / 2 ** 20).toFixed(1) + " MiB";
  const planned = version.hbm_bytes !== null && version.hbm_bytes !== undefined;
  say("memory", planned ? mib(version.hbm_bytes) + " HBM, " + mib(version.vmem_bytes) + " VMEM, planned" : "no plan");
  pictures(version.pictures || []);
  if (!version.backend) return;
  const models = await ask("v1/models");
  say("model", models.data[0].id);
}

function pictures(names) {
  say("no-plan", names.length ? "" : "No kernel runs, so there is no plan to draw.");
  const buttons = names.map((name) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name.replace(".html", "");
    button.onclick = () => {
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      byId("picture").src = "static/" + name;
      byId("picture").hidden = false;
    };
    return button;
  });
  byId("pictures").replaceChildren(...buttons);
}

// Chat

function article(kind, text) {
  const found = document.createElement("article");
  found.className = kind;
  found.textContent = text;
  byId("messages").append(found);
  return found;
}

function part(parent, kind) {
  const found = document.createElement("div");
  found.className = kind;
  parent.append(found);
  return found;
}

function grow(place, text) {
  if (!place || !text) return;
  place.append(text);
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

function body() {
  const temperature = byId("temperature").value;
  return {
    messages: page.messages,
    stream: true,
    stream_options: { include_usage: true },
    draft: byId("draft").checked,
    chat_template_kwargs: { enable_thinking: byId("think").checked },
    ...(temperature !== "" && { temperature: Number(temperature) }),
  };
}

// The events of a stream, as objects; the last one is not an event but the word [DONE].
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const one of parts) {
      const data = one.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(question) {
  page.messages.push({ role: "user", content: question });
  article("user", question);
  const place = article("assistant", "");
  const parts = {};
  const started = performance.now();
  let content = "", usage = null, reason = "";
  page.running = new AbortController();
  busy(true);
  try {
    const sent = { method: "POST", headers: headers(), body: JSON.stringify(body()), signal: page.running.signal };
    const found = await fetch("v1/chat/completions", sent);
    if (!found.ok) throw new Error((await found.json()).error.message);
    for await (const event of events(found)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      const choice = event.choices[0];
      if (!choice) continue;
      reason = choice.finish_reason || reason;
      if (choice.delta.reasoning_content) grow((parts.thought ||= part(place, "thought")), choice.delta.reasoning_content);
      if (choice.delta.content) {
        content += choice.delta.content;
        grow((parts.content ||= part(place, "content")), choice.delta.content);
      }
    }
  } catch (error) {
    reason = error.name === "AbortError" ? "stopped" : "failed";
    if (reason === "failed") part(place, "error").textContent = error.message;
  }
  page.messages.push({ role: "assistant", content });
  const seconds = (performance.now() - started) / 1000;
  const footer = document.createElement("footer");
  footer.textContent = [reason, ...told(usage, seconds)].join(", ");
  place.append(footer);
  busy(false);
}

function told(usage, seconds) {
  if (!usage) return [];
  const { rounds, drafted, accepted } = usage.draft;
  return [
    usage.completion_tokens + " tokens in " + seconds.toFixed(2) + " s",
    rounds + " rounds",
    drafted ? accepted + " of " + drafted + " drafts accepted" : "no drafts",
  ];
}

function busy(is) {
  byId("send").disabled = is;
  byId("stop").disabled = !is;
  if (!is) page.running = null;
}

byId("ask").onsubmit = (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || page.running) return;
  byId("question").value = "";
  answer(question);
};
byId("question").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey) return;
  event.preventDefault();
  byId("ask").requestSubmit();
};
byId("stop").onclick = () => page.running && page.running.abort();
byId("clear").onclick = () => {
  if (page.running) page.running.abort();
  page.messages = [];
  byId("messages").replaceChildren();
};
poll();
