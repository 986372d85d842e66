// Runs the server's page with the least of a browser: elements, events, a location, fetch.
// Usage: node page_in_node.js URL; reads one action a line, and prints what the page shows as JSON.
"use strict";
const url = process.argv[2], vm = require("vm");
const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;");

class Element extends EventTarget {
  constructor(tag) { super(); Object.assign(this, {tag, children: [], text: "", value: "", dataset: {}, options: [], style: {}, className: "", attributes: {}}); }
  set textContent(text) { this.children = []; this.text = String(text); }
  get textContent() { return this.text + this.children.map((one) => one.textContent).join(""); }
  append(...some) { this.children.push(...some); }
  replaceChildren(...some) { this.text = ""; this.children = some; this.options = some; }
  setAttribute(name, value) { this.attributes[name] = value; }
  focus() {}
  requestSubmit() { this.dispatchEvent(new Event("submit", {cancelable: true})); }
  get html() { return `<${this.tag} ${this.className}>${escaped(this.text)}${this.children.map((one) => one.html).join("")}`; }
}

(async () => {
  let isFull = false;
  const page = await (await fetch(url)).text(), found = {}, stored = new Map(), listeners = new EventTarget();
  for (const [, id] of page.matchAll(/id="(\w+)"/g)) found[id] = new Element("div");
  let hash = "";
  const location = {
    get hash() { return hash; },
    set hash(value) {
      const next = value ? "#" + value.replace(/^#/, "") : "";
      if (next === hash) return;
      hash = next;
      setTimeout(() => listeners.dispatchEvent(new Event("hashchange")));
    },
  };
  const context = vm.createContext({
    document: {getElementById: (id) => found[id], createElement: (tag) => new Element(tag), hidden: false},
    location, addEventListener: (...all) => listeners.addEventListener(...all),
    sessionStorage: {getItem: (key) => { if (isFull) throw new Error("SecurityError"); return stored.get(key) ?? null; }, setItem: (key, value) => { if (isFull) throw new Error("QuotaExceededError"); stored.set(key, value); }},
    fetch: (path, options) => fetch(new URL(path, url), {...options, headers: {...options.headers, Origin: new URL(url).origin}}),
    TextDecoderStream, TextEncoder, AbortController, console,
    setTimeout: (act, ms) => setTimeout(act, ms / 10),  // it looks ten times as often
  });
  vm.runInContext(page.split("<script>")[1].split("</script>")[0], context);
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  for await (const line of require("readline").createInterface({input: process.stdin})) {
    const {type, press, key, stop, meanwhile, other, full} = JSON.parse(line);
    isFull = !!full;
    if (key) found.key.value = key;
    if (press) found[press].dispatchEvent(new Event("click"));
    if (type) {
      found.text.value = type;
      found.box.requestSubmit();
      if (stop || meanwhile || other) {
        while (!found.talk.children.at(-1)?.textContent) await wait(20); // the reply has begun
        if (meanwhile) found.text.value = meanwhile;
        if (other) await fetch(new URL("v1/chat/completions", url), {method: "POST", body: JSON.stringify(other)});
        if (stop) found.stop.dispatchEvent(new Event("click"));
      }
      while (!found.stop.hidden) await wait(20);
    }
    await wait(100);
    console.log(JSON.stringify({
      talk: found.talk.children.map((one) => [one.className, one.textContent]), html: found.talk.html,
      said: found.said.textContent, counts: found.counts.textContent, hash,
      told: found.told.children.map((one) => one.textContent), full: found.full.children.map((one) => [one.className, one.style.flexGrow]),
      list: found.list.children.map((one) => one.textContent), disabled: !!found.text.disabled, typed: found.text.value, waits: !!found.send.disabled,
    }));
  }
  process.exit(0);
})();
