// Takes what the server pushes: a stream for each page that is seen, and what it has said so far.
// Nothing here draws.
"use strict";
const Streams = (() => {
  const { node } = Charts;
  const FIRST_MS = 100, MOST_MS = 1000, QUIET = 3;
  const link = document.getElementById("link");

  const say = (text, bad) => { if (link.textContent !== text) link.textContent = text; link.className = bad ? "bad" : ""; };

  const WORDS = {
    0: "The dashboard does not answer. Start it again: instep dashboard",
    401: "This browser has no session. Open the newest link that the terminal shows.",
  };

  // A tab in the background has no stream. One that breaks is opened again: at first at once, as a
  // server that was killed has a successor, and then each second.
  class Stream {
    constructor(query, take, missing) { Object.assign(this, { query, take, missing, source: null, tries: 0, over: false }); this.open(); }

    open() {
      if (this.source || this.over || document.hidden) return;
      this.source = new EventSource(`/api/stream?${this.query}`);
      this.source.onopen = () => { this.tries = 0; say("connected"); };
      this.source.onmessage = (event) => this.take(JSON.parse(event.data));
      this.source.onerror = () => this.lost();
    }

    close() {
      clearTimeout(this.later);
      if (this.source) this.source.close();
      this.source = null;
    }

    end() {
      this.over = true;
      this.close();
    }

    async lost() {
      this.close();
      const pause = Math.min(FIRST_MS * 2 ** this.tries++, MOST_MS) * (1 + Math.random() / 4);
      this.later = setTimeout(() => this.open(), pause);
      try {
        const answer = await fetch(`/api/alive?${this.query}`), about = await answer.json().catch(() => ({}));
        if (this.over) return;
        if (answer.status === 401) say(WORDS[401], true);
        else if (answer.status === 404) { say(""); this.missing(about.error || "It is not there."); }
      } catch {
        if (!this.over && this.tries >= QUIET) say(WORDS[0], true);
      }
    }
  }

  // What a stream has said so far.
  class Store {
    constructor() { this.sections = {}; this.charts = []; }

    take(message) {
      const { sections, gone = [], charts, points = [] } = message;
      if (message.whole) this.sections = {};
      for (const name of gone) delete this.sections[name];
      Object.assign(this.sections, sections);
      if (charts) this.charts = charts;
      for (const { chart, line, from, ...values } of points) {
        const target = this.charts[chart].lines[line];
        for (const name in values) { target[name].length = from; target[name].push(...values[name]); }
      }
      return new Set([...Object.keys(sections), ...(charts || points.length ? ["charts"] : [])]);
    }
  }

  // A page of one thing: it says what is wrong with it, and begins anew when it is right again.
  class Follower {
    constructor(what, query, show, again) {
      this.store = new Store();
      this.what = what;
      this.lacking = false;
      this.stream = new Stream(query, (message) => {
        const changed = this.store.take(message), { error } = this.store.sections;
        if (error) this.tell(`This ${what} cannot be read`, error.text);
        else if (this.lacking) again();
        else show(changed);
      }, (why) => this.tell(`This ${what} is not here`, `${why[0].toUpperCase()}${why.slice(1)} It appears on this page when it is there.`));
    }

    tell(title, why) {
      this.lacking = true;
      const all = node("a", "All runs");
      all.href = "#/";
      document.getElementById("main").replaceChildren(node("h1", title), node("p", why, "cause"), all);
    }

    get sections() { return this.store.sections; }
    get charts() { return this.store.charts; }
  }

  return { Follower, Store, Stream, WORDS, say };
})();
