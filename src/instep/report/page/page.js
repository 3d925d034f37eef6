// Has the curves of a report drawn from the data in the page, and hashes copied.
"use strict";
(() => {
  const room = document.getElementById("curves");
  if (room) {
    const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
    const board = new Charts.Board(room, runs), root = document.documentElement;
    board.show(charts);
    // paper is light, whatever the screen is
    addEventListener("beforeprint", () => { root.dataset.printed = ""; board.again(); });
    addEventListener("afterprint", () => { delete root.dataset.printed; board.again(); });
  }
  for (const button of document.querySelectorAll("button"))
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(button.previousElementSibling);
      document.execCommand("copy");
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
})();
