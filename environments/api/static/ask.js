"use strict";
// What both pages of the rollout API do: ask it, with the key that was typed once, and put text into the document.

const key = sessionStorage.getItem("key");
const ask = path => fetch(path, {headers: key ? {Authorization: "Bearer " + key} : {}});

function add(parent, tag, text, cls) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}
