"use strict";
// The reference, made from /openapi.json.

const name = schema => schema.$ref ? schema.$ref.split("/").pop() : schema.anyOf ? schema.anyOf.map(name).join(" or ")
  : schema.type === "array" ? "[" + name(schema.items || {}) + "]" : schema.type || "any";
ask("openapi.json").then(answer => {
  if (answer.ok) return answer.json();
  add(document.getElementById("reference"), "p", "Give the API key on the status page first.", "bad");
  throw new Error("status " + answer.status);
}).then(api => {
  const box = document.getElementById("reference");
  add(box, "pre", api.info.description);
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, o] of Object.entries(methods)) {
    const d = add(box, "details");
    add(d, "summary", method.toUpperCase() + " " + path + "  –  " + o.summary);
    for (const p of o.parameters)
      add(d, "div", p.in + " " + p.name + ": " + name(p.schema) + (p.required ? "" : ", optional"));
    if (o.requestBody) for (const [type, content] of Object.entries(o.requestBody.content))
      add(d, "div", "body, " + type + ": " + name(content.schema));
    for (const [status, a] of Object.entries(o.responses)) for (const [type, content] of Object.entries(a.content))
      add(d, "div", status + ", " + type + ": " + name(content.schema) + " – " + a.description, "dim");
  }
  add(box, "h2", "Structures");
  for (const [title, schema] of Object.entries(api.components.schemas)) {
    const d = add(box, "details");
    add(d, "summary", title);
    if (schema.description) add(d, "p", schema.description);
    for (const [field, s] of Object.entries(schema.properties || {}))
      add(d, "div", field + ": " + name(s) + ((schema.required || []).includes(field) ? "" : ", optional"));
  }
  document.body.dataset.ready = "yes";
});
