"use strict";
// Arcs of the graph: from the row that writes a buffer to the rows that read it. A folded loop
// stands for all its phases.

const data = JSON.parse(document.getElementById("data").textContent);
const arcs = document.querySelector(".arcs"), main = document.querySelector(".graph");

// The row of a phase, or the summary of the outermost folded loop around it.
function anchorOf(id) {
  let shown = document.getElementById(id);
  for (let one = shown.parentElement; one; one = one.parentElement) {
    if (one.matches && one.matches("details.loop:not([open])")) shown = one.querySelector("summary");
  }
  return shown;
}

function middle(row) {
  const box = row.getBoundingClientRect();
  return box.top - main.getBoundingClientRect().top + Math.min(box.height / 2, 12);
}

function drawArcs(lit) {
  arcs.replaceChildren();
  for (const edge of data.edges) {
    const from = anchorOf(edge.from), to = anchorOf(edge.to);
    if (from === to) continue;
    const y0 = middle(from), y1 = middle(to);
    const bend = Math.min(88, 8 + Math.abs(y1 - y0) * 0.09);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const mine = lit && (edge.from === lit || edge.to === lit);
    path.setAttribute("d", `M106 ${y0} C ${106 - bend} ${y0} ${106 - bend} ${y1} 106 ${y1}`);
    path.setAttribute("fill", "none");
    path.setAttribute("stroke", mine ? "#d1495b" : "#9aa3ad");
    path.setAttribute("stroke-width", mine ? "2" : "1");
    path.setAttribute("opacity", !lit || mine ? "1" : "0.25");
    if (edge.next_iteration) path.setAttribute("stroke-dasharray", "4 3");
    arcs.append(path);
  }
}

function light(id) {
  for (const row of document.querySelectorAll(".row.lit")) row.classList.remove("lit");
  for (const edge of data.edges) {
    const other = edge.from === id ? edge.to : edge.to === id ? edge.from : null;
    if (other) document.getElementById(other).classList.add("lit");
  }
  drawArcs(id);
}

for (const row of document.querySelectorAll(".row[id]")) {
  row.addEventListener("mouseenter", () => light(row.id));
  row.addEventListener("mouseleave", () => light(null));
}
for (const loop of document.querySelectorAll("details.loop")) {
  loop.addEventListener("toggle", () => drawArcs(null));
}
for (const [button, open] of [["unfold", true], ["fold", false]]) {
  document.getElementById(button).addEventListener("click", () => {
    for (const loop of document.querySelectorAll("details.loop")) loop.open = open;
  });
}
window.addEventListener("resize", () => drawArcs(null));
drawArcs(null);
