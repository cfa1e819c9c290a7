"use strict";
// The timeline. Events of a lane never overlap and are sorted, so what is in view is found by
// binary search; what is narrower than a pixel is drawn as shares of that pixel, from running sums.
// The work of a frame depends on the size of the window, not on the number of events.

const data = JSON.parse(document.getElementById("data").textContent);
const LABELS = 150, RULER = 26, PARTS = data.parts.length ? 18 : 0, LAYERS = 18;
const HEAD = RULER + PARTS + LAYERS; // what does not scroll
const GAP = 3, WIDE = 1.5;
const columns = data.events;
const count = columns.id.length;
const starts = Float64Array.from(columns.start_ns, (ns) => ns / 1000);
const ends = Float64Array.from(columns.start_ns, (ns, index) => (ns + columns.duration_ns[index]) / 1000);
const rowOf = new Map(columns.id.map((id, index) => [id, index]));
const DIMMED = data.classes.length; // colour class of what a search does not match
const colours = [...data.classes.map((one) => one.colour), "#e4e7eb"];
const classOf = Uint8Array.from(columns.class);
const endOfAll = data.round_us * 1.01;
const SHORTEST = 0.05; // us that a whole window may show

let lanes = []; // of the chosen rank: {track, first, last, y, height, sums, used}
let view = { from: 0, to: endOfAll, scroll: 0 };
let selected = -1, hovered = -1, matches = null, matchList = [], matchAt = -1;
const stage = document.querySelector(".stage");
const tip = document.querySelector(".tip");

// Running sums: sums[c][i] is the time of class c in the lane's events before first + i.
function prepare(lane) {
  const length = lane.last - lane.first;
  const shown = (event) => (matches && !matches[event] ? DIMMED : classOf[event]);
  lane.used = [];
  lane.sums = new Map();
  for (let event = lane.first; event < lane.last; event++) {
    const one = shown(event);
    if (!lane.sums.has(one)) { lane.sums.set(one, new Float64Array(length + 1)); lane.used.push(one); }
    lane.sums.get(one)[event - lane.first + 1] = ends[event] - starts[event];
  }
  lane.used.sort((a, b) => a - b);
  for (const sums of lane.sums.values()) for (let i = 1; i <= length; i++) sums[i] += sums[i - 1];
  lane.critical = new Float64Array(length + 1);
  for (let i = 0; i < length; i++) {
    const event = lane.first + i;
    lane.critical[i + 1] = lane.critical[i] + (columns.critical[event] ? ends[event] - starts[event] : 0);
  }
}

function chooseRank(rank) {
  lanes = [];
  let y = HEAD + GAP, group = "";
  for (const track of data.tracks) {
    if (track.rank !== rank) continue;
    if (group && track.group !== group) y += 8;
    group = track.group;
    const height = track.group === "core" ? 30 : track.group === "hbm" ? 30 : 15;
    const lane = { track, first: track.first, last: track.last, y, height };
    prepare(lane);
    lanes.push(lane);
    y += height + GAP;
  }
  lanes.bottom = y;
  if (selected >= 0 && !laneOf(selected)) select(-1);
  surface.redraw();
}

const laneOf = (event) => lanes.find((lane) => event >= lane.first && event < lane.last);
const scaleOf = (width) => (width - LABELS) / (view.to - view.from);
const xOf = (us, width) => LABELS + (us - view.from) * scaleOf(width);
const timeAt = (x, width) => view.from + (x - LABELS) / scaleOf(width);

function draw(context, width, height) {
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, width, height);
  context.save();
  context.beginPath();
  context.rect(LABELS, 0, width - LABELS, height);
  context.clip();
  drawGrid(context, width, height);
  for (const lane of lanes) {
    const y = lane.y - view.scroll;
    if (y > height || y + lane.height < RULER) continue;
    drawLane(context, lane, y, width);
  }
  drawArrow(context, width);
  drawMarks(context, width, height);
  drawHead(context, width);
  context.restore();
  drawLabels(context, height);
}

function drawGrid(context, width, height) {
  const step = tickStep(view.to - view.from, (width - LABELS) / 110);
  context.strokeStyle = "#eef0f3";
  context.beginPath();
  for (let us = Math.ceil(view.from / step) * step; us < view.to; us += step) {
    const x = Math.round(xOf(us, width)) + 0.5;
    context.moveTo(x, RULER);
    context.lineTo(x, height);
  }
  context.stroke();
}

