// Model text as nodes. Text only becomes text nodes: no HTML is parsed, and no links or images are made.

export function element(name, options = {}, ...children) {
  const { attributes, ...rest } = options;
  const made = Object.assign(document.createElement(name), rest);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/* A picture next to a button's label: a symbol of index.html. */
export function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg"), use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  made.setAttribute("class", "ic");
  made.setAttribute("aria-hidden", "true");
  made.append(use);
  return made;
}

// A long line that ends a sentence: the models of stories separate paragraphs by one newline.
const PROSE = /^.{60,}[.!?:"'\u201d\u2019)\u2026] *$/;
/* Light Markdown: fenced code, headings, lists, quotes, paragraphs; code, bold and italic within them. */
export function markdown(text) {
  const found = document.createDocumentFragment(), lines = text.replace(/\r\n?/g, "\n").split("\n");
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) found.append(element("p", {}, ...inline(paragraph.join("\n"))));
    paragraph = [];
  };
  const add = (line) => { paragraph.push(line); if (PROSE.test(line)) flush(); };
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    let match;
    if ((match = line.match(/^ {0,3}(`{3,}|~{3,})/))) {
      flush();
      const code = [];
      while (++i < lines.length && !lines[i].trimStart().startsWith(match[1])) code.push(lines[i]);
      found.append(element("pre", { tabIndex: 0 }, element("code", { textContent: code.join("\n") })));
    } else if ((match = line.match(/^ {0,3}(#{1,6}) +(.+)$/))) {
      flush();
      found.append(element(match[1].length === 1 ? "h3" : "h4", {}, ...inline(match[2])));
    } else if ((match = line.match(/^ {0,3}([-*+]|\d{1,9}[.)]) +/))) {
      flush();
      const ordered = /\d/.test(match[1]), list = element(ordered ? "ol" : "ul", ordered ? { start: parseInt(match[1], 10) } : {});
      const kind = ordered ? /^ {0,3}\d{1,9}[.)] +/ : /^ {0,3}[-*+] +/;
      for (; i < lines.length && kind.test(lines[i]); i++) list.append(element("li", {}, ...inline(lines[i].replace(kind, ""))));
      i--;
      found.append(list);
    } else if (/^ {0,3}> ?/.test(line)) {
      flush();
      const quote = [];
      for (; i < lines.length && /^ {0,3}> ?/.test(lines[i]); i++) quote.push(lines[i].replace(/^ {0,3}> ?/, ""));
      i--;
      found.append(element("blockquote", {}, ...inline(quote.join("\n"))));
    } else if (!line.trim()) flush();
    else add(line);
  }
  flush();
  return found;
}

function inline(text) {
  const found = [], pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|(?<![\w*])\*([^*\s][^*\n]*)\*(?![\w*])/g;
  let from = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    const [whole, code, bold, italic] = match;
    found.push(code !== undefined ? element("code", { textContent: code }) : element(bold !== undefined ? "strong" : "em", { textContent: bold ?? italic }));
    from = match.index + whole.length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

/* A token in visible form: white space and tokens without text get a sign. */
export function visible(token) {
  return token.text === "" ? `#${token.id}` : token.text.replace(/\n/g, "\u21b5").replace(/\t/g, "\u21e5").replace(/^ +| +$/g, (spaces) => "\u00b7".repeat(spaces.length));
}

export const percent = (share) => share >= 0.9995 ? "100 %" : share >= 0.1 ? `${(100 * share).toFixed(1)} %` : share >= 0.0005 ? `${(100 * share).toFixed(2)} %` : "< 0.05 %";
