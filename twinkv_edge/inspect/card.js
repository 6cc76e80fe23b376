// The card of one token: its numbers in the chosen layers and heads, and its twins.

const CONTEXT = 5; // tokens on each side of a twin

// The best twins of token i over the rows: those that most rows have, then the most similar.
function bestTwins(data, rows, i, most) {
  const found = new Map();
  for (const row of rows) {
    for (let k = data.twinStart[row + i]; k < data.twinStart[row + i + 1]; k++) {
      const seen = found.get(data.twinTokens[k]) || { token: data.twinTokens[k], rows: 0, sum: 0 };
      seen.rows++;
      seen.sum += data.twinSimilarities[k] / data.steps;
      found.set(data.twinTokens[k], seen);
    }
  }
  const all = [...found.values()].map((t) => ({ ...t, similarity: t.sum / t.rows }));
  return all.sort((a, b) => b.rows - a.rows || b.similarity - a.similarity).slice(0, most);
}

function twinNumbers(data, rows, i) {
  let sum = 0, having = 0;
  for (const row of rows) { const c = data.counts[row + i]; sum += c; having += +(c > 0); }
  return { mean: sum / rows.length, having };
}

function policyNumbers(data, policy, rows, i) {
  const roles = new Array(ROLES.length).fill(0);
  let sum = 0, compared = 0;
  for (const row of rows) {
    roles[policy.roles[row + i]]++;
    const best = policy.best[row + i];
    if (best !== NOTHING) { sum += best / data.steps; compared++; }
  }
  return { roles, kept: roles[KEPT] + roles[DONOR] + roles[SWAPPED_IN], best: compared ? sum / compared : null };
}

function snippet(data, i) {
  const text = (from, to) => shown(data.texts.slice(Math.max(0, from), Math.min(data.n, to)).join("")).replace(/\s+/g, " ");
  return html("bdi", "snippet", text(i - CONTEXT, i), html("b", "", text(i, i + 1) || "·"), text(i + 1, i + 1 + CONTEXT));
}

class Card {
  constructor(data, element, go) {
    this.data = data;
    this.element = element;
    this.go = go;
    this.pinned = false;
  }

  show(i, rows, box) {
    const { data, element } = this, many = rows.length;
    const twins = bestTwins(data, rows, i, 4), numbers = twinNumbers(data, rows, i);
    const name = html("bdi", "token", shown(data.texts[i]).replace(/\n/g, "↵") || "part of a character");
    const where = html("span", "", `token ${format(i)} · id ${data.ids[i]}` +
      (i < data.protectedBelow ? " · sink" : i >= data.protectedFrom ? " · recent" : ""));
    element.replaceChildren(html("header", "", name, where), this.policyTable(i, rows));
    const about = many === 1 ? `${format(numbers.mean)} twins` :
      `a twin in ${numbers.having} of ${many} heads, ${numbers.mean.toFixed(1)} on average`;
    element.append(html("p", "twins", about));
    for (const twin of twins) element.append(this.twinButton(twin, many));
    element.hidden = false;
    element.classList.toggle("pinned", this.pinned);
    this.place(box);
    return twins;
  }

  policyTable(i, rows) {
    const { data } = this, many = rows.length, body = html("tbody");
    for (const policy of data.policies) {
      const { roles, kept, best } = policyNumbers(data, policy, rows, i);
      const role = roles.indexOf(Math.max(...roles));
      const others = many > 1 ? ROLES.map((r, k) => (roles[k] ? `${r} ${roles[k]}` : "")).filter(Boolean).join(", ") : ROLES[role];
      const state = html("td", "", html("i", "swatch r" + role), " " + others);
      body.append(html("tr", "", html("th", "", policy.label),
        html("td", "", many === 1 ? (kept ? "kept" : "evicted") : `kept ${kept}/${many}`), state,
        html("td", "number", best === null ? "–" : best.toFixed(3))));
    }
    const head = html("tr", "", html("th"), html("th", "", "in cache"), html("th", "", "role"), html("th", "number", "best kept twin"));
    return html("table", "", html("thead", "", head), body);
  }

  twinButton(twin, many) {
    const button = html("button", "twin", html("span", "number", twin.similarity.toFixed(3)),
      html("span", "where", `@${format(twin.token)}` + (many > 1 ? ` ×${twin.rows}` : "")), snippet(this.data, twin.token));
    button.type = "button";
    button.dataset.token = twin.token;
    button.addEventListener("click", () => this.go(twin.token));
    return button;
  }

  // Beside the token, inside the window.
  place(box) {
    const { element } = this, { offsetWidth: w, offsetHeight: h } = element;
    const left = Math.max(8, Math.min(box.left, innerWidth - w - 12));
    const below = box.bottom + 10;
    element.style.left = left + "px";
    element.style.top = (below + h < innerHeight - 8 ? below : Math.max(8, box.top - h - 10)) + "px";
  }

  hide() {
    this.pinned = false;
    this.element.hidden = true;
  }
}
