// From numbers to colour classes: every mode gives each token a small number, and the style sheet has its colour.

const MODES = [
  { id: "kept", name: "Kept", prefix: "k", levels: 11, ends: ["evicted everywhere", "kept by every head"] },
  { id: "role", name: "Roles", prefix: "r", levels: 6 },
  { id: "twins", name: "Twins", prefix: "w", levels: 11, ends: ["no twin", "1,000 and more"] },
  { id: "orphan", name: "Orphans", prefix: "o", levels: 11, role: ORPHAN, ends: ["in no head", "in every head"] },
  { id: "donor", name: "Donors", prefix: "d", levels: 11, role: DONOR, ends: ["in no head", "in every head"] },
  { id: "in", name: "Swapped in", prefix: "i", levels: 11, role: SWAPPED_IN, ends: ["in no head", "in every head"] },
  { id: "out", name: "Swapped out", prefix: "x", levels: 11, role: SWAPPED_OUT, ends: ["in no head", "in every head"] },
];

const ROLE_NAMES = [
  [KEPT, "kept"], [DONOR, "kept, has a kept twin (donor)"], [SWAPPED_IN, "swapped in"],
  [COVERED, "evicted, a twin stays"], [ORPHAN, "evicted, nothing like it stays (orphan)"], [SWAPPED_OUT, "swapped out"],
];

const share = (part, whole) => (part ? Math.max(1, Math.round((10 * part) / whole)) : 0);
const twinLevel = (mean) => (mean > 0 ? Math.min(10, Math.max(1, Math.ceil(Math.log2(1 + mean)))) : 0);

// How many of the rows have each token in one of the roles: a number per token.
function countRoles(data, policy, rows, wanted) {
  const out = new Uint16Array(data.n), roles = policy.roles;
  for (const row of rows) for (let i = 0; i < data.n; i++) out[i] += wanted[roles[row + i]];
  return out;
}

const IN_CACHE = [0, 1, 1, 0, 0, 1];

// Colour classes of all tokens, Uint8Array [n].
function levels(data, policy, rows, mode) {
  const out = new Uint8Array(data.n), many = rows.length;
  if (mode.id === "twins") {
    const sums = new Float64Array(data.n);
    for (const row of rows) for (let i = 0; i < data.n; i++) sums[i] += data.counts[row + i];
    for (let i = 0; i < data.n; i++) out[i] = twinLevel(sums[i] / many);
  } else if (mode.id === "role") {
    if (many === 1) return policy.roles.subarray(rows[0], rows[0] + data.n);
    const most = new Uint16Array(data.n);
    for (let role = 0; role < ROLES.length; role++) {
      const wanted = ROLES.map((_, r) => +(r === role));
      const sums = countRoles(data, policy, rows, wanted);
      for (let i = 0; i < data.n; i++) if (sums[i] > most[i]) { most[i] = sums[i]; out[i] = role; }
    }
  } else {
    const wanted = mode.id === "kept" ? IN_CACHE : ROLES.map((_, r) => +(r === mode.role));
    const sums = countRoles(data, policy, rows, wanted);
    for (let i = 0; i < data.n; i++) {
      out[i] = mode.id === "kept" ? Math.round((10 * sums[i]) / many) : share(sums[i], many);
    }
  }
  return out;
}

// The colour of a class as [r, g, b, a], read from the style sheet, so that maps and text agree in light and dark.
function classColours(mode) {
  const probe = document.createElement("i");
  probe.className = "swatch";
  document.body.append(probe);
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const found = [];
  for (let level = 0; level < mode.levels; level++) {
    probe.className = "swatch " + mode.prefix + level;
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = getComputedStyle(probe).backgroundColor;
    context.fillRect(0, 0, 1, 1);
    found.push([...context.getImageData(0, 0, 1, 1).data]);
  }
  probe.remove();
  return found;
}