function drawLane(context, lane, y, width) {
  const scale = scaleOf(width);
  let event = lowerBound(ends, view.from, lane.first, lane.last);
  const stop = lowerBound(starts, view.to, event, lane.last);
  while (event < stop) {
    if ((ends[event] - starts[event]) * scale >= WIDE) {
      drawEvent(context, lane, event, y, width, scale);
      event += 1;
      continue;
    }
    // Everything that begins in this pixel. Only the last of it can reach beyond it.
    const pixel = Math.floor(xOf(starts[event], width));
    let after = Math.max(event + 1, lowerBound(starts, timeAt(pixel + 1, width), event, stop));
    if (after - 1 > event && (ends[after - 1] - starts[after - 1]) * scale >= WIDE) after -= 1;
    drawShares(context, lane, event, after, pixel, y, scale);
    event = after;
  }
}

function drawEvent(context, lane, event, y, width, scale) {
  const left = Math.max(LABELS, xOf(starts[event], width));
  const right = Math.min(width, xOf(ends[event], width));
  const dimmed = matches && !matches[event];
  context.fillStyle = colours[dimmed ? DIMMED : classOf[event]];
  const gap = right - left > 4 ? 0.6 : 0; // a hair between neighbours
  context.fillRect(left, y, right - left - gap, lane.height);
  if (columns.critical[event] && !dimmed) {
    context.fillStyle = "#1b1f24";
    context.fillRect(left, y + lane.height - 3, right - left - gap, 3);
  }
  if (right - left > 34) {
    context.font = SMALL;
    context.fillStyle = dimmed ? "#8a929c" : "#ffffff";
    context.textBaseline = "middle";
    context.textAlign = "left";
    const text = clipped(context, labelOf(event), right - left - 8);
    if (text) context.fillText(text, left + 4, y + Math.min(lane.height, 24) / 2);
  }
  if (event === selected || event === hovered) {
    context.strokeStyle = event === selected ? "#1b1f24" : "#66707c";
    context.lineWidth = event === selected ? 2 : 1;
    context.strokeRect(left + 0.5, y + 0.5, Math.max(1, right - left - 1), lane.height - 1);
    context.lineWidth = 1;
  }
}

function drawShares(context, lane, first, after, pixel, y, scale) {
  const a = first - lane.first, b = after - lane.first;
  const end = ends[after - 1];
  const span = Math.max(1 / scale, end - starts[first]);
  let from = y + lane.height;
  for (const one of lane.used) {
    const sums = lane.sums.get(one);
    const part = (sums[b] - sums[a]) / span;
    if (part <= 0) continue;
    const height = Math.min(from - y, Math.max(1, part * lane.height));
    from -= height;
    context.fillStyle = colours[one];
    context.fillRect(pixel, from, 1, height);
  }
  if (!matches && (lane.critical[b] - lane.critical[a]) / span > 0.25) {
    context.fillStyle = "#1b1f24";
    context.fillRect(pixel, y + lane.height - 3, 1, 3);
  }
}

function labelOf(event) {
  const stall = data.stalls[columns.stall[event]];
  const phase = data.phases[columns.phase[event]];
  return stall ? `wait: ${stall}` : `${phase.id} ${phase.title}`;
}

// The event that this one waited for or was started by, else the one that let it begin.
function causeOf(event) {
  const source = rowOf.get(columns.source[event]);
  return source === undefined ? rowOf.get(columns.after[event]) : source;
}

// From the cause of the selected event, to it.
function drawArrow(context, width) {
  if (selected < 0) return;
  const before = causeOf(selected);
  const source = before === undefined ? null : laneOf(before), lane = laneOf(selected);
  if (!source || !lane) return;
  const x0 = xOf(ends[before], width), y0 = source.y - view.scroll + source.height / 2;
  const x1 = xOf(starts[selected], width), y1 = lane.y - view.scroll + lane.height / 2;
  context.strokeStyle = "#1b1f24";
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x0 + 30, y0, x1 - 30, y1, x1, y1);
  context.stroke();
  context.setLineDash([]);
}

function drawMarks(context, width, height) {
  for (const [us, text, colour] of [
    [data.floor_us, "floor", "#2f8f5b"], [data.round_us, `end of the ${data.unit}`, "#22272e"],
  ]) {
    const x = Math.round(xOf(us, width)) + 0.5;
    if (x < LABELS || x > width) continue;
    context.strokeStyle = colour;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(x, RULER);
    context.lineTo(x, height);
    context.stroke();
    context.setLineDash([]);
    const label = `${text} ${usText(us)}`;
    context.font = SMALL;
    const wide = context.measureText(label).width + 10;
    const bottom = Math.min(height - 8, lanes.bottom - view.scroll + (text === "floor" ? 18 : 38));
    context.fillStyle = "#ffffffe0";
    context.fillRect(x - wide - 4, bottom - 9, wide, 18);
    context.fillStyle = colour;
    context.textAlign = "right";
    context.textBaseline = "middle";
    context.fillText(label, x - 8, bottom);
  }
}

