// The Markdown that models write, as nodes of the page. A text becomes a tree of plain objects first (`parse`, which
// touches no page), then elements of the tags below (`show`). What is not Markdown is text: HTML of a model is never
// parsed as HTML. The time is linear in the text's length, whatever it is: an answer is shown anew as it grows.

const MAX_DEPTH = 8; // lists and quotes in one another; deeper ones are text
const MAX_OPEN = 16; // marks of emphasis that wait for their ends
const FENCE = /^( {0,3})(`{3,}|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})([.)]))( {1,4}(?=\S)| *$| )/;
const COLUMN = /^:?-+:?$/;
const WORD = /[\p{L}\p{N}]/u;
const SIGN = /[\p{P}\p{S}]/u;
// Hosts are ASCII without a user's name before them, so that they are what they look like.
const LINK = /^https?:\/\/(?:[a-z0-9-]+(?:\.[a-z0-9-]+)*|\[[0-9a-f:.]+\])(?::\d{1,5})?(?:[/?#][^\s<>"\\]*)?$/i;
const MARKS =
  /\\[\\`*_~#|!.>+-]|`+|\*+|_+|~~|(!?)\[([^[\]]*)\]\(([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)(?: +"[^"\n]*")?\)|<(https?:[^\s<>]*)>|https?:\/\/[^\s<>"`]+/gi;

// A node is a text or {tag, children} with `href` and `host` (a), `start` (ol), `language` (pre), `align` (th, td).
const element = (tag, children, more) => ({ tag, children, ...more });

// The blocks of a text, each with the part of it that it is made of.
export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  return blocks(lines.map((line) => line.replace(/^[ \t]+/, (space) => space.replaceAll("\t", "    "))), 0);
}

// ---------------------------------------------------------------- blocks

function blocks(lines, depth) {
  const all = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const [node, next] =
      fence(lines, i) ||
      heading(lines, i) ||
      rule(lines, i) ||
      (depth < MAX_DEPTH && (quote(lines, i, depth) || list(lines, i, depth))) ||
      table(lines, i) ||
      paragraph(lines, i, depth);
    all.push({ source: lines.slice(i, next).join("\n"), node });
    i = next;
  }
  return all;
}

const inside = (lines, depth) => blocks(lines, depth + 1).map((block) => block.node);
const indentOf = (line) => line.length - line.trimStart().length;

function isRule(line) {
  const signs = line.replaceAll(" ", "");
  return indentOf(line) < 4 && signs.length >= 3 && "*-_".includes(signs[0]) && signs === signs[0].repeat(signs.length);
}

function isFence(line) {
  const found = FENCE.exec(line);
  return found && !(found[2][0] === "`" && found[3].includes("`")) ? found : null;
}

function isBlock(line, depth) {
  // Whether a line ends the paragraph before it.
  if (isFence(line) || HEADING.test(line) || isRule(line)) return true;
  if (depth >= MAX_DEPTH) return false;
  const item = ITEM.exec(line);
  return QUOTE.test(line) || (item !== null && line.length > item[0].length && (!item[3] || item[3] === "1"));
}

function fence(lines, i) {
  const found = isFence(lines[i]);
  if (!found) return null;
  const [, indent, marks, info] = found;
  const code = [];
  let next = i + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next].trim();
    if (line.length >= marks.length && line === marks[0].repeat(line.length)) break;
    code.push(lines[next].slice(Math.min(indent.length, indentOf(lines[next]))));
  }
  const language = info.trim().split(" ", 1)[0];
  return [element("pre", [code.join("\n")], { language }), next + 1]; // without its end it goes on to the text's
}

function heading(lines, i) {
  const found = HEADING.exec(lines[i]);
  if (!found) return null;
  const text = (found[2] || "").trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  const title = end === 0 || text[end - 1] === " " ? text.slice(0, end) : text;
  return [element(`h${Math.min(6, found[1].length + 2)}`, inline(title.trim())), i + 1]; // h1 and h2 are the page's
}

function rule(lines, i) {
  return isRule(lines[i]) ? [element("hr", []), i + 1] : null;
}

