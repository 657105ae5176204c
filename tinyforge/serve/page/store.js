// Conversations in the browser's local storage. Each is a tree: an edit or another reply is a new branch.

const PREFIX = "tinyforge-talk-", SETTINGS = "tinyforge-settings";
const number = (value) => typeof value === "number" && Number.isFinite(value);
const fresh = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 8)}`;

// The model's own settings replace some of these: see `connect`.
export const DEFAULTS = { system: "", temperature: 0.8, top_p: 1, min_p: 0, top_k: 0, max_tokens: null, repetition_penalty: 1, seed: null, drafts: 0, stop: "", theme: "auto", inside: false };

function read(name) {
  try { return JSON.parse(localStorage.getItem(name)); } catch { return null; }
}

export function settings() {
  const stored = read(SETTINGS) || {}, found = { ...DEFAULTS };
  for (const key of Object.keys(DEFAULTS)) {
    const usual = DEFAULTS[key], value = stored[key];
    if (usual === null ? value === null || number(value) : typeof value === typeof usual) found[key] = value === undefined ? usual : value;
  }
  return found;
}

/* Only what differs from the defaults: the rest is another model's own. */
export function saveSettings(value) {
  const changed = Object.fromEntries(Object.entries(value).filter(([key, one]) => one !== DEFAULTS[key]));
  try { localStorage.setItem(SETTINGS, JSON.stringify(changed)); } catch { /* kept until the page is closed */ }
}

export class Talk {
  constructor(stored = {}) {
    this.id = typeof stored.id === "string" ? stored.id : fresh();
    this.updated = number(stored.updated) ? stored.updated : Date.now();
    this.system = typeof stored.system === "string" ? stored.system : "";
    this.nodes = new Map();
    for (const node of Array.isArray(stored.nodes) ? stored.nodes : [])
      if (node && typeof node.id === "string" && (node.role === "user" || node.role === "assistant") && typeof node.content === "string" && (node.parent === null || this.nodes.has(node.parent)))
        this.nodes.set(node.id, { id: node.id, parent: node.parent, role: node.role, content: node.content, note: typeof node.note === "string" ? node.note : "", chosen: null });
    for (const node of this.nodes.values()) this.choose(node);  // the newest, unless the stored leaf says otherwise
    for (let node = this.nodes.get(stored.leaf); node; node = this.nodes.get(node.parent)) this.choose(node);
  }

  get title() {
    const first = [...this.nodes.values()].find((node) => node.role === "user");
    return first ? first.content.replace(/\s+/g, " ").slice(0, 80) : "New conversation";
  }

  add(parent, role, content = "") {
    const node = { id: fresh(), parent, role, content, note: "", chosen: null };
    this.nodes.set(node.id, node);
    this.choose(node);
    return node;
  }

  /* Show this node among its siblings. */
  choose(node) {
    if (node.parent === null) this.root = node.id;
    else this.nodes.get(node.parent).chosen = node.id;
  }

  children(parent) { return [...this.nodes.values()].filter((node) => node.parent === parent); }

  /* The shown messages, from the first one on. */
  path() {
    const found = [];
    for (let node = this.nodes.get(this.root); node; node = this.nodes.get(node.chosen)) found.push(node);
    return found;
  }

  remove(node) {
    this.nodes.delete(node.id);
    const left = this.children(node.parent), last = left[left.length - 1];
    if (node.parent === null) this.root = last?.id;
    else this.nodes.get(node.parent).chosen = last?.id ?? null;
  }

  stored() {
    const path = this.path();
    return { id: this.id, updated: this.updated, system: this.system, leaf: path.length ? path[path.length - 1].id : null,
      nodes: [...this.nodes.values()].map(({ id, parent, role, content, note }) => ({ id, parent, role, content, note })) };
  }

  /* Store it; if there is no room, remove the oldest others. Returns how many were removed, or -1 if it cannot be stored. */
  save() {
    this.updated = Date.now();
    const text = JSON.stringify(this.stored()), others = talks().filter((talk) => talk.id !== this.id).reverse();
    for (let gone = 0; ; gone++) {
      try { localStorage.setItem(PREFIX + this.id, text); return gone; } catch {
        if (gone >= others.length) return -1;
        others[gone].forget();
      }
    }
  }

  forget() { try { localStorage.removeItem(PREFIX + this.id); } catch { /* nothing was kept */ } }
}

/* All conversations, newest first. */
export function talks() {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
    return names.map(read).filter((stored) => stored && typeof stored === "object").map((stored) => new Talk(stored)).filter((talk) => talk.nodes.size)
      .sort((a, b) => b.updated - a.updated);
  } catch { return []; }
}