function drawHead(context, width) {
  context.fillStyle = "#ffffff";
  context.fillRect(LABELS, 0, width, HEAD);
  const step = tickStep(view.to - view.from, (width - LABELS) / 110);
  context.font = SMALL;
  context.fillStyle = "#66707c";
  context.textAlign = "center";
  context.textBaseline = "middle";
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  for (let us = Math.ceil(view.from / step) * step; us < view.to; us += step) {
    if (xOf(us, width) < LABELS + 12) continue;
    context.fillText(us.toFixed(digits), xOf(us, width), RULER / 2);
  }
  drawSpans(context, width, data.parts, RULER, ["#dbe7f3", "#f3e6d4"], (one) => [one.part, one.part]);
  drawSpans(context, width, data.layers, RULER + PARTS, ["#edf0f4", "#e3e8ee"],
    (one) => [`layer ${one.layer}`, String(one.layer)]);
}

// Stretches of time below the ruler, in turn in two colours, with a long or a short name.
function drawSpans(context, width, spans, top, fills, names) {
  for (const [index, one] of spans.entries()) {
    const left = Math.max(LABELS, xOf(one.start_us, width));
    const right = Math.min(width, xOf(one.end_us, width));
    if (right <= left) continue;
    context.fillStyle = fills[index % 2];
    context.fillRect(left, top, right - left, LAYERS - 2);
    if (right - left > 18) {
      const [long, short] = names(one);
      context.fillStyle = "#66707c";
      context.fillText(right - left > 60 ? long : short, (left + right) / 2, top + LAYERS / 2 - 1);
    }
  }
}

function drawLabels(context, height) {
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, LABELS, height);
  context.font = FONT;
  context.fillStyle = "#22272e";
  context.textBaseline = "middle";
  context.textAlign = "right";
  let name = "";
  for (const lane of lanes) {
    const y = lane.y - view.scroll;
    if (lane.track.name !== name && y > RULER) {
      context.fillText(clipped(context, lane.track.name, LABELS - 22), LABELS - 10, y + lane.height / 2);
    }
    name = lane.track.name;
  }
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, LABELS, RULER + LAYERS);
  context.fillStyle = "#66707c";
  context.font = SMALL;
  context.fillText("predicted \u00b5s", LABELS - 10, RULER / 2);
  if (PARTS) context.fillText("part", LABELS - 10, RULER + PARTS / 2 - 1);
  context.fillText("layer", LABELS - 10, RULER + PARTS + LAYERS / 2 - 1);
  context.strokeStyle = "#d9dde2";
  context.strokeRect(LABELS - 0.5, -1, 1, height + 2);
}

// Moves the window, never beyond the step.
function show(from, to) {
  const span = Math.min(endOfAll, Math.max(SHORTEST, to - from));
  const first = Math.min(Math.max(0, from), endOfAll - span);
  view.from = first;
  view.to = first + span;
  surface.redraw();
}

function zoom(factor, around) {
  const span = (view.to - view.from) * factor;
  const part = (around - view.from) / (view.to - view.from);
  show(around - part * span, around + (1 - part) * span);
}

function pan(part) {
  const by = (view.to - view.from) * part;
  show(view.from + by, view.to + by);
}

function scrollBy(pixels) {
  const most = Math.max(0, lanes.bottom + 60 - surface.height);
  view.scroll = Math.min(most, Math.max(0, view.scroll + pixels));
  surface.redraw();
}

function eventAt(x, y) {
  if (x < LABELS || y < HEAD) return -1;
  const lane = lanes.find((one) => y >= one.y - view.scroll && y <= one.y - view.scroll + one.height);
  if (!lane) return -1;
  const slack = 2 / scaleOf(surface.width), time = timeAt(x, surface.width);
  const event = lowerBound(ends, time - slack, lane.first, lane.last);
  let best = -1, distance = slack;
  for (let one = event; one < lane.last && starts[one] <= time + slack; one++) {
    if (starts[one] <= time && time <= ends[one]) return one;
    const far = Math.min(Math.abs(starts[one] - time), Math.abs(ends[one] - time));
    if (far <= distance) { best = one; distance = far; }
  }
  return best;
}

