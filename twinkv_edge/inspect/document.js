// The document: one span per token and policy, in rows of about a paragraph. Rows off the screen are neither laid out
// (content-visibility) nor recoloured until they come near it, or there is time.

const LONGEST_ROW = 600; // tokens, where a text has no line ends
const PICTURES = /[\u0000-\u0008\u000b-\u001f\u007f]/g;

// Control characters as their pictures; everything else as it is. Only ever given to textContent.
const shown = (text) => text.replace(PICTURES, (c) => (c === "\u007f" ? "␡" : String.fromCharCode(0x2400 + c.charCodeAt(0))));

function rowBounds(data) {
  const bounds = [0];
  for (let i = 0; i < data.n; i++) {
    const length = i + 1 - bounds[bounds.length - 1];
    const ends = data.texts[i].includes("\n") && !(data.texts[i + 1] || "").startsWith("\n");
    const tooLong = length >= LONGEST_ROW && (/^\s/.test(data.texts[i + 1] || "") || length >= 2 * LONGEST_ROW);
    if (i + 1 < data.n && ((ends && length >= 8) || tooLong)) bounds.push(i + 1);
  }
  bounds.push(data.n);
  return bounds;
}

function tokenKind(data, i) {
  if (data.control.has(i)) return " ctl";
  if (data.texts[i] === "") return " part"; // its character is shown with a later token
  return /^[\r\n]+$/.test(data.texts[i]) ? " nl" : "";
}

class TokenText {
  constructor(data, root) {
    this.data = data;
    this.root = root;
    this.kinds = data.texts.map((_, i) => tokenKind(data, i));
    this.spans = data.policies.map(() => new Array(data.n));
    this.rows = [];
    this.rowOf = new Uint32Array(data.n);
    this.version = 0;
    this.marked = [];
    root.style.setProperty("--policies", data.policies.length);
    this.build();
    this.near = new Set();
    const watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) { this.near.add(target.row); this.paintRow(target.row); } else this.near.delete(target.row);
      }
    }, { rootMargin: "600px 0px" });
    for (const row of this.rows) watcher.observe(row.element);
  }

  build() {
    const fragment = document.createDocumentFragment(), bounds = rowBounds(this.data);
    const columns = this.data.policies.length;
    for (let r = 0; r + 1 < bounds.length; r++) {
      const row = { from: bounds[r], to: bounds[r + 1], version: -1, element: document.createElement("div") };
      row.element.className = "row columns";
      row.element.row = row;
      row.element.dataset.from = row.from;
      let characters = 0;
      for (let p = 0; p < columns; p++) {
        const cell = document.createElement("p");
        cell.dir = "auto";
        for (let i = row.from; i < row.to; i++) {
          const span = document.createElement("span");
          span.textContent = shown(this.data.texts[i]);
          span.token = i;
          span.policy = p;
          this.spans[p][i] = span;
          cell.append(span);
          if (p === 0) characters += this.data.texts[i].length;
        }
        row.element.append(cell);
      }
      const lines = Math.ceil(characters / Math.max(24, 125 / columns)) + 1;
      row.element.style.containIntrinsicSize = `auto ${Math.ceil(lines * 28)}px`;
      this.rowOf.fill(r, row.from, row.to);
      this.rows.push(row);
      fragment.append(row.element);
    }
    this.root.append(fragment);
  }

  // Colours all tokens: levels is a Uint8Array [n] per policy.
  paint(prefix, levels) {
    this.prefix = prefix;
    this.levels = levels;
    this.version++;
    this.root.dataset.painted = "near";
    for (const row of this.near) this.paintRow(row);
    // in slices, so that a moving slider or a scroll is never kept waiting
    const version = this.version;
    let next = 0;
    const rest = () => {
      if (version !== this.version) return; // another choice was made meanwhile
      const until = performance.now() + 8;
      while (next < this.rows.length && performance.now() < until) this.paintRow(this.rows[next++]);
      if (next < this.rows.length) setTimeout(rest, 16);
      else this.root.dataset.painted = "all";
    };
    setTimeout(rest, 60);
  }

  paintRow(row) {
    if (row.version === this.version || !this.levels) return;
    row.version = this.version;
    for (let p = 0; p < this.spans.length; p++) {
      const spans = this.spans[p], levels = this.levels[p], prefix = this.prefix;
      for (let i = row.from; i < row.to; i++) spans[i].className = prefix + levels[i] + this.kinds[i];
    }
    for (const [i, name] of this.marked) if (i >= row.from && i < row.to) this.mark(i, name);
  }

  mark(i, name) { for (const spans of this.spans) spans[i].classList.add(name); }

  // Outlines the current token and its twins: pairs of (token, class name).
  markAll(marks) {
    for (const [i, name] of this.marked) for (const spans of this.spans) spans[i].classList.remove(name);
    this.marked = marks;
    for (const [i, name] of marks) this.mark(i, name);
  }

  // The token straight above or below, a visual line away.
  lineAway(i, p, step) {
    const box = (j) => this.spans[p][j].getClientRects()[0];
    const here = box(i);
    if (!here) return i;
    let best = i, bestGap = Infinity, line = null;
    for (let j = i + step; j >= 0 && j < this.data.n && Math.abs(j - i) < 400; j += step) {
      const there = box(j);
      if (!there || (step > 0 ? there.top < here.top + 8 : there.top > here.top - 8)) continue;
      if (line === null) line = there.top;
      if (Math.abs(there.top - line) > 8) break;
      const gap = Math.abs(there.left - here.left);
      if (gap < bestGap) { bestGap = gap; best = j; }
    }
    return best;
  }

  scrollTo(i, p = 0) { this.spans[p][i].scrollIntoView({ block: "center" }); }
}