function quote(lines, i, depth) {
  let next = i;
  while (next < lines.length && QUOTE.test(lines[next])) next += 1;
  if (next === i) return null;
  const content = lines.slice(i, next).map((line) => line.replace(QUOTE, ""));
  return [element("blockquote", inside(content, depth)), next];
}

function list(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  if (!first) return null;
  const base = first[1].length;
  const kind = first[4] || first[2];
  const items = [];
  let offset = 0; // where the item's text begins
  let blank = 0;
  let next = i;
  for (; next < lines.length; next += 1) {
    const line = lines[next];
    const indent = indentOf(line);
    const item = indent < base + 2 && !isRule(line) ? ITEM.exec(line) : null;
    if (!line.trim()) {
      blank += 1;
    } else if (item && (item[4] || item[2]) === kind) {
      items.push([line.slice(item[0].length)]);
      offset = item[0].length;
      blank = 0;
    } else if (next > i && (indent >= base + 2 || (!blank && !isBlock(line, depth)))) {
      for (; blank; blank -= 1) items.at(-1).push("");
      items.at(-1).push(line.slice(Math.min(indent, offset)));
    } else {
      break;
    }
  }
  const children = items.map((content) => element("li", inside(content, depth)));
  return [first[3] ? element("ol", children, { start: Number(first[3]) }) : element("ul", children), next - blank];
}

function cells(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  if (row.endsWith("|") && !row.endsWith("\\|")) row = row.slice(0, -1);
  return row.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines, i) {
  if (!lines[i].includes("|") || !lines[i + 1]?.includes("-")) return null;
  const titles = cells(lines[i]);
  const columns = cells(lines[i + 1]);
  if (titles.length !== columns.length || !columns.every((column) => COLUMN.test(column))) return null;
  const aligns = columns.map((column) => (column.endsWith(":") ? (column.startsWith(":") ? "center" : "right") : ""));
  const row = (tag, texts) =>
    element("tr", texts.slice(0, aligns.length).map((text, j) => element(tag, inline(text), { align: aligns[j] })));
  const rows = [];
  let next = i + 2;
  for (; next < lines.length && lines[next].includes("|"); next += 1) rows.push(row("td", cells(lines[next])));
  return [element("table", [element("thead", [row("th", titles)]), element("tbody", rows)]), next];
}

function paragraph(lines, i, depth) {
  let next = i + 1;
  while (next < lines.length && lines[next].trim() && !isBlock(lines[next], depth)) next += 1;
  const text = lines.slice(i, next).map((line) => line.trim());
  return [element("p", inline(text.join("\n"))), next];
}

// ---------------------------------------------------------------- inside a line

