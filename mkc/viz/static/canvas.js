"use strict";
// What the interactive pictures share: a sharp canvas, numbers for people, ticks.

// A canvas that follows the size of its parent at the resolution of the screen.
class Surface {
  constructor(stage, draw) {
    this.canvas = stage.querySelector("canvas");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.draw = draw;
    this.pending = false;
    this.frames = 0; // drawn so far
    this.lastDrawMs = 0;
    new ResizeObserver(() => this.resize(stage)).observe(stage);
    this.resize(stage);
  }

  resize(stage) {
    const ratio = window.devicePixelRatio || 1;
    this.width = stage.clientWidth;
    this.height = stage.clientHeight;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = this.width + "px";
    this.canvas.style.height = this.height + "px";
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }

  // Draws once before the next frame, however often it is asked.
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      const start = performance.now();
      this.draw(this.context, this.width, this.height);
      this.lastDrawMs = performance.now() - start;
      this.frames += 1;
    });
  }
}

const FONT = '12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const SMALL = '11px system-ui, "Segoe UI", "DejaVu Sans", sans-serif';

function bytesText(bytes) {
  if (bytes >= 1 << 20) return (bytes / (1 << 20)).toFixed(2) + " MiB";
  if (bytes >= 1 << 10) return (bytes / (1 << 10)).toFixed(1) + " KiB";
  return bytes + " bytes";
}

function usText(us) {
  const digits = us >= 100 ? 1 : us >= 1 ? 2 : 3;
  return us.toFixed(digits) + " \u00b5s";
}

// Round tick distance that leaves about `count` ticks in `span`.
function tickStep(span, count) {
  const rough = span / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= rough) return factor * power;
  return 10 * power;
}

// First index of sorted `values`, within first..last, whose value is >= `wanted`.
function lowerBound(values, wanted, first, last) {
  while (first < last) {
    const middle = (first + last) >>> 1;
    if (values[middle] < wanted) first = middle + 1;
    else last = middle;
  }
  return first;
}

function clipped(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.max(0, Math.floor(text.length * width / context.measureText(text).width) - 1);
  return length > 2 ? text.slice(0, length) + "\u2026" : "";
}

function element(tag, text, attributes) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  return made;
}

function fillFacts(list, facts) {
  list.replaceChildren();
  for (const [label, value] of facts) {
    if (value === "" || value === null || value === undefined) continue;
    list.append(element("dt", label));
    const cell = element("dd");
    cell.append(value);
    list.append(cell);
  }
}

function legend(place, entries) {
  for (const [label, colour] of entries) {
    const entry = element("span");
    entry.append(element("i", "", { style: `background:${colour}` }), label);
    place.append(entry);
  }
}
