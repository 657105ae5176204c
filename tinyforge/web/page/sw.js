// The page without the network: its files come from the browser's cache. A new version is fetched in the background, and
// the next visit takes it (api.js). The weights are in a cache of their own (worker.js).
const VERSION = "", FILES = [];  // `tinyforge web` fills them in

const OWN = `tinyforge-page ${new URL(registration.scope).pathname} `;

addEventListener("install", (event) => {
  event.waitUntil(caches.open(OWN + VERSION).then((cache) => cache.addAll(FILES.map((file) => new Request(file, { cache: "no-cache" })))));
});
addEventListener("activate", (event) => {
  event.waitUntil(caches.keys().then((names) => Promise.all(names.filter((name) => name.startsWith(OWN) && name !== OWN + VERSION).map((name) => caches.delete(name)))));
});
addEventListener("message", ({ data }) => { if (data === "take over") skipWaiting(); });
addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  event.respondWith(caches.open(OWN + VERSION).then((cache) => cache.match(event.request, { ignoreSearch: true })).then((kept) => kept || fetch(event.request)));
});