function inline(text, links = true) {
  const emphasis = new Emphasis();
  const runs = backticks(text);
  const marks = new RegExp(MARKS);
  let end = 0;
  for (let found = marks.exec(text); found; found = marks.exec(text)) {
    const mark = found[0];
    emphasis.add(text.slice(end, found.index));
    end = marks.lastIndex;
    if (mark[0] === "\\") {
      emphasis.add(mark[1]);
    } else if (mark[0] === "`") {
      const close = runs.closing(mark.length, end);
      if (close < 0) {
        emphasis.add(mark);
      } else {
        emphasis.add(element("code", [text.slice(end, close).replace(/^ (.*[^ ].*) $/s, "$1")]));
        end = close + mark.length;
      }
    } else if ("*_~".includes(mark[0])) {
      emphasis.mark(mark, text[found.index - 1], text[end]);
    } else if (found[3] !== undefined) {
      const label = found[2] || (found[1] ? "image" : found[3]);
      emphasis.add((links && link(found[3], inline(label, false), true)) || mark);
    } else {
      const target = found[4] || mark.replace(/[.,;:!?'*_~)\]]{1,99}$/, "");
      const node = links && link(target, [target], false);
      emphasis.add(node || mark);
      if (node && !found[4]) end = found.index + target.length;
    }
    marks.lastIndex = end;
  }
  emphasis.add(text.slice(end));
  return emphasis.end();
}

function link(href, children, showsHost) {
  if (!LINK.test(href)) return null;
  return element("a", children, { href, host: showsHost ? href.split(/[/?#]/, 3)[2] : "" });
}

function backticks(text) {
  // Finds the end of code: the next run of as many backticks. Asked with growing places.
  const places = new Map();
  for (const run of text.matchAll(/`+/g)) {
    if (!places.has(run[0].length)) places.set(run[0].length, { all: [], next: 0 });
    places.get(run[0].length).all.push(run.index);
  }
  return {
    closing(length, from) {
      const runs = places.get(length);
      if (!runs) return -1; // a part of a run whose first one is escaped
      while (runs.next < runs.all.length && runs.all[runs.next] < from) runs.next += 1;
      return runs.next < runs.all.length ? runs.all[runs.next] : -1;
    },
  };
}

class Emphasis {
  constructor() {
    this.open = [{ sign: "", count: 0, children: [] }]; // the outermost, then one for each mark that waits for its end
  }

  add(node) {
    if (node !== "") this.open.at(-1).children.push(node);
  }

  mark(mark, before = " ", after = " ") {
    const sign = mark[0];
    const opens = !/\s/.test(after) && (!SIGN.test(after) || !WORD.test(before)) && !(sign === "_" && WORD.test(before));
    const closes = !/\s/.test(before) && (!SIGN.test(before) || !WORD.test(after)) && !(sign === "_" && WORD.test(after));
    let count = mark.length;
    if (count > 3) return this.add(mark);
    while (closes && count && this.open.some((one) => one.sign === sign)) {
      while (this.open.at(-1).sign !== sign) this.flatten();
      const one = this.open.at(-1);
      const used = Math.min(2, count, one.count);
      const node = element(sign === "~" ? "del" : used === 2 ? "strong" : "em", one.children);
      count -= used;
      one.count -= used;
      one.children = [node];
      if (!one.count) {
        this.open.pop();
        this.add(node);
      }
    }
    if (!count) return;
    if (opens && this.open.length < MAX_OPEN) this.open.push({ sign, count, children: [] });
    else this.add(sign.repeat(count));
  }

  flatten() {
    // The innermost mark has no end: it is text.
    const { sign, count, children } = this.open.pop();
    this.add(sign.repeat(count));
    for (const child of children) this.add(child);
  }

  end() {
    while (this.open.length > 1) this.flatten();
    return this.open[0].children;
  }
}

// ---------------------------------------------------------------- the page

const sources = new WeakMap(); // element -> the part of the text that it was made of

// Makes `box` show the text; elements whose part of it is as before stay.
export function show(box, text) {
  const all = parse(text);
  all.forEach(({ source, node }, i) => {
    const old = box.children[i];
    if (old && sources.get(old) === source) return;
    const fresh = build(node);
    sources.set(fresh, source);
    if (old) old.replaceWith(fresh);
    else box.append(fresh);
  });
  while (box.children.length > all.length) box.lastElementChild.remove();
}

function build(node) {
  if (typeof node === "string") return document.createTextNode(node);
  const made = document.createElement(node.tag);
  if (node.tag === "pre") return codeBlock(made, node);
  for (const child of node.children) made.append(build(child));
  if (node.tag === "a") {
    made.href = node.href;
    made.target = "_blank";
    made.rel = "noopener noreferrer nofollow";
    if (node.host) made.append(labelled("span", "host", ` (${node.host})`));
  }
  if (node.start !== undefined) made.start = node.start;
  if (node.align) made.className = node.align;
  if (node.tag !== "table") return made;
  const scroller = labelled("div", "scroller", "");
  scroller.append(made);
  return scroller;
}

function labelled(tag, name, text) {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

function codeBlock(pre, { language, children: [text] }) {
  const box = labelled("div", "code", "");
  const bar = labelled("div", "bar", "");
  bar.append(labelled("span", "", language || "code"));
  if (navigator.clipboard) {
    const button = labelled("button", "", "Copy");
    button.type = "button";
    button.addEventListener("click", () =>
      navigator.clipboard.writeText(text).then(
        () => (button.textContent = "Copied"),
        () => (button.textContent = "Not allowed"),
      ),
    );
    bar.append(button);
  }
  pre.append(labelled("code", "", text));
  pre.tabIndex = 0; // it scrolls sideways
  box.append(bar, pre);
  return box;
}
