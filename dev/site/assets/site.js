// What the pages of the site do beyond being read: keys in the program reader, and the pictures' controls.
(() => {
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
    const parts = ["computing", "waiting for communication", "sums inside blocks", "bubble", "AdamW"];
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
      names.forEach((name, i) => list.append(element("span", `k${i}`), name));
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
      const time = element("div");
      for (const entry of ways) {
        if (!entry[1].time) continue;
        const [seconds, compute, communication, exposed, bubble, tp] = entry[1].time;
        const spent = [compute, exposed, tp, bubble, Math.max(0, seconds - compute - exposed - tp - bubble)];
        const hidden = Math.max(0, communication - exposed);
        time.append(element("div", "name", name(entry)));
        const lanes = element("div", "lanes");
        lanes.append(bar(spent, parts, seconds * 1.15, ms, ms(seconds)));
        const sent = element("div", "bar thin");
        const gap = element("span"), there = element("span", "k5");
        gap.style.width = (100 * Math.max(0, compute - hidden)) / (seconds * 1.15) + "%";
        there.style.width = (100 * Math.min(communication, seconds)) / (seconds * 1.15) + "%";
        there.title = `communication: ${ms(communication)}, of which ${ms(exposed)} are waited for`;
        sent.append(gap, there);
        lanes.append(sent);
        time.append(lanes);
      }
      document.getElementById("memory").replaceChildren(element("h2", "", "What a rank keeps"), legend(plan.kinds), memory);
      document.getElementById("time").replaceChildren(element("h2", "", "A step's time, each step as wide as the next"),
        legend([...parts, "communication, as long as it lasts"]), time);
    };
    form.hidden = false;
    form.addEventListener("input", draw);
    draw();
  }
})();
