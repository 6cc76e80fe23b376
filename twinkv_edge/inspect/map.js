// The map of a policy: a row for every layer and head, a column for every few tokens, in the colours of the text.

class RetentionMap {
  constructor(data, policy, canvas, choose) {
    this.data = data;
    this.policy = policy;
    this.canvas = canvas;
    this.rows = data.layers * data.heads;
    this.columns = Math.min(data.n, 900);
    canvas.width = this.columns;
    canvas.height = this.rows;
    canvas.style.height = Math.max(120, Math.min(300, this.rows * 2)) + "px";
    this.frame = canvas.parentElement.querySelector(".frame");
    this.view = canvas.parentElement.querySelector(".view");
    canvas.addEventListener("click", (event) => choose(this.at(event)));
    canvas.addEventListener("mousemove", (event) => {
      const { layer, head, token } = this.at(event);
      canvas.title = `layer ${layer}, head ${head}, token ${format(token)}`;
    });
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const clamp = (x, top) => Math.max(0, Math.min(top - 1, Math.floor(x * top)));
    const row = clamp((event.clientY - box.top) / box.height, this.rows);
    const token = clamp((event.clientX - box.left) / box.width, this.data.n);
    return { layer: Math.floor(row / this.data.heads), head: row % this.data.heads, token };
  }

  // The colour class of every role in this mode; twins go by counts instead.
  static roleLevels(mode) {
    return ROLES.map((_, role) => (mode.id === "role" ? role : mode.id === "kept" ? 10 * IN_CACHE[role] : 10 * (role === mode.role)));
  }

  draw(mode, colours) {
    const { n, counts } = this.data, { roles } = this.policy, context = this.canvas.getContext("2d");
    const byCount = mode.id === "twins", levelOf = RetentionMap.roleLevels(mode), seen = new Float64Array(mode.levels);
    const image = context.createImageData(this.columns, this.rows), pixels = image.data;
    for (let row = 0, at = 0; row < this.rows; row++) {
      for (let column = 0; column < this.columns; column++, at += 4) {
        const from = Math.floor((column * n) / this.columns), to = Math.floor(((column + 1) * n) / this.columns);
        seen.fill(0);
        for (let i = row * n + from; i < row * n + to; i++) seen[byCount ? twinLevel(counts[i]) : levelOf[roles[i]]]++;
        let r = 0, g = 0, b = 0, a = 0;
        for (let level = 0; level < seen.length; level++) {
          if (!seen[level]) continue;
          const c = colours[level], weight = seen[level] * c[3];
          r += c[0] * weight; g += c[1] * weight; b += c[2] * weight; a += weight;
        }
        if (a) { pixels[at] = r / a; pixels[at + 1] = g / a; pixels[at + 2] = b / a; pixels[at + 3] = a / (to - from); }
      }
    }
    context.putImageData(image, 0, 0);
  }

  // Frames the chosen layer and head.
  select({ layer, head }) {
    const { layers, heads } = this.data;
    this.frame.hidden = layer < 0;
    const first = layer * heads + Math.max(0, head), count = head < 0 ? heads : 1;
    this.frame.style.top = (100 * first) / (layers * heads) + "%";
    this.frame.style.height = (100 * count) / (layers * heads) + "%";
  }

  // Shows which part of the document is on the screen.
  window(from, to) {
    this.view.style.left = (100 * from) / this.data.n + "%";
    this.view.style.width = (100 * Math.max(1, to - from)) / this.data.n + "%";
  }
}
