// Puts the page together and follows what the reader does.

const byId = (id) => document.getElementById(id);

class Page {
  constructor(data) {
    this.data = data;
    this.selection = { layer: -1, head: -1 };
    this.mode = MODES[0];
    this.token = -1;
    this.policy = 0;
    drawCharts(data, byId("charts"), (layer) => this.choose({ layer, head: -1 }));
    this.maps = data.policies.map((policy) => this.heading(policy));
    this.text = new TokenText(data, byId("text"));
    this.card = new Card(data, byId("card"), (i) => this.goTo(i));
    this.buildControls();
    this.follow();
    this.recolour();
  }

  heading(policy) {
    const s = policy.summary;
    const facts = [`${percent(s.retention)} kept`, megabytes(s.bytes_after)];
    if (s.repair !== "none") facts.push(`${format(s.swaps)} swaps`, `lost ${format(s.lost_before_repair)} → ${format(s.lost_after_repair)}`);
    else facts.push(`lost ${format(s.lost_before_repair)}`);
    const canvas = html("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Map of ${policy.label}: layers and heads by position in the document`);
    const frame = html("div", "frame");
    frame.hidden = true;
    const lost = html("p", "facts", ...facts.map((f) => html("span", "", f)));
    lost.title = "lost: evicted tokens, over all heads, that have no twin in what is kept";
    const box = html("div", "policy", html("h2", "", policy.label), lost, html("div", "map", canvas, frame, html("div", "view")));
    byId("heads").style.setProperty("--policies", this.data.policies.length);
    byId("heads").append(box);
    return new RetentionMap(this.data, policy, canvas, ({ layer, head, token }) => {
      this.choose({ layer, head });
      this.goTo(token);
    });
  }

  buildControls() {
    for (const mode of MODES) {
      const input = html("input");
      Object.assign(input, { type: "radio", name: "mode", value: mode.id, checked: mode === this.mode });
      input.addEventListener("change", () => this.setMode(mode));
      byId("modes").append(html("label", "", input, html("span", "", mode.name)));
    }
    byId("layer").max = this.data.layers;
    byId("head").max = this.data.heads;
    byId("layer").addEventListener("input", (e) => this.choose({ ...this.selection, layer: e.target.value - 1 }));
    byId("head").addEventListener("input", (e) => this.choose({ ...this.selection, head: e.target.value - 1 }));
  }

  setMode(mode) {
    this.mode = mode;
    for (const input of document.getElementsByName("mode")) input.checked = input.value === mode.id;
    this.recolour();
  }

  // layer, head: -1 means all.
  choose(selection) {
    const clamp = (x, top) => Math.max(-1, Math.min(top - 1, x));
    this.selection = { layer: clamp(selection.layer, this.data.layers), head: clamp(selection.head, this.data.heads) };
    for (const [id, value] of Object.entries(this.selection)) {
      const name = value < 0 ? "all" : String(value);
      byId(id).value = value + 1;
      byId(id).setAttribute("aria-valuetext", value < 0 ? `all ${id}s` : `${id} ${value}`);
      byId(id + "-name").textContent = name;
    }
    this.recolour(false);
    if (!byId("card").hidden) this.look(this.token);
  }

  recolour(maps = true) {
    const began = performance.now();
    const rows = rowsOf(this.data, this.selection);
    let found = null; // twins are the keys' own, the same under every policy
    if (this.mode.id === "twins") found = new Array(this.data.policies.length).fill(levels(this.data, null, rows, this.mode));
    else found = this.data.policies.map((policy) => levels(this.data, policy, rows, this.mode));
    this.text.paint(this.mode.prefix, found);
    if (maps) requestAnimationFrame(() => this.drawMaps());
    for (const map of this.maps) map.select(this.selection);
    this.legend(rows.length);
    performance.measure("recolour", { start: began, end: performance.now() });
  }

  drawMaps() {
    const began = performance.now(), key = this.mode.id + getComputedStyle(document.documentElement).colorScheme;
    this.colours = this.colours || {};
    const colours = (this.colours[key] = this.colours[key] || classColours(this.mode));
    for (const map of this.maps) map.draw(this.mode, colours);
    performance.measure("maps", { start: began, end: performance.now() });
  }

  legend(many) {
    const mode = this.mode, root = byId("legend");
    root.replaceChildren();
    if (mode.id === "role") {
      for (const [role, name] of ROLE_NAMES) root.append(html("span", "key", html("i", "swatch r" + role), name));
      if (many > 1) root.append(html("span", "hint", `most frequent of ${many} heads`));
      return;
    }
    const one = many === 1 && mode.id !== "twins";
    root.append(html("span", "", one ? "no" : mode.ends[0]));
    const ramp = html("span", "ramp");
    for (let level = 0; level < mode.levels; level++) if (!one || level % 10 === 0) ramp.append(html("i", "swatch " + mode.prefix + level));
    root.append(ramp, html("span", "", one ? "yes" : mode.ends[1]), html("span", "hint", many > 1 ? `over ${many} heads` : "in this head"));
  }

  // Shows the card of a token.
  look(i, policy = this.policy) {
    this.token = i;
    this.policy = policy;
    const box = this.text.spans[policy][i].getClientRects()[0] || { left: 40, top: 120, bottom: 140 };
    const twins = this.card.show(i, rowsOf(this.data, this.selection), box);
    this.text.markAll([[i, "current"], ...twins.map((t) => [t.token, "twin-of"])]);
    return twins;
  }

  goTo(i) {
    this.text.scrollTo(i, this.policy);
    this.card.pinned = true;
    requestAnimationFrame(() => this.look(i));
  }

  leave() {
    this.card.hide();
    this.text.markAll([]);
  }

  follow() {
    const text = byId("text");
    text.addEventListener("mouseover", (e) => {
      if (e.target.token !== undefined && !this.card.pinned) this.look(e.target.token, e.target.policy);
    });
    text.addEventListener("mouseleave", () => { if (!this.card.pinned) this.leave(); });
    text.addEventListener("click", (e) => {
      if (e.target.token === undefined) return this.leave();
      this.card.pinned = true;
      this.look(e.target.token, e.target.policy);
    });
    document.addEventListener("keydown", (e) => this.key(e));
    byId("theme").addEventListener("click", () => this.toggleTheme());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawMaps());
    let waiting = false;
    const scrolled = () => {
      if (!waiting) requestAnimationFrame(() => { waiting = false; this.showWindow(); });
      waiting = true;
    };
    addEventListener("scroll", scrolled, { passive: true });
    addEventListener("resize", scrolled, { passive: true });
    scrolled();
  }

