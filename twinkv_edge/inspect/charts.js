// Charts as SVG, drawn from the summary: retention per layer, twin prevalence, bytes.

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function html(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

const titled = (element, text) => { element.append(svg("title", {}, text)); return element; };

function figure(title, note, drawing) {
  return html("figure", "", html("figcaption", "", html("b", "", title), html("span", "", note)), drawing);
}

const W = 360, H = 150, LEFT = 34, BOTTOM = 22, TOP = 8, RIGHT = 6;
const yOf = (share) => TOP + (1 - share) * (H - TOP - BOTTOM);

function axes(layers) {
  const parts = [];
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(svg("line", { x1: LEFT, x2: W - RIGHT, y1: yOf(share), y2: yOf(share), class: "grid" }));
    parts.push(svg("text", { x: LEFT - 5, y: yOf(share) + 3.5, class: "tick end" }, Math.round(100 * share) + "%"));
  }
  const step = Math.max(1, Math.ceil(layers / 8)), width = (W - LEFT - RIGHT) / layers;
  for (let l = 0; l < layers; l += step) {
    parts.push(svg("text", { x: LEFT + (l + 0.5) * width, y: H - 8, class: "tick middle" }, String(l)));
  }
  return parts;
}

// Stacked bars: what became of the tokens of every layer, kept ones at the bottom.
function retentionChart(data, policy, choose) {
  const { layers, heads, n } = data, width = (W - LEFT - RIGHT) / layers;
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
    "aria-label": `Roles of tokens by layer, policy ${policy.label}: ${percent(policy.summary.retention)} kept` }, ...axes(layers));
  policy.summary.roles_by_layer.forEach((counts, layer) => {
    const group = svg("g", { class: "pick" });
    let sum = 0;
    for (const role of [KEPT, DONOR, SWAPPED_IN, SWAPPED_OUT, ORPHAN, COVERED]) {
      const part = counts[role] / (heads * n);
      if (part > 0) {
        const top = yOf(sum + part);
        group.append(svg("rect", { x: LEFT + layer * width + 0.5, width: Math.max(1, width - 1), y: top,
          height: yOf(sum) - top, class: "fill-r" + role }));
      }
      sum += part;
    }
    const lines = ROLE_NAMES.map(([role, name]) => `${name}: ${percent(counts[role] / (heads * n), 1)}`);
    titled(group, `layer ${layer}: ${percent(policy.summary.retention_by_layer[layer], 1)} kept\n${lines.join("\n")}`);
    group.addEventListener("click", () => choose(layer));
    drawing.append(group);
  });
  return drawing;
}

// Share of tokens with a twin: the mean over heads as a line, the range of heads as a band.
function prevalenceChart(data, choose) {
  const table = data.summary.twins.share_by_layer_and_head, layers = data.layers;
  const width = (W - LEFT - RIGHT) / layers, x = (l) => LEFT + (l + 0.5) * width;
  const mean = (row) => row.reduce((a, b) => a + b, 0) / row.length;
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
    "aria-label": `Share of tokens with a twin by layer: ${percent(data.summary.twins.share)} on average` }, ...axes(layers));
  const upper = table.map((row, l) => `${x(l)},${yOf(Math.max(...row))}`);
  const lower = table.map((row, l) => `${x(l)},${yOf(Math.min(...row))}`).reverse();
  drawing.append(svg("polygon", { points: [...upper, ...lower].join(" "), class: "band" }));
  drawing.append(svg("polyline", { points: table.map((row, l) => `${x(l)},${yOf(mean(row))}`).join(" "), class: "line" }));
  table.forEach((row, l) => {
    const group = svg("g", { class: "pick" });
    for (const share of row) group.append(svg("circle", { cx: x(l), cy: yOf(share), r: 1.6, class: "dot" }));
    group.append(svg("rect", { x: x(l) - width / 2, y: TOP, width, height: H - TOP - BOTTOM, class: "hit" }));
    titled(group, `layer ${l}: ${percent(mean(row), 1)} of the tokens have a twin\n` +
      row.map((share, h) => `head ${h}: ${percent(share, 1)}`).join("\n"));
    group.addEventListener("click", () => choose(l));
    drawing.append(group);
  });
  return drawing;
}

function bytesChart(data) {
  const bars = [["full cache", data.summary.bytes_before, "fill-full"]];
  for (const p of data.policies) bars.push([p.label, p.summary.bytes_after, "fill-r1"]);
  const step = Math.min(30, (H - TOP) / bars.length), most = bars[0][1] || 1;
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": "Bytes of the cache before and after" });
  bars.forEach(([name, bytes, look], i) => {
    const y = TOP + i * step, x = 104, room = W - x - 70;
    drawing.append(
      svg("text", { x: x - 8, y: y + step / 2 + 4, class: "label end" }, name.length > 16 ? name.slice(0, 15) + "…" : name),
      titled(svg("rect", { x, y: y + 3, width: Math.max(2, (room * bytes) / most), height: step - 8, rx: 3, class: look }),
        `${name}: ${format(bytes)} bytes`),
      svg("text", { x: x + (room * bytes) / most + 6, y: y + step / 2 + 4, class: "label" }, megabytes(bytes)));
  });
  return drawing;
}

function drawCharts(data, root, choose) {
  for (const policy of data.policies) {
    root.append(figure("Retention per layer", policy.label, retentionChart(data, policy, choose)));
  }
  root.append(figure("Twin prevalence", "dots: single heads", prevalenceChart(data, choose)));
  root.append(figure("Bytes", "cache in use", bytesChart(data)));
}
