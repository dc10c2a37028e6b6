// Training rollouts: a step, its groups, and tokens coloured by what one chooses.
const COLOURS = {
  difference: { label: "log-probability difference", caption: "|training - rollout|, nats", of: (rollout, i) => Math.abs(rollout.old_logprobs[i] - rollout.rollout_logprobs[i]), needs: ["old_logprobs", "rollout_logprobs"] },
  ratio: { label: "ratio", caption: "|log ratio| of training over rollout; blue where training finds the token less probable", of: (rollout, i) => Math.log(rollout.ratio[i]), needs: ["ratio"] },
  flipped: { label: "flipped routes", caption: "a routing difference can have changed the log-probability", of: (rollout, i) => rollout.flipped[i], needs: ["flipped"] },
  none: { label: "no colour", caption: "", of: () => 0, needs: [] },
};
const samples = { step: null, colour: null, full: 1 };

function startSamples() {
  const root = document.getElementById("rollouts");
  if (!root || !PAGE.rollouts.length) return;
  const steps = [...new Set(PAGE.rollouts.map((rollout) => rollout.step))];
  samples.step = steps[steps.length - 1];
  const usable = Object.keys(COLOURS).filter((name) => PAGE.rollouts.some((rollout) => COLOURS[name].needs.every((key) => rollout[key])));
  samples.colour = usable[0];
  const select = make("select", { id: "rollout-step", "aria-label": "Step of the rollouts" });
  for (const step of steps) select.append(make("option", { value: `${step}` }, `step ${step}`));
  select.value = `${samples.step}`;
  select.addEventListener("change", () => { samples.step = Number(select.value); showRollouts(); });
  const colours = make("span", { class: "switch", role: "group", "aria-label": "Colour of the tokens" }, "Colour tokens by ");
  for (const name of usable) {
    const button = make("button", { type: "button", "data-colour": name, "aria-pressed": `${name === samples.colour}` }, COLOURS[name].label);
    button.addEventListener("click", () => {
      samples.colour = name;
      for (const other of colours.querySelectorAll("button")) other.setAttribute("aria-pressed", `${other === button}`);
      showRollouts();
    });
    colours.append(button);
  }
  root.append(
    make("div", { class: "controls" }, make("label", {}, "Show ", select), colours, make("span", { id: "token-scale" })),
    make("div", { id: "rollout-cards", class: "samples" }),
    make("div", { id: "token-tip" }),
  );
  showRollouts();
}

function showRollouts() {
  const shown = PAGE.rollouts.filter((rollout) => rollout.step === samples.step);
  const colour = COLOURS[samples.colour];
  const values = shown.flatMap((rollout) => tokenValues(rollout, colour)).filter(Number.isFinite);
  samples.full = samples.colour === "flipped" ? 1 : values.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-6);
  const scale = document.getElementById("token-scale");
  scale.replaceChildren();
  if (colour.caption && !values.length) scale.append("not measured in this step");
  else if (colour.caption) scale.append("0", make("i", { class: "ramp" }), `${digits(samples.full, 3)}  ${colour.caption}`);
  document.getElementById("rollout-cards").replaceChildren(...shown.map(rolloutCard));
}

function tokenValues(rollout, colour) {
  return rollout.tokens.map((_, i) => (colour.needs.every((key) => rollout[key] && rollout[key][i] !== null) ? colour.of(rollout, i) : NaN));
}