  key(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const { layer, head } = this.selection, digit = MODES[Number(e.key) - 1];
    if (e.key === "Escape") return this.leave();
    if (e.key === "[" || e.key === "]") return this.choose({ layer: layer + (e.key === "]" ? 1 : -1), head });
    if (e.key === "," || e.key === ".") return this.choose({ layer, head: head + (e.key === "." ? 1 : -1) });
    if (digit) return this.setMode(digit);
    if (e.target !== byId("text")) return;
    const i = this.token < 0 ? this.firstVisible() : this.token, last = this.data.n - 1;
    const moves = {
      ArrowRight: () => Math.min(last, i + 1), ArrowLeft: () => Math.max(0, i - 1), Home: () => 0, End: () => last,
      ArrowDown: () => this.text.lineAway(i, this.policy, 1), ArrowUp: () => this.text.lineAway(i, this.policy, -1),
      Enter: () => (bestTwins(this.data, rowsOf(this.data, this.selection), i, 1)[0] || { token: i }).token,
    };
    if (!moves[e.key]) return;
    e.preventDefault();
    const to = moves[e.key]();
    this.text.spans[this.policy][to].scrollIntoView({ block: e.key === "Enter" ? "center" : "nearest" });
    this.card.pinned = true;
    this.look(to);
  }

  // Which tokens are on the screen, by rows.
  visibleTokens() {
    let from = this.data.n, to = 0;
    for (const row of this.text.near) {
      const box = row.element.getBoundingClientRect();
      if (box.bottom < 0 || box.top > innerHeight) continue;
      const length = row.to - row.from, at = (y) => row.from + length * Math.max(0, Math.min(1, (y - box.top) / box.height));
      from = Math.min(from, at(0));
      to = Math.max(to, at(innerHeight));
    }
    return [from, to];
  }

  firstVisible() { return Math.max(0, Math.min(this.data.n - 1, Math.ceil(this.visibleTokens()[0]))); }

  showWindow() {
    const [from, to] = this.visibleTokens();
    for (const map of this.maps) { map.view.hidden = from >= to; if (from < to) map.window(from, to); }
  }

  toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.drawMaps();
  }
}

loadData().then((data) => {
  new Page(data);
  document.documentElement.dataset.ready = "yes";
  performance.mark("ready");
}).catch((error) => {
  const box = byId("failure");
  box.textContent = `This page cannot be shown: ${error.message}. It needs a browser from 2023 or later.`;
  box.hidden = false;
  throw error;
});