function select(event) {
  selected = event;
  const list = document.querySelector("aside dl");
  document.getElementById("whole").style.display = event < 0 ? "" : "none";
  if (event < 0) { fillFacts(list, []); surface.redraw(); return; }
  const phase = data.phases[columns.phase[event]];
  const track = data.tracks[columns.track[event]];
  const before = causeOf(event);
  const kernel = phase.kernel_line
    ? element("a", `kernel.py:${phase.kernel_line}`, { href: `../kernel.py#L${phase.kernel_line}` }) : "";
  const waited = before === undefined ? "" : element("button", labelOf(before).slice(0, 60));
  if (waited) waited.onclick = () => { select(before); reveal(before); };
  fillFacts(list, [
    ["op", data.ops[columns.op[event]]], ["phase", phase.id], ["kind", data.kinds[columns.kind[event]]],
    ["part", phase.part],
    ["layer", columns.layer[event] < 0 ? "" : String(columns.layer[event])],
    ["rank", String(track.rank)], ["track", track.name],
    ["start", usText(starts[event])], ["end", usText(ends[event])],
    ["takes", `${usText(ends[event] - starts[event])}, predicted`],
    ["bytes", columns.bytes[event] ? `${columns.bytes[event].toLocaleString("en")}` : ""],
    ["slot", columns.slot[event] < 0 ? "" : String(columns.slot[event])],
    ["stall", data.stalls[columns.stall[event]]],
    ["critical path", columns.critical[event] ? "yes" : "no"],
    ["comes after", waited], ["kernel", kernel], ["model", phase.location],
    ["event", String(columns.id[event])],
  ]);
  surface.redraw();
}

// Brings an event into view, on its own rank, a fifth of the window wide at most.
function reveal(event) {
  const rank = data.tracks[columns.track[event]].rank;
  const chosen = document.getElementById("rank");
  if (Number(chosen.value) !== rank) { chosen.value = String(rank); chooseRank(rank); }
  const middle = (starts[event] + ends[event]) / 2;
  const span = Math.min(view.to - view.from, Math.max(SHORTEST, (ends[event] - starts[event]) * 12));
  show(middle - span / 2, middle + span / 2);
  const lane = laneOf(event);
  if (lane.y - view.scroll > surface.height - 40) scrollBy(lane.y - view.scroll - surface.height + 80);
  if (lane.y - view.scroll < HEAD) scrollBy(lane.y - view.scroll - HEAD - 10);
}

// Marks the events whose phase, op, stall or layer fits the words, such as `p09` or `layer 12`.
function search(text) {
  const wanted = text.trim().toLowerCase();
  matches = null;
  matchList = [];
  matchAt = -1;
  if (wanted) {
    const layer = /^layer (\d+)$/.exec(wanted);
    const fits = (words) => words.map((one) => one.toLowerCase().includes(wanted));
    const phases = fits(data.phases.map((one) => `${one.id} ${one.title} ${one.kind} ${one.part}`));
    const stalls = fits(data.stalls), kinds = fits(data.kinds), ops = fits(data.ops);
    matches = new Uint8Array(count);
    const rank = Number(document.getElementById("rank").value);
    for (let event = 0; event < count; event++) {
      const found = layer ? columns.layer[event] === Number(layer[1])
        : phases[columns.phase[event]] || stalls[columns.stall[event]] || kinds[columns.kind[event]]
          || ops[columns.op[event]];
      matches[event] = found ? 1 : 0;
      if (found && data.tracks[columns.track[event]].rank === rank) matchList.push(event);
    }
    matchList.sort((a, b) => starts[a] - starts[b] || a - b);
  }
  document.getElementById("found").textContent = wanted ? `${matchList.length} events` : "";
  for (const lane of lanes) prepare(lane);
  surface.redraw();
}

function nextMatch(step) {
  if (!matchList.length) return;
  matchAt = (matchAt + step + matchList.length) % matchList.length;
  select(matchList[matchAt]);
  reveal(matchList[matchAt]);
}

// The event before or after the selected one in its lane.
function neighbour(step) {
  const lane = selected >= 0 ? laneOf(selected) : lanes[0];
  if (!lane) return;
  const next = selected < 0 ? lane.first : selected + step;
  if (next < lane.first || next >= lane.last) return;
  select(next);
  reveal(next);
}

