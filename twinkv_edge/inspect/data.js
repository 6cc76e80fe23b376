"use strict";
// The page's data: unpacked once into typed arrays. Nothing per layer and head goes into the DOM.

const ROLES = ["covered", "kept", "donor", "orphan", "swapped out", "swapped in"];
const COVERED = 0, KEPT = 1, DONOR = 2, ORPHAN = 3, SWAPPED_OUT = 4, SWAPPED_IN = 5;
const NOTHING = 255; // a similarity where there was no token to compare with

async function unpack(base64, Type) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

async function loadData() {
  const raw = JSON.parse(document.getElementById("data").textContent);
  const wide = raw.wide === 16 ? Uint16Array : Uint32Array;
  const [counts, twinTokens, twinSimilarities] = await Promise.all([
    unpack(raw.counts, wide), unpack(raw.twin_tokens, wide), unpack(raw.twin_similarities, Uint8Array),
  ]);
  const policies = await Promise.all(raw.policies.map(async (p, i) => ({
    label: p.label,
    summary: raw.summary.policies[i],
    roles: await unpack(p.roles, Uint8Array),
    best: await unpack(p.best, Uint8Array),
  })));
  const n = raw.summary.tokens, layers = raw.summary.layers, heads = raw.summary.kv_heads;
  // lists of twins lie one after another: where each begins
  const twinStart = new Uint32Array(counts.length + 1);
  for (let i = 0; i < counts.length; i++) twinStart[i + 1] = twinStart[i] + Math.min(counts[i], raw.most);
  return {
    n, layers, heads, counts, twinTokens, twinSimilarities, twinStart, policies,
    texts: raw.texts, ids: raw.ids, control: new Set(raw.control), steps: raw.steps, most: raw.most,
    protectedBelow: raw.protected[0], protectedFrom: raw.protected[1], summary: raw.summary,
  };
}

// Which layers and heads are looked at: the offsets of their rows in arrays of [layers, heads, n].
function rowsOf(data, selection) {
  const rows = [];
  for (let l = 0; l < data.layers; l++) {
    if (selection.layer >= 0 && l !== selection.layer) continue;
    for (let h = 0; h < data.heads; h++) {
      if (selection.head < 0 || h === selection.head) rows.push((l * data.heads + h) * data.n);
    }
  }
  return rows;
}

const format = (x) => x.toLocaleString("en-US");
const percent = (x, digits = 0) => (100 * x).toFixed(digits) + " %";
const megabytes = (x) => (x / 1048576).toFixed(1) + " MB";
