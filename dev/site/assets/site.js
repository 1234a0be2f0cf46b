// What the pages of the site do beyond being read: steppers, keys in the program reader, and the pictures' controls.
(() => {
  for (const stepper of document.querySelectorAll(".stepper")) {
    const rows = [...stepper.querySelectorAll("tbody tr")], controls = document.createElement("div");
    controls.className = "controls";
    controls.innerHTML = `<button title="one back: left arrow">◀</button><button class="play" title="play or pause: space">Play</button>
      <button title="one on: right arrow">▶</button><input type="range" aria-label="event" min="0" max="${rows.length - 1}" value="0">`;
    const [back, play, on, slider] = controls.children;
    let at = 0, timer = null;
    const show = (to) => {
      rows[at].classList.remove("on");
      at = Math.max(0, Math.min(rows.length - 1, to));
      rows[at].classList.add("on");
      slider.value = at;
      if (timer && at === rows.length - 1) toggle();
    };
    const toggle = () => {
      if (!timer && at === rows.length - 1) show(0);
      timer = timer ? clearInterval(timer) : setInterval(() => show(at + 1), 700);
      play.textContent = timer ? "Pause" : "Play";
    };
    back.onclick = () => show(at - 1);
    on.onclick = () => show(at + 1);
    play.onclick = toggle;
    slider.oninput = () => show(+slider.value);
    stepper.onkeydown = (event) => {
      const act = { ArrowLeft: back.onclick, ArrowRight: on.onclick, " ": toggle }[event.key];
      if (!act || (event.key === " " && event.target.tagName === "BUTTON")) return;
      event.preventDefault();
      act();
    };
    stepper.classList.add("playing");
    stepper.querySelector("details").open = true;
    stepper.prepend(controls);
    show(0);
  }

  const hunks = [...document.querySelectorAll(".hunk")];
  if (hunks.length) {
    const go = (step) => {
      const line = 130; // just below what stays at the top
      const tops = hunks.map((hunk) => hunk.getBoundingClientRect().top);
      const at = step > 0 ? tops.findIndex((top) => top > line + 10) : tops.findLastIndex((top) => top < line - 10);
      if (at >= 0) hunks[at].scrollIntoView();
    };
    const folds = document.querySelectorAll(".reader details");
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
      if (event.key === "j") go(1);
      if (event.key === "k") go(-1);
      if (event.key === "o") {
        const open = ![...folds].some((fold) => fold.open);
        folds.forEach((fold) => { fold.open = open; });
      }
    });
    // A link to a line that is folded opens it.
    const reveal = () => {
      const target = location.hash && document.getElementById(location.hash.slice(1));
      const fold = target && target.closest("details");
      if (fold && !fold.open) { fold.open = true; target.scrollIntoView(); }
    };
    addEventListener("hashchange", reveal);
    reveal();
  }

  const embedded = document.getElementById("plan-data");
  if (embedded) {
    const plan = JSON.parse(embedded.textContent), form = document.querySelector(".controls");
    const parts = ["compute", "waiting for communication", "pipeline bubble", "AdamW"];
    const gb = (bytes) => (bytes / 1e9).toPrecision(3) + " GB";
    const ms = (seconds) => (seconds * 1e3).toPrecision(3) + " ms";
    const element = (tag, cls, text) => {
      const e = document.createElement(tag);
      if (cls) e.className = cls;
      if (text !== undefined) e.textContent = text;
      return e;
    };
    const legend = (names) => {
      const list = element("p", "legend");
      names.forEach((name, i) => {
        const item = element("span", "", name);
        item.prepend(element("i", `k${i}`));
        list.append(item);
      });
      return list;
    };
    const bar = (values, names, whole, say, title) => {
      const line = element("div", "bar");
      values.forEach((value, i) => {
        const part = element("span", `k${i}`);
        part.style.width = (100 * value) / whole + "%";
        part.title = `${names[i]}: ${say(value)}`;
        line.append(part);
      });
      line.append(element("b", "", title));
      return line;
    };
    const draw = () => {
      const value = (name) => {
        const input = form.elements[name];
        return input.type === "range" ? input.dataset.values.split(",")[input.value] : input.value;
      };
      const ranks = value("ranks"), found = plan.cases[`${value("model")}/${value("precision")}/${ranks}`];
      form.querySelector("output").textContent = ranks;
      const ways = Object.entries(found).filter(([key]) => value("program") === "all" || value("program") === key);
      const name = ([key, way]) => plan.ways[key] + (/ \d/.test(way.name) ? way.name.replace(/^\S+/, "") : "");
      const memory = element("div"), most = Math.max(...Object.values(found).map((way) => way.total));
      for (const entry of ways) {
        memory.append(element("div", "name", name(entry)));
        memory.append(bar(entry[1].bytes, plan.kinds, most * 1.15, gb, gb(entry[1].total)));
      }
      const time = element("div"), longest = Math.max(...Object.values(found).map((way) => way.time ? way.time[0] : 0));
      for (const entry of ways) {
        if (!entry[1].time) continue;
        const [seconds, compute, communication, exposed, bubble, rate] = entry[1].time;
        const spent = [compute, exposed, bubble, Math.max(0, seconds - compute - exposed - bubble)];
        time.append(element("div", "name", name(entry)));
        const line = bar(spent, parts, longest * 1.45, ms, `${ms(seconds)}, ${Math.round(rate).toLocaleString("en")} tokens/s per GPU`);
        line.title = `communication: ${ms(communication)}, of which ${ms(exposed)} are not hidden by compute`;
        time.append(line);
      }
      document.getElementById("memory").replaceChildren(element("h2", "", `Memory per rank on ${ranks} ranks`), legend(plan.kinds), memory);
      document.getElementById("time").replaceChildren(element("h2", "", `Time of one step of ${plan.tokens} tokens`), legend(parts), time);
    };
    form.hidden = false;
    form.addEventListener("input", draw);
    draw();
  }
})();