const KEYS = {
  ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), a: () => pan(-0.1), d: () => pan(0.1),
  ArrowUp: () => scrollBy(-40), ArrowDown: () => scrollBy(40),
  "+": () => zoom(0.8, (view.from + view.to) / 2), "-": () => zoom(1.25, (view.from + view.to) / 2),
  w: () => zoom(0.8, (view.from + view.to) / 2), s: () => zoom(1.25, (view.from + view.to) / 2),
  0: () => show(0, endOfAll), n: () => neighbour(1), p: () => neighbour(-1),
  Escape: () => select(-1),
};

function listen() {
  const canvas = surface.canvas, box = document.getElementById("search");
  let held = null;
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      pan((event.deltaX || event.deltaY) / surface.width);
    } else if (event.altKey) scrollBy(event.deltaY);
    else zoom(Math.exp(event.deltaY * 0.0015), timeAt(event.offsetX, surface.width));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    held = { x: event.offsetX, y: event.offsetY, from: view.from, to: view.to, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held) {
      const by = (held.x - event.offsetX) / scaleOf(surface.width);
      held.moved = held.moved || Math.abs(held.x - event.offsetX) + Math.abs(held.y - event.offsetY) > 3;
      if (held.moved) { show(held.from + by, held.to + by); tip.style.display = "none"; }
      return;
    }
    hover(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held && !held.moved) select(eventAt(event.offsetX, event.offsetY));
    held = null;
  });
  canvas.addEventListener("pointerleave", () => hover(-1, -1));
  canvas.addEventListener("dblclick", (event) => {
    const found = eventAt(event.offsetX, event.offsetY);
    if (found >= 0) reveal(found);
  });
  document.addEventListener("keydown", (event) => {
    if (event.target === box || event.ctrlKey || event.metaKey) return;
    if (event.key === "/") { event.preventDefault(); box.focus(); return; }
    const action = KEYS[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  box.addEventListener("input", () => search(box.value));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") nextMatch(event.shiftKey ? -1 : 1);
    if (event.key === "Escape") { box.value = ""; search(""); box.blur(); }
  });
  document.getElementById("rank").addEventListener("change", (event) => {
    chooseRank(Number(event.target.value));
    search(box.value);
  });
  document.getElementById("fit").addEventListener("click", () => show(0, endOfAll));
}

function hover(x, y) {
  const found = eventAt(x, y);
  if (found !== hovered) surface.redraw();
  hovered = found;
  tip.style.display = found < 0 ? "none" : "block";
  if (found < 0) return;
  const layer = columns.layer[found] < 0 ? "" : `, layer ${columns.layer[found]}`;
  tip.textContent = `${labelOf(found)}${layer}\n${usText(ends[found] - starts[found])} predicted`;
  tip.style.left = Math.min(x + 14, surface.width - 300) + "px";
  tip.style.top = Math.min(y + 16, surface.height - 50) + "px";
}

// Where an event is on the page: for links from other tools, and for tests.
function positionOf(id) {
  const event = rowOf.get(id), lane = event === undefined ? null : laneOf(event);
  if (!lane) return null;
  const box = surface.canvas.getBoundingClientRect();
  const x = (Math.max(view.from, starts[event]) + Math.min(view.to, ends[event])) / 2;
  return { x: box.left + xOf(x, surface.width), y: box.top + lane.y - view.scroll + lane.height / 2 };
}

const surface = new Surface(stage, draw);
const ranks = [...new Set(data.tracks.map((one) => one.rank))];
for (const rank of ranks) {
  document.getElementById("rank").append(element("option", `rank ${rank}`, { value: rank }));
}
legend(document.querySelector(".legend"), [
  ...data.classes.map((one) => [one.name, one.colour]), ["critical path", "#1b1f24"], ["floor", "#2f8f5b"],
]);
for (const [name, us] of data.totals) {
  const row = element("tr");
  const label = element("td", name);
  label.prepend(element("i", "", { class: "dot", style: `background:${data.classes.find((one) => one.name === name).colour}` }));
  row.append(label, element("td", usText(us), { class: "number" }),
    element("td", (100 * us / data.round_us).toFixed(1) + " %", { class: "number" }));
  document.getElementById("totals").append(row);
}
chooseRank(ranks[0]);
listen();
window.timeline = {
  data, surface, view, show, zoom, pan, search, nextMatch, positionOf, chooseRank,
  reveal: (id) => reveal(rowOf.get(id)), select: (id) => select(rowOf.get(id)),
  selected: () => (selected < 0 ? null : columns.id[selected]),
};
const linked = /^#event=(\d+)$/.exec(location.hash); // such as timeline.html#event=17
if (linked && rowOf.has(Number(linked[1]))) {
  select(rowOf.get(Number(linked[1])));
  reveal(rowOf.get(Number(linked[1])));
}