function rolloutCard(rollout) {
  const fact = (name, value) => make("span", {}, `${name} `, make("b", {}, value));
  const number = (value) => (value === null ? "none" : digits(value, 4));
  const header = make("header", {});
  if (rollout.group !== null) header.append(fact("group", `${rollout.group}`));
  if (rollout.answer !== "") header.append(fact("answer", rollout.answer));
  header.append(fact("advantage", number(rollout.advantage)));
  for (const [name, value] of Object.entries(rollout.reward_parts)) header.append(fact(name, number(value)));
  if (rollout.finish_reason !== "stop") header.append(make("span", { class: "cut" }, rollout.finish_reason === "length" ? "cut at the limit" : rollout.finish_reason));
  header.append(make("span", { class: rollout.reward > 0 ? "reward positive" : "reward" }, rollout.reward === null ? "reward failed" : `reward ${number(rollout.reward)}`));
  const card = make("article", {}, header, make("pre", { class: "prompt" }, rollout.prompt), tokenText(rollout));
  if (rollout.num_tokens > rollout.tokens.length) card.append(make("p", { class: "caption" }, `${rollout.num_tokens - rollout.tokens.length} more tokens are not on this page.`));
  return card;
}

function tokenText(rollout) {
  if (!rollout.tokens.length) return make("pre", {}, rollout.response);
  const values = tokenValues(rollout, COLOURS[samples.colour]);
  const text = make("pre", { class: "tokens", tabindex: "0", "aria-label": "Response. Arrow keys move from token to token." });
  rollout.tokens.forEach((token, i) => {
    const span = make("span", { "data-token": `${i}` }, token === "" ? "\u2205" : token);
    if (values[i]) span.style.background = `rgba(${color(values[i] < 0 ? "token-low" : "token")}, ${(0.85 * Math.min(1, Math.abs(values[i]) / samples.full)).toFixed(3)})`;
    if (rollout.loss_mask && rollout.loss_mask[i] === 0) span.classList.add("masked");
    text.append(span);
  });
  text.addEventListener("mousemove", (event) => {
    const token = event.target.dataset?.token;
    if (token === undefined) hideTokenTip(); else showTokenTip(rollout, Number(token), event.clientX, event.clientY);
  });
  text.addEventListener("mouseleave", hideTokenTip);
  text.addEventListener("blur", () => { hideTokenTip(); text.querySelector(".current")?.classList.remove("current"); });
  text.addEventListener("keydown", (event) => moveToken(rollout, text, event));
  return text;
}

function moveToken(rollout, text, event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  const current = text.querySelector(".current");
  const index = current ? Math.min(rollout.tokens.length - 1, Math.max(0, Number(current.dataset.token) + by)) : 0;
  current?.classList.remove("current");
  const span = text.children[index];
  span.classList.add("current");
  const box = span.getBoundingClientRect();
  showTokenTip(rollout, index, box.left, box.bottom);
  announce(tokenFacts(rollout, index).map(([name, value]) => `${name} ${value}`).join(", "));
}

function tokenFacts(rollout, i) {
  const facts = [["token", JSON.stringify(rollout.tokens[i])]];
  const add = (name, values, write = (value) => digits(value, 5)) => { if (values && values[i] !== null) facts.push([name, write(values[i])]); };
  add("rollout log-probability", rollout.rollout_logprobs);
  add("training log-probability", rollout.old_logprobs);
  if (rollout.rollout_logprobs && rollout.old_logprobs && rollout.rollout_logprobs[i] !== null && rollout.old_logprobs[i] !== null) facts.push(["difference", digits(rollout.old_logprobs[i] - rollout.rollout_logprobs[i], 4)]);
  add("ratio", rollout.ratio);
  add("flipped", rollout.flipped, (value) => (value ? "yes" : "no"));
  add("in the loss", rollout.loss_mask, (value) => (value ? "yes" : "no"));
  return facts;
}

function showTokenTip(rollout, i, x, y) {
  const box = document.getElementById("token-tip");
  const rows = tokenFacts(rollout, i).map(([name, value]) => make("tr", {}, make("td", {}, name), make("td", { class: "figure" }, value)));
  box.replaceChildren(make("div", { class: "tip" }, make("table", {}, ...rows)));
  box.style.display = "block";
  box.style.left = `${Math.max(4, Math.min(x + 12, window.innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${y + 16 + box.offsetHeight > window.innerHeight ? y - box.offsetHeight - 12 : y + 16}px`;
}

function hideTokenTip() {
  document.getElementById("token-tip").style.display = "none";
}
